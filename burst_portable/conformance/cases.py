"""What is tried: every way to write a mask, lay it out, distribute it, and choose sizes.

All combinations are tens of thousands; `covering` picks few in which every *pair* of choices still occurs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from burst_portable.errors import InputError, LayoutError, UnsupportedError, shown, unknown_name
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.layout import Layout, make_layout
from burst_portable.mask import UNBOUNDED, Mask, Region
from burst_portable.planning.call import AttentionCall
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import OURS, known, load

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
    "rows_see_nothing": Mask(Mask.documents((0, 9)).regions, "rows_see_nothing"),
    "custom": Mask((Region(5, 30, 0, 20, lo=3, hi=12), Region(30, LENGTH, 10, LENGTH, lo=-4), Region(0, 5, 40, 50))),
}


@lru_cache(maxsize=256)
def mask_of(name: str, length: int) -> Mask:
    """The mask of this name for a sequence of another length: what ends with the sequence still does."""
    mask = MASKS[name]
    if length == LENGTH:
        return mask

    def stop(at: int) -> int:
        return length if at == LENGTH else at if at >= UNBOUNDED else min(at, length)

    kept = (
        replace(r, q_stop=stop(r.q_stop), k_stop=stop(r.k_stop))
        for r in mask.regions
        if r.q_start < length and r.k_start < length
    )
    return Mask(tuple(kept), mask.name)


STRATEGIES: Mapping[str, Strategy] = {
    label: strategy for name in OURS for label, strategy in load(name).trials().items()
}
"""Trials of our own strategies. Those of other packages are tried if they are named: see `strategy_trials`."""


@lru_cache(maxsize=32)
def strategy_trials(name: str) -> Mapping[str, Strategy]:
    """Return the trials of a strategy by label, ours or another package's.

    Raises as `registry.load`, and `InputError` for the label of one trial.
    """
    base, plus, _ = name.partition("+")
    if plus and base in known():
        one = f"--case attention:strategy={name}"
        raise InputError(
            "this is the label of one trial, and no strategy",
            got=shown(name),
            next_step=f"--strategy {base} makes all its trials, {one} makes this one",
        )
    return load(name).trials()


HEADS = {
    "mha": (12, 12, 8, 8),
    "gqa": (12, 6, 8, 8),
    "mqa": (12, 1, 8, 8),
    "wide_values": (12, 6, 8, 5),
    "wide_heads": (4, 2, 64, 64),
}
"""Query heads, K/V heads, head size, value size."""

VALUES = ("usual", "large", "small", "high", "low")
"""How scores lie: a few; spread so far that one key takes all; near 0; shifted far up; shifted far down."""

MEMORY = ("rows", "heads", "padded", "sliced", "odd")
"""How inputs lie in memory: [B, S, H, D]; heads outermost; padding after every row; every second row of a tensor; rows
that begin anywhere, not at multiples of 16 bytes."""


SCALES = (None, 0.05, -0.2)
"""1 / sqrt(head size), and others: a kernel must take the scale that it is given. Below 0 it may decline."""


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
    deterministic: bool = True
    values: str = "usual"
    memory: str = "rows"
    scale: float | None = None  # of scores; None is 1 / sqrt(head size)

    def __str__(self) -> str:
        extra = "-softcap" * (self.softcap is not None) + "-sinks" * self.sinks
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mask}-{self.layout}-{self.strategy}-{self.ranks}ranks-{self.heads}-{dtype}{extra}"

    def spec(self) -> str:
        """What differs from the defaults, as `parse` reads it: ``mask=full,ranks=3``."""
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return ",".join(f"{name}={_text(value)}" for name, value, default in given if value != default) or "default"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of a `spec`.

        Raises `InputError` for a name or a value that is none, or choices that do not go together.
        """
        given: Choices = {}
        for part in text.split(",") if text not in ("", "default") else ():
            name, _, value = part.partition("=")
            if name not in _READERS:
                raise unknown_name("choice of a case", name, _READERS)
            given[name] = _READERS[name](value)
        case = cls(**given)
        if not case.possible():
            raise InputError("these choices do not go together", got=text)
        return case

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, K/V heads, head size, value size: by name, or spelt out as ``4x2x80x64``."""
        return HEADS[self.heads] if self.heads in HEADS else _spelt(self.heads)

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return self.sizes[2] ** -0.5 if self.scale is None else self.scale

    def make_mask(self) -> Mask:
        return mask_of(self.mask, self.length)

    def make_layout(self) -> Layout:
        return make_layout(self.layout, self.length, self.ranks, self.make_mask())

    def make_strategy(self) -> Strategy:
        return _strategy(self.strategy)

    def make_call(self, device: str = "") -> AttentionCall:
        """Return the attention of this case, for tensors on this type of device."""
        heads, kv_heads, head_dim, v_head_dim = self.sizes
        return AttentionCall(
            mask=self.make_mask(),
            layout=self.make_layout(),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            batch=self.batch,
            itemsize=self.dtype.itemsize,
            dtype=str(self.dtype).removeprefix("torch."),
            device=device,
            scale=self.factor,
            softcap=self.softcap,
            deterministic=self.deterministic,
            sinks=self.sinks,
        )

    def possible(self) -> bool:
        """Whether its choices go together at all."""
        try:
            self.make_layout()
        except LayoutError:
            return False
        if not self.make_mask().regions:
            return False
        try:
            self.make_strategy().check(self.make_call())
        except (InputError, UnsupportedError):
            return False
        except Exception:
            if self.strategy in STRATEGIES:
                raise
            # A mistake of another package's strategy: the case is tried, and its failure is told.
        return True


def _strategy(label: str) -> Strategy:
    """Return the strategy of a trial. Raises `UnknownNameError`."""
    if label not in STRATEGIES:
        others = known()
        name, _, _ = label.partition("+")
        found = strategy_trials(name) if name in others and name not in OURS else {}
        if label not in found:
            raise unknown_name("strategy", label, {**STRATEGIES, **found, **others})
        return found[label]
    return STRATEGIES[label]


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")


def _spelt(text: str) -> tuple[int, int, int, int]:
    parts = text.split("x")
    if len(parts) != 4 or not all(p.isdecimal() and int(p) for p in parts) or int(parts[0]) % int(parts[1]):
        allowed = f"{', '.join(HEADS)}, or HEADSxKV_HEADSxSIZExVALUE_SIZE such as 4x2x80x64"
        raise InputError("these are not heads", got=repr(text), allowed=allowed)
    heads, kv_heads, size, value_size = map(int, parts)
    return heads, kv_heads, size, value_size


def _one_of(kind: str, names: Mapping[str, object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text not in names:
            raise unknown_name(kind, text, names)
        return names[text]

    return read


def _named(kind: str, names: Iterable[str]) -> Callable[[str], object]:
    return _one_of(kind, {name: name for name in names})


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise InputError("this is not a count", got=repr(text), allowed="1 to 1048576")
    return int(text)


def _softcap(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError("this is not a softcap", got=repr(text), allowed="a number above 0")
    return value


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError("this is not a scale", got=repr(text), allowed="a finite number, such as 0.05")
    return value


def _strategy_label(text: str) -> str:
    _strategy(text)
    return text


def _heads(text: str) -> str:
    if text not in HEADS:
        _spelt(text)
    return text


DTYPES = {_text(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
_YES = {"True": True, "False": False}

_READERS: Mapping[str, Callable[[str], object]] = {
    "mask": _named("mask", MASKS),
    "layout": _named("layout", LAYOUTS),
    "strategy": _strategy_label,
    "ranks": _count,
    "heads": _heads,
    "dtype": _one_of("dtype", DTYPES),
    "batch": _count,
    "softcap": _softcap,
    "sinks": _one_of("answer", _YES),
    "length": _count,
    "deterministic": _one_of("answer", _YES),
    "values": _named("kind of values", VALUES),
    "memory": _named("way to lie in memory", MEMORY),
    "scale": _scale,
}


Choices = dict[str, Any]
"""Some choices of a `Case` by name; each name has values of a type of its own."""
Axes = Mapping[str, tuple[Any, ...]]
"""What to choose from, by name."""

AXES: Axes = {
    "mask": tuple(MASKS),
    "strategy": tuple(STRATEGIES),
    "layout": LAYOUTS,
    "ranks": (1, 2, 3, 4, 6, 8),
    "heads": tuple(HEADS),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "softcap": (None, 5.0),
    "sinks": (False, True),
}


def product(axes: Axes = AXES) -> Iterator[Case]:
    """Every possible combination."""
    for values in itertools.product(*axes.values()):
        case = Case(**dict(zip(axes, values, strict=True)))
        if case.possible():
            yield case


def covering(axes: Axes = AXES, *, tries: int = 24) -> list[Case]:
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
        best = max(possible, key=lambda case: sum(pair in missing for pair in _held(case, axes)))
        cases.append(best)
        for held in _held(best, axes):
            missing.pop(held, None)
    return cases


Pair = tuple[tuple[str, object], tuple[str, object]]


def _pairs(axes: Axes) -> Iterator[Pair]:
    for (a, first), (b, second) in itertools.combinations(axes.items(), 2):
        yield from (((a, x), (b, y)) for x in first for y in second)


def _completed(chosen: Choices, axes: Axes, random_: random.Random) -> Case:
    others = {axis: random_.choice(values) for axis, values in axes.items() if axis not in chosen}
    return Case(**chosen, **others)


def _held(case: Case, axes: Axes) -> Iterator[Pair]:
    """The pairs of choices in a case."""
    return itertools.combinations(((axis, getattr(case, axis)) for axis in axes), 2)
