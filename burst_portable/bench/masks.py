"""Define the masks of the benchmark: sixteen patterns of the kinds that long-context training uses.

- full, causal: all pairs; a token and all earlier ones.
- full_sliding, causal_sliding: a window to both sides, or to earlier tokens only.
- full_document, causal_document: packed documents of unequal lengths, bidirectional or causal.
- sliding_document: causal documents with a window inside each.
- block_causal: equal blocks; a token sees its block and all earlier ones.
- block_causal_document: the same inside each of two documents.
- share_question: one question, and up to four answers that see it and themselves; one token is only a question.
- prefix_lm: the first tokens are visible to all; the rest is causal.
- prefix_lm_document: the same inside each document.
- global_sliding: a window, and first tokens that see all tokens and that all tokens see.
- sink_sliding: a causal window, and first tokens that all later ones see.
- block_sparse, variable_block_sparse: a block sees itself and others at random, a fifth of all; equal or random sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from burst_portable.mask import Mask, Region

_SHARES = (1, 6, 2, 13, 4, 3, 27, 8)  # of the length, in 64ths: documents of unequal lengths


def cu_seqlens(length: int) -> list[int]:
    """Return cumulative lengths of documents of unequal lengths."""
    ends = {length * total // sum(_SHARES) for total in accumulate(_SHARES)}
    return [0, *sorted(ends - {0})]


def _sequences(length: int) -> list[int]:
    """Return the lengths of a question of a quarter of the sequence, and of up to four answers."""
    question = max(1, length // 4)
    cuts = sorted({question + (length - question) * i // 4 for i in range(5)})
    return [question, *(b - a for a, b in pairwise(cuts))]


def _share_question(length: int) -> Mask:
    question, *answers = _sequences(length)
    return Mask.share_question([question, *answers]) if answers else Mask.causal()


def _prefix_documents(length: int) -> Mask:
    regions: list[Region] = []
    for a, b in pairwise(cu_seqlens(length)):
        prefix = a + max(1, (b - a) // 4)
        regions.append(Region(a, b, a, prefix))
        if prefix < b:
            regions.append(Region(prefix, b, prefix, b, lo=0))
    return Mask(tuple(regions), "prefix_lm_document")


def _block_causal_documents(length: int) -> Mask:
    regions: list[Region] = []
    middle = max(1, length * 3 // 8)
    for a, b in ((0, middle), (middle, length)):
        block = max(1, (b - a) // 8)
        regions += [Region(q, min(q + block, b), a, min(q + block, b)) for q in range(a, b, block)]
    return Mask(tuple(regions), "block_causal_document")


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask.full(),
    "causal": lambda n: Mask.causal(),
    "full_sliding": lambda n: Mask.window(n // 16, n // 16),
    "causal_sliding": lambda n: Mask.window(n // 8),
    "full_document": lambda n: Mask.documents(cu_seqlens(n), causal=False),
    "causal_document": lambda n: Mask.documents(cu_seqlens(n)),
    "sliding_document": lambda n: Mask.documents(cu_seqlens(n), window=n // 16),
    "block_causal": lambda n: Mask.block_causal([*range(0, n, max(1, n // 16)), n]),
    "block_causal_document": _block_causal_documents,
    "share_question": _share_question,
    "prefix_lm": lambda n: Mask.prefix_lm(max(1, n // 4)),
    "prefix_lm_document": _prefix_documents,
    "global_sliding": lambda n: Mask.global_window(max(1, n // 32), n // 16, n // 16),
    "sink_sliding": lambda n: Mask.sink_window(max(1, n // 32), n // 8),
    "block_sparse": lambda n: Mask.block_sparse(n, max(1, n // 16), 20),
    "variable_block_sparse": lambda n: Mask.block_sparse(n, max(1, n // 16), 20, variable=True),
}
"""A mask for a length, by name."""


def named_mask(name: str, length: int) -> Mask:
    """Return a mask of `MASKS`, or that of a short form as `Mask.parse` reads it, for a sequence of `length` tokens.

    Raises:
        MaskError: If `name` is neither, or the mask has positions past the end.
    """
    mask = MASKS[name](length) if name in MASKS else Mask.parse(name, length)
    mask.check_lengths(length, length)
    return mask
