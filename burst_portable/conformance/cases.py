"""What is tried: every way to write a mask, lay it out, distribute it, and choose sizes.

All combinations are tens of thousands; `covering` picks few in which every *pair* of choices still occurs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from burst_portable.errors import LayoutError
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.layout import Layout, make_layout
from burst_portable.mask import Mask, Region
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy

LENGTH = 53
"""Divided by no number of ranks that is tried: every shard is ragged."""

MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(7),
    "window_both": Mask.window(5, 3),
    "documents": Mask.documents((0, 10, 27, 51, LENGTH)),
    "documents_full": Mask.documents((0, 20, LENGTH), causal=False),
    "documents_window": Mask.documents((0, 30, LENGTH), window=4),
    "prefix": Mask.prefix_lm(17),
    "sink_window": Mask.sink_window(4, 6),
    "global_window": Mask.global_window(3, 5, 2),
    "block_causal": Mask.block_causal((0, 8, 16, 24, 40, LENGTH)),
    "share_question": Mask.share_question((20, 10, 13, 10)),
    "rows_see_nothing": replace(Mask.documents((0, 9)), name="rows_see_nothing"),
    "custom": Mask((Region(5, 30, 0, 20, lo=3, hi=12), Region(30, LENGTH, 10, LENGTH, lo=-4), Region(0, 5, 40, 50))),
}

STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "ring": {},
    "ring+fetch": {"moves": "fetch"},
    "burst": {},
    "burst+fetch": {"moves": "fetch"},
    "double_ring": {},
    "double_ring+kv": {"travels": "kv"},
    "ulysses": {},
    "auto": {},
}

HEADS = {
    "mha": (12, 12, 8, 8),
    "gqa": (12, 6, 8, 8),
    "mqa": (12, 1, 8, 8),
    "wide_values": (12, 6, 8, 5),
    "wide_heads": (4, 2, 64, 64),
}
"""Query heads, K/V heads, head size, value size."""


@dataclass(frozen=True)
class Case:
    """One attention to try, by the names of its choices."""

    mask: str = "causal"
    layout: str = "zigzag"
    strategy: str = "ring"
    ranks: int = 2
    heads: str = "gqa"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    softcap: float | None = None
    sinks: bool = False
    length: int = LENGTH

    def __str__(self) -> str:
        extra = "-softcap" * (self.softcap is not None) + "-sinks" * self.sinks
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mask}-{self.layout}-{self.strategy}-{self.ranks}ranks-{self.heads}-{dtype}{extra}"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, K/V heads, head size, value size."""
        return HEADS[self.heads]

    def make_mask(self) -> Mask:
        return MASKS[self.mask]

    def make_layout(self) -> Layout:
        return make_layout(self.layout, self.length, self.ranks, self.make_mask())

    def make_strategy(self) -> Strategy:
        name, _, _ = self.strategy.partition("+")
        return make_strategy(name, **STRATEGIES[self.strategy])

    def possible(self) -> bool:
        """Whether its choices go together at all."""
        try:
            self.make_layout()
        except LayoutError:
            return False
        heads, kv_heads, _, _ = self.sizes
        shares = heads % self.ranks == 0 and (kv_heads % self.ranks == 0 or self.ranks % kv_heads == 0)
        return shares or self.strategy != "ulysses"


AXES: Mapping[str, tuple[object, ...]] = {
    "mask": tuple(MASKS),
    "strategy": tuple(STRATEGIES),
    "layout": LAYOUTS,
    "ranks": (1, 2, 3, 4, 6, 8),
    "heads": tuple(HEADS),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "softcap": (None, 5.0),
    "sinks": (False, True),
}


def product(axes: Mapping[str, tuple[object, ...]] = AXES) -> Iterator[Case]:
    """Every possible combination."""
    for values in itertools.product(*axes.values()):
        case = Case(**dict(zip(axes, values, strict=True)))  # type: ignore[arg-type]
        if case.possible():
            yield case


def covering(axes: Mapping[str, tuple[object, ...]] = AXES, *, tries: int = 24) -> list[Case]:
    """Few possible cases in which every pair of choices that goes together occurs.

    Greedy and deterministic: of several random completions of a pair that is still missing, the one that covers
    most. A pair that no completion makes possible (Ulysses on 8 ranks with 12 heads) is left out.
    """
    random_ = random.Random(0)
    missing = dict.fromkeys(_pairs(axes))
    cases = []
    while missing:
        pair = next(iter(missing))
        completions = [_completed(dict(pair), axes, random_) for _ in range(tries)]
        possible = [case for case in completions if case.possible()]
        if not possible:
            del missing[pair]
            continue
        best = max(possible, key=lambda case: sum(_holds(case, pair) for pair in missing))
        cases.append(best)
        missing = {pair: None for pair in missing if not _holds(best, pair)}
    return cases


Pair = tuple[tuple[str, object], tuple[str, object]]


def _pairs(axes: Mapping[str, tuple[object, ...]]) -> Iterator[Pair]:
    for (a, first), (b, second) in itertools.combinations(axes.items(), 2):
        yield from (((a, x), (b, y)) for x in first for y in second)


def _completed(chosen: dict[str, object], axes: Mapping[str, tuple[object, ...]], random_: random.Random) -> Case:
    others = {axis: random_.choice(values) for axis, values in axes.items() if axis not in chosen}
    return Case(**chosen, **others)  # type: ignore[arg-type]


def _holds(case: Case, pair: Pair) -> bool:
    return all(getattr(case, axis) == value for axis, value in pair)
