"""The attentions that `ring.py` measures."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """length, (heads, K/V heads), head size, mask, layout of our strategies."""

    length: int
    heads: tuple[int, int]
    head: int = 128
    mask: str = "causal"
    layout: str = "zigzag"


def _pile_like(length: int) -> str:
    """Return documents with lengths as in web text: half under 500 tokens, a few of tens of thousands."""
    chance, cuts = random.Random(0), [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + max(16, int(chance.lognormvariate(6.2, 1.4)))))
    return "documents:" + ",".join(map(str, cuts))


ROWS: dict[str, Row] = {
    "32k": Row(32768, (32, 32)),
    "32k-gqa": Row(32768, (32, 8)),
    "128k": Row(131072, (32, 32)),
    "128k-gqa": Row(131072, (32, 8)),
    "512k-gqa": Row(524288, (32, 8)),
    "128k-few": Row(131072, (32, 4)),
    "128k-documents": Row(131072, (32, 8), mask=_pile_like(131072), layout="document_zigzag"),
    "128k-window": Row(131072, (32, 8), mask="window:4096", layout="contiguous"),
    "32k-full": Row(32768, (32, 8), mask="full", layout="contiguous"),
    "tiny": Row(256, (4, 4), 16),
    "tiny-window": Row(255, (4, 2), 16, mask="window:64", layout="contiguous"),
    "tiny-documents": Row(256, (4, 2), 16, mask="documents:0,70,75,140,200,256", layout="document_zigzag"),
}
QUICK_ROWS = ("32k-gqa", "128k-gqa")
