"""Define masks: the pairs of visible queries and keys, as disjoint regions of global positions.

A `Mask` is a tuple of regions that do not overlap, the same for every head and batch row. An attention is a sum over
regions, in which no pair counts twice. Positions are global: `layout` assigns them to ranks, and only `planning.tiles`
combines both. A region is a box, and a band across it along the diagonal::

    q_start 2, q_stop 7             k 0 1 2 3 4 5 6
    k_start 1, k_stop 6         q 2     # # . . .          # is visible: lo <= q - k <= hi
    lo 0, hi 2                    3     # # # . .
                                  4     . # # # .
                                  5     . . # # #
                                  6     . . . # #
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Any

from burst_portable.errors import MaskError, shown, unknown_name
from burst_portable.utils.values import as_int, hide_dataclass, parse_int, size

_k_start = attrgetter("k_start")
UNBOUNDED = 1 << 60
"""End of an unlimited range; also, with either sign, the bound of an unlimited band."""


def band_area(rows: int, columns: int, lo: int, hi: int) -> int:
    """Return the number of cells (i, j) of a rows x columns box with lo <= i - j <= hi, in closed form."""
    return _up_to(rows, columns, hi) - _up_to(rows, columns, lo - 1) if lo <= hi else 0


def _up_to(rows: int, columns: int, bound: int) -> int:
    """Return the number of cells with i - j <= bound."""
    if bound <= -columns:
        return 0
    if bound >= rows - 1:
        return rows * columns
    # Column j has clamp(bound + j + 1, 0, rows) cells: none, then a ramp, then all rows.
    start, stop = max(0, -bound - 1), min(columns, rows - bound - 1)
    return (stop - start) * (2 * bound + start + 1 + stop) // 2 + rows * (columns - stop)


@dataclass(frozen=True, slots=True)
class Region:
    """Queries [q_start, q_stop) see keys [k_start, k_stop) if lo <= q - k <= hi. All positions are global."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    def __post_init__(self) -> None:
        for name in ("q_start", "q_stop", "k_start", "k_stop", "lo", "hi"):
            number = as_int(getattr(self, name))
            if number is None or abs(number) > UNBOUNDED:
                got = shown(getattr(self, name))
                raise MaskError(f"{name} of a region must be an int", got=got, allowed="at most 2**60")
            object.__setattr__(self, name, number)
        if not (0 <= self.q_start < self.q_stop and 0 <= self.k_start < self.k_stop and self.lo <= self.hi):
            raise MaskError("a region is empty or starts before 0", got=self, allowed="0 <= start < stop and lo <= hi")

    def overlaps(self, other: Region) -> bool:
        """Return whether any pair (q, k) is in both regions, in closed form."""
        q_start, q_stop = max(self.q_start, other.q_start), min(self.q_stop, other.q_stop)
        k_start, k_stop = max(self.k_start, other.k_start), min(self.k_stop, other.k_stop)
        if q_start >= q_stop or k_start >= k_stop:
            return False
        lo, hi = max(self.lo, other.lo, q_start - k_stop + 1), min(self.hi, other.hi, q_stop - 1 - k_start)
        return lo <= hi

    def num_pairs(self, q_length: int, k_length: int) -> int:
        """Return the number of visible pairs in a sequence of these lengths."""
        rows, columns = min(self.q_stop, q_length) - self.q_start, min(self.k_stop, k_length) - self.k_start
        offset = self.q_start - self.k_start
        return band_area(rows, columns, self.lo - offset, self.hi - offset) if rows > 0 and columns > 0 else 0

    def rows(self, length: int) -> tuple[int, int]:
        """Return the range [start, stop) of queries that see one of its keys, in a sequence of `length` tokens."""
        if self.k_start >= length:
            return 0, 0
        past = min(self.q_stop, min(self.k_stop, length) + self.hi, length)
        return max(self.q_start, self.k_start + self.lo), past

    def __str__(self) -> str:
        def bound(value: int) -> str:
            return "…" if abs(value) >= UNBOUNDED else str(value)

        band = "" if (self.lo, self.hi) == (-UNBOUNDED, UNBOUNDED) else f" {bound(self.lo)}≤q-k≤{bound(self.hi)}"
        return f"q[{self.q_start}:{bound(self.q_stop)}] k[{self.k_start}:{bound(self.k_stop)}]{band}"


def first_overlap(regions: Iterable[Region]) -> tuple[Region, Region] | None:
    """Return the first overlapping pair of regions sorted by q_start, or None: a sweep over q, bisection over k."""
    open_: list[Region] = []  # regions that may share a query with later ones, sorted by k_start
    for q_start, row in groupby(regions, key=lambda r: r.q_start):
        open_ = [r for r in open_ if r.q_stop > q_start]
        widest = max((r.k_stop - r.k_start for r in open_), default=0)
        for region in row:
            first = bisect_left(open_, region.k_start - widest, key=_k_start)
            past = bisect_left(open_, region.k_stop, key=_k_start)
            for other in open_[first:past]:
                if other.overlaps(region):
                    return other, region
            insort(open_, region, key=_k_start)
            widest = max(widest, region.k_stop - region.k_start)
    return None


@hide_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Disjoint regions. Create one with a constructor below, or from regions.

    Attributes:
        regions: The regions, sorted.
        name: Name for messages.
        text: Short form that `parse` takes; "" for masks that list positions.

    Raises:
        MaskError: If two regions overlap; the message contains both.
    """

    regions: tuple[Region, ...]
    name: str = "custom"
    text: str = field(init=False, repr=False, default="")
    _hash: int = field(init=False, repr=False)
    _starts: tuple[int, ...] = field(init=False, repr=False)
    _furthest: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise MaskError("the name of a mask must be a string", got=shown(self.name))
        try:
            regions: tuple[Any, ...] = tuple(self.regions)
        except TypeError:
            regions = (None,)
        if not all(isinstance(r, Region) for r in regions):
            raise MaskError("a mask needs regions", got=shown(self.regions), allowed="a list of Region")
        object.__setattr__(self, "regions", tuple(sorted(regions, key=lambda r: (r.q_start, r.k_start, r.lo))))
        object.__setattr__(self, "_hash", hash(self.regions))
        # For bisection: the starts of regions, and the largest stop so far.
        object.__setattr__(self, "_starts", tuple(r.q_start for r in self.regions))
        object.__setattr__(self, "_furthest", tuple(accumulate((r.q_stop for r in self.regions), max)))
        if pair := first_overlap(self.regions):
            what = "two regions of a mask overlap, so their pairs would count twice"
            next_step = "split one of them so that they are disjoint"
            raise MaskError(what, got=f"{pair[0]} and {pair[1]}", next_step=next_step)

    # A mask is part of every plan's cache key, so its hash is cached. Equal masks are usually the same object.
    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Mask) and self._hash == other._hash and self.regions == other.regions

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Mask({self.name!r}, regions={len(self.regions)})"

    def check_lengths(self, q_length: int, k_length: int) -> None:
        """Raise `MaskError` if the mask contains positions past the end of the sequence."""
        for region in self.regions:
            for side, stop, length in (("q", region.q_stop, q_length), ("k", region.k_stop, k_length)):
                if length < stop < UNBOUNDED:
                    what = f"the mask {self.name!r} is longer than the sequence"
                    got = f"a region with {side} up to {stop}, and {length} tokens"
                    raise MaskError(what, got=got, allowed=f"positions below {length}")

    def regions_of_rows(self, start: int, stop: int) -> tuple[Region, ...]:
        """Return the regions that may contain a query of [start, stop), found by bisection."""
        if len(self.regions) <= 2:
            return self.regions
        return self.regions[bisect_right(self._furthest, start) : bisect_left(self._starts, stop)]

    def num_pairs(self, q_length: int, k_length: int | None = None) -> int:
        """Return the number of visible (q, k) pairs per head, which determines the FLOPs."""
        rows = size("q_length", q_length)
        columns = rows if k_length is None else size("k_length", k_length)
        return sum(r.num_pairs(rows, columns) for r in self.regions)

    def fully_masked_tokens(self, length: int) -> int:
        """Return the number of tokens that see no key. Their attention is 0."""
        length = size("length", length)
        seen = reached = 0
        for start, stop in sorted(r.rows(length) for r in self.regions):
            seen += max(0, stop - max(start, reached))
            reached = max(reached, stop)
        return length - seen

    # ------------------------------------------------------------------------------------- constructors

    @classmethod
    def _of_text(cls, text: str, *regions: Region) -> Mask:
        mask = cls(regions, text)
        object.__setattr__(mask, "text", text)
        return mask

    @classmethod
    def full(cls) -> Mask:
        """Return the mask in which every query sees every key."""
        return cls._of_text("full", Region(0, UNBOUNDED, 0, UNBOUNDED))

    @classmethod
    def causal(cls) -> Mask:
        """Return the mask in which a query sees itself and all earlier tokens."""
        return cls._of_text("causal", Region(0, UNBOUNDED, 0, UNBOUNDED, lo=0))

    @classmethod
    def window(cls, left: int, right: int = 0) -> Mask:
        """Return the mask in which a query sees `left` earlier tokens, itself and `right` later tokens."""
        left, right = _at_least(0, "left", left), _at_least(0, "right", right)
        return cls._of_text(f"window:{left}:{right}", Region(0, UNBOUNDED, 0, UNBOUNDED, lo=-right, hi=left))

    @classmethod
    def documents(cls, cu_seqlens: Sequence[int], *, causal: bool = True, window: int | None = None) -> Mask:
        """Return the mask of packed sequences, called documents. No token sees another document.

        Args:
            cu_seqlens: Cumulative lengths (0, end of the first, ..., length): a sequence of ints, a NumPy array or an
                integer tensor. A tensor on a device is copied to the host. Tokens after the last document see nothing
                (padding).
            causal: Whether documents are causal.
            window: Number of earlier (and later, if not causal) tokens of its document that a token sees. Default: all.
        """
        cu_seqlens = checked_cu_seqlens("documents", cu_seqlens)
        if not isinstance(causal, bool):
            raise MaskError("causal must be a bool", got=shown(causal), allowed="True or False")
        lo, hi = 0 if causal else -UNBOUNDED, UNBOUNDED
        if window is not None:
            window = _at_least(0, "window", window)
            lo, hi = 0 if causal else -window, window
        name = f"{'' if causal else 'full '}documents({len(cu_seqlens) - 1})"
        regions = tuple(Region(a, b, a, b, lo=lo, hi=hi) for a, b in pairwise(cu_seqlens))
        return cls(regions, name if window is None else f"{name} window {window}")

    @classmethod
    def prefix_lm(cls, prefix: int) -> Mask:
        """Return the mask in which all queries see the first `prefix` tokens; the rest is causal."""
        prefix = _at_least(1, "prefix", prefix)
        rest = Region(prefix, UNBOUNDED, prefix, UNBOUNDED, lo=0)
        return cls._of_text(f"prefix:{prefix}", Region(0, UNBOUNDED, 0, prefix), rest)

    @classmethod
    def sink_window(cls, num_sink_tokens: int, left: int) -> Mask:
        """Return a causal window of `left` tokens back, plus `num_sink_tokens` first tokens that all later ones see."""
        num_sink_tokens, left = _at_least(1, "num_sink_tokens", num_sink_tokens), _at_least(0, "left", left)
        rest = Region(num_sink_tokens, UNBOUNDED, num_sink_tokens, UNBOUNDED, lo=0, hi=left)
        return cls._of_text(f"sink:{num_sink_tokens}:{left}", Region(0, UNBOUNDED, 0, num_sink_tokens, lo=0), rest)

    @classmethod
    def global_window(cls, num_global_tokens: int, left: int, right: int) -> Mask:
        """Return a window mask in which the first `num_global_tokens` tokens see all tokens and all tokens see them."""
        num_global_tokens = _at_least(1, "num_global_tokens", num_global_tokens)
        left, right = _at_least(0, "left", left), _at_least(0, "right", right)
        return cls._of_text(
            f"global:{num_global_tokens}:{left}:{right}",
            Region(0, num_global_tokens, 0, UNBOUNDED),
            Region(num_global_tokens, UNBOUNDED, 0, num_global_tokens),
            Region(num_global_tokens, UNBOUNDED, num_global_tokens, UNBOUNDED, lo=-right, hi=left),
        )

    @classmethod
    def block_causal(cls, cu_seqlens: Sequence[int]) -> Mask:
        """Return the mask of causal blocks: a query sees its block and all earlier ones (see `documents`)."""
        cu_seqlens = checked_cu_seqlens("block_causal", cu_seqlens)
        return cls(tuple(Region(a, b, 0, b) for a, b in pairwise(cu_seqlens)), f"block_causal({len(cu_seqlens) - 1})")

    @classmethod
    def share_question(cls, seqlens: Sequence[int]) -> Mask:
        """Return the mask of a question and its answers, packed: seqlens = (question, answer, answer, ...).

        Each answer is causal, and sees the question but no other answer.
        """
        listed = _listed("share_question", seqlens)
        if len(listed) < 2 or min(listed) < 1:
            allowed = "a question's and one or more answers' lengths, each at least 1"
            raise MaskError("share_question needs a question and an answer", got=shown(listed), allowed=allowed)
        ends = list(accumulate(listed))
        question = ends[0]
        regions = [Region(0, question, 0, question, lo=0)]
        for a, b in pairwise(ends):
            regions += [Region(a, b, 0, question), Region(a, b, a, b, lo=0)]
        return cls(tuple(regions), f"share_question({len(ends) - 1})")

    @classmethod
    def block_sparse(
        cls,
        length: int,
        block_size: int,
        percent: int,
        seed: int = 0,
        *,
        causal: bool = False,
        variable: bool = False,
    ) -> Mask:
        """Return the mask in which a block of queries sees its own block of keys, and other blocks at random.

        These are the uniform and the variable block-sparse mask of LongCA-Bench. As there, every block of queries sees
        the same number of blocks of keys, at least one, and those with the highest random scores. It has blocks of 64
        and 128 tokens and shows 10 to 100 percent of them; variable ones have 128 to 1,024 tokens on average, and 10 to
        90 percent. It draws a mask per K/V head, cuts queries and keys at different positions, and has no causal one.
        Here, one draw and one cut serve all heads, queries and keys, and a block always sees itself, so that no token
        is fully masked.

        Args:
            length: Tokens of the sequence.
            block_size: Tokens of a block; the last one may be shorter.
            percent: Percentage of all blocks, rounded down, that a block of queries sees. With `causal`: of the blocks
                up to its own.
            seed: Seed of the random numbers. Equal arguments give equal masks on every rank.
            causal: Whether a token sees no later token.
            variable: Whether blocks have random sizes of at least a quarter of `block_size`. There are length //
                block_size of them. Default: equal sizes.

        Raises:
            MaskError: If an argument is out of range, or there are more than 1,024 blocks.
        """
        length = size("length", length)
        block_size, percent = _at_least(1, "block_size", block_size), _at_least(1, "percent", percent)
        seed = _at_least(0, "seed", seed)
        if percent > 100:
            raise MaskError("percent of a mask is out of range", got=percent, allowed="an int from 1 to 100")
        for name, value in (("causal", causal), ("variable", variable)):
            if not isinstance(value, bool):
                raise MaskError(f"{name} must be a bool", got=shown(value), allowed="True or False")
        blocks = max(1, length // block_size) if variable else -(-length // block_size)
        if blocks > _MOST_SPARSE_BLOCKS:
            least = -(-length // _MOST_SPARSE_BLOCKS)
            raise MaskError(
                "a block-sparse mask has too many blocks", got=f"{blocks:,} blocks of {block_size}",
                allowed=f"{_MOST_SPARSE_BLOCKS:,}", next_step=f"use blocks of {least:,} tokens or more",
            )  # fmt: skip
        choose = random.Random(seed)
        if variable:
            ends = _random_ends(choose, length, blocks, least=max(1, block_size // 4))
        else:
            ends = [*range(0, length, block_size), length]
        regions = []
        for own, (start, stop) in enumerate(pairwise(ends)):
            for first, past in _random_runs(choose, own + 1 if causal else blocks, own, percent):
                lo = 0 if causal and past > own else -UNBOUNDED
                regions.append(Region(start, stop, ends[first], ends[past], lo=lo))
        kind = f"{'causal ' if causal else ''}{'variable ' if variable else ''}block_sparse"
        return cls(tuple(regions), f"{kind}({block_size}, {percent} %, seed {seed})")

    @classmethod
    def parse(cls, text: str, length: int | None = None) -> Mask:
        """Return the mask of a short form, as the command line takes it.

        ``full``, ``causal``, ``window:LEFT[:RIGHT]``, ``documents:0,A,B,...``, ``full_documents:0,A,...``,
        ``prefix:N``, ``sink:N:LEFT``, ``global:N:LEFT:RIGHT``, ``block_causal:SIZE`` (needs `length`),
        ``share_question:Q,A,A,...``.

        ``block_sparse:SIZE:PERCENT[:SEED]`` needs `length` too. Its name may start with ``causal_``, ``variable_`` or
        ``causal_variable_``.

        Args:
            text: The short form.
            length: Tokens of the sequence.

        Raises:
            MaskError: If the text is not a mask.
        """
        if not isinstance(text, str):
            raise MaskError("this is not the short form of a mask", got=shown(text), allowed="a string")
        length = length if length is None else size("length", length)
        name, _, rest = text.partition(":")
        if name not in _PARSERS:
            raise unknown_name("mask", name, _PARSERS)
        usage, make = _PARSERS[name]
        try:
            numbers = [_number(part) for part in rest.replace(",", ":").split(":")] if rest else []
            return make(numbers, length)
        except MaskError:
            raise
        except (ValueError, TypeError) as error:
            raise MaskError(f"the mask {shown(text)} cannot be read", allowed=usage) from error


def _number(text: str) -> int:
    """Return the number of plain decimal digits."""
    number = parse_int(text)
    if number is None:
        raise ValueError(f"{text!r} is not a whole number")
    return number


def _uniform_blocks(numbers: list[int], length: int | None) -> Mask:
    (blocks,) = numbers
    _at_least(1, "size", blocks)
    if length is None:
        raise MaskError("block_causal:SIZE needs the length of the sequence")
    if length > blocks * _MOST_BLOCKS:
        got = f"{-(-length // blocks):,} blocks of {blocks}"
        raise MaskError("block_causal:SIZE gives too many blocks", got=got, allowed=f"{_MOST_BLOCKS:,}")
    return Mask.block_causal([*range(0, length, blocks), length])


_MOST_BLOCKS = 1 << 20  # each is a region in memory
_MOST_SPARSE_BLOCKS = 1 << 10  # each may have half as many regions: up to half of `_MOST_BLOCKS`


# Python keeps only the sequence of `random()` equal over its versions, so all choices are made with it.
def _random_ends(choose: random.Random, length: int, blocks: int, least: int) -> list[int]:
    """Return cumulative lengths of random blocks of at least `least` tokens: equal chances for all cuts of the rest."""
    rest = length - blocks * least
    cuts = sorted(int(choose.random() * (rest + 1)) for _ in range(blocks - 1))
    return [0, *(cut + i * least for i, cut in enumerate(cuts, 1)), length]


def _random_runs(choose: random.Random, blocks: int, own: int, percent: int) -> list[tuple[int, int]]:
    """Return ranges [first, past) of neighbors among `percent` of the blocks: `own` and those of the highest scores."""
    scores = [choose.random() for _ in range(blocks)]
    scores[own] = 1.0  # above all others
    best = sorted(range(blocks), key=scores.__getitem__, reverse=True)[: max(1, blocks * percent // 100)]
    runs: list[tuple[int, int]] = []
    for block in sorted(best):
        first = runs.pop()[0] if runs and runs[-1][1] == block else block
        runs.append((first, block + 1))
    return runs


def _block_sparse_form(prefix: str = "") -> tuple[str, Callable[[list[int], int | None], Mask]]:
    """Return the usage and the parser of a block-sparse mask, with "causal_" and "variable_" in the prefix."""
    usage = f"{prefix}block_sparse:SIZE:PERCENT[:SEED]"

    def make(numbers: list[int], length: int | None) -> Mask:
        if length is None:
            raise MaskError(f"{usage} needs the length of the sequence")
        return Mask.block_sparse(length, *numbers, causal="causal_" in prefix, variable="variable_" in prefix)

    return usage, make


_PARSERS: dict[str, tuple[str, Callable[[list[int], int | None], Mask]]] = {
    "full": ("full", lambda n, _: Mask.full(*n)),
    "causal": ("causal", lambda n, _: Mask.causal(*n)),
    "window": ("window:LEFT[:RIGHT]", lambda n, _: Mask.window(*n)),
    "documents": ("documents:0,END,END,...", lambda n, _: Mask.documents(n)),
    "full_documents": ("full_documents:0,END,END,...", lambda n, _: Mask.documents(n, causal=False)),
    "prefix": ("prefix:TOKENS", lambda n, _: Mask.prefix_lm(*n)),
    "sink": ("sink:TOKENS:LEFT", lambda n, _: Mask.sink_window(*n)),
    "global": ("global:TOKENS:LEFT:RIGHT", lambda n, _: Mask.global_window(*n)),
    "block_causal": ("block_causal:SIZE", _uniform_blocks),
    "share_question": ("share_question:QUESTION,ANSWER,ANSWER,...", lambda n, _: Mask.share_question(n)),
    "block_sparse": _block_sparse_form(),
    "causal_block_sparse": _block_sparse_form("causal_"),
    "variable_block_sparse": _block_sparse_form("variable_"),
    "causal_variable_block_sparse": _block_sparse_form("causal_variable_"),
}


def _at_least(least: int, name: str, value: object) -> int:
    """Return a value as an int. Raise `MaskError` if it is below `least`."""
    number = as_int(value)
    if number is None or number < least:
        raise MaskError(f"{name} of a mask is out of range", got=shown(value), allowed=f"an int >= {least}")
    return number


def checked_cu_seqlens(what: str, value: object) -> list[int]:
    """Return (0, end of the first, ..., length) as ints. Raise `MaskError`, with the name `what`, if they are not."""
    listed = _listed(what, value)
    if len(listed) < 2 or listed[0] != 0 or any(a >= b for a, b in pairwise(listed)):
        allowed, advice = "0, then strictly increasing ends", None
        if listed and listed[0] > 0:
            advice = f"if these are lengths, pass {shown([0, *accumulate(listed)])}"
        elif len(set(listed)) > 1 and listed == sorted(listed):
            advice = "remove empty documents: cu_seqlens.unique_consecutive()"
        raise MaskError(f"{what} takes cumulative lengths", got=shown(listed), allowed=allowed, next_step=advice)
    if listed[-1] >= UNBOUNDED:
        raise MaskError(f"{what} ends past every sequence", got=shown(listed[-1]), allowed="below 2**60")
    return listed


def _listed(what: str, values: Any) -> list[int]:
    """Return the ints of a sequence, an array or a tensor."""
    try:
        many = values.tolist() if hasattr(values, "tolist") else values
        listed = [as_int(value) for value in many]
    except (TypeError, RuntimeError):  # not iterable, or a tensor without a list of numbers
        listed = [None]
    numbers = [value for value in listed if value is not None]
    if len(numbers) < len(listed) or isinstance(values, str | bytes):
        raise MaskError(f"{what} takes whole numbers", got=shown(values), allowed="ints, one after the other")
    return numbers
