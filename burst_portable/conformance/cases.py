"""Define the cases: all choices of mask, layout, strategy, ranks, heads, dtype and options.

All combinations are tens of thousands. `covering` selects few in which every *pair* of choices occurs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from burst_portable.errors import InputError, UnsupportedError, shown, unknown_name
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.layout import Layout, make_layout
from burst_portable.mask import UNBOUNDED, Mask, Region
from burst_portable.planning.call import AttentionCall, Dropout
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import OURS, known, load, make_strategy, strategy_name
from burst_portable.utils.text import split_list
from burst_portable.utils.values import parse_int

LENGTH = 53
"""Not a multiple of any tested number of ranks: every shard is ragged."""

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
    "block_sparse": Mask.block_sparse(LENGTH, 8, 40),
    "causal_block_sparse": Mask.block_sparse(LENGTH, 6, 50, causal=True, variable=True),
    "fully_masked_rows": Mask(Mask.documents((0, 9)).regions, "fully_masked_rows"),
    "custom": Mask((Region(5, 30, 0, 20, lo=3, hi=12), Region(30, LENGTH, 10, LENGTH, lo=-4), Region(0, 5, 40, 50))),
}


@lru_cache(maxsize=256)
def mask_of(name: str, length: int) -> Mask:
    """Return the named mask for a sequence of `length` tokens. Regions that end with the sequence still do."""
    mask = MASKS[name]
    if length == LENGTH:
        return mask

    def stop(position: int) -> int:
        return length if position == LENGTH else position if position >= UNBOUNDED else min(position, length)

    regions = (
        replace(r, q_stop=stop(r.q_stop), k_stop=stop(r.k_stop))
        for r in mask.regions
        if r.q_start < length and r.k_start < length
    )
    return Mask(tuple(regions), mask.name)


STRATEGIES: Mapping[str, Strategy] = {one.label: one for name in OURS for one in load(name).trials()}
"""Configurations of the built-in strategies by label. `strategy_trials` returns those of another package."""


@lru_cache(maxsize=32)
def strategy_trials(name: str) -> Mapping[str, Strategy]:
    """Return the tested configurations of a strategy by label.

    Raises:
        InputError: If `name` is the label of one configuration.
        UnknownNameError: If there is no such strategy. Other errors are those of `registry.load`.
    """
    base = strategy_name(name)
    if base != name and base in known():
        step = f"--strategy {base} tests all configurations, --case 'attention:strategy={name}' this one"
        raise InputError("this is the label of one configuration, not a strategy", got=shown(name), next_step=step)
    return {one.label: one for one in load(name).trials()}


HEADS = {
    "mha": (12, 12, 8, 8),
    "gqa": (12, 6, 8, 8),
    "mqa": (12, 1, 8, 8),
    "wide_values": (12, 6, 8, 5),
    "wide_heads": (4, 2, 64, 64),
}
"""Query heads, K/V heads, head size, value size."""

VALUES = ("usual", "large", "small", "high", "low")
"""Scores: of usual size; so large that one key gets all weight; near 0; shifted far up; shifted far down."""

MEMORY = ("rows", "heads", "padded", "sliced", "odd")
"""Memory layout of inputs: [B, S, H, D]; heads outermost; padding after every row; every second row of a tensor; rows
that are not aligned to 16 bytes."""


SCALES = (None, 0.05, -0.2, 0.0)
"""None is 1 / sqrt(head size). A kernel must use any other scale; it may decline those that are not positive.

With 0, all visible keys of a row have the same weight, and dq and dk are exactly 0.
"""


SEED = 0x1234_5678_9ABC_DEF0
"""Seed of dropout."""


@dataclass(frozen=True)
class Case:
    """One attention to test, by the names of its choices."""

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
    dropout: float = 0.0  # probability

    def __str__(self) -> str:
        extra = "-softcap" * (self.softcap is not None) + "-sinks" * self.sinks + "-dropout" * bool(self.dropout)
        return f"{self.mask}-{self.layout}-{self.strategy}-{self.ranks}ranks-{self.heads}-{_text(self.dtype)}{extra}"

    def spec(self) -> str:
        """Return the choices that differ from the defaults, as `parse` reads them: ``mask=full,ranks=3``."""
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return ",".join(f"{name}={_text(value)}" for name, value, default in given if value != default) or "default"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case of a `spec`.

        Raises:
            InputError: If a name or a value is unknown, or the choices cannot be combined.
        """
        given: Choices = {}
        for part in split_list(text) if text not in ("", "default") else ():
            name, _, value = part.partition("=")
            if name not in _READERS:
                raise unknown_name("choice of a case", name, _READERS)
            given[name] = _READERS[name](value)
        case = cls(**given)
        if reason := case.conflict():
            raise InputError(f"these choices cannot be combined: {reason}", got=f"the case {text!r}")
        return case

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, K/V heads, head size, value size: of a name in `HEADS`, or of a text like ``4x2x80x64``."""
        return _sizes(self.heads)

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.sizes[2] ** -0.5 if self.scale is None else self.scale

    @property
    def dropout_settings(self) -> Dropout | None:
        """Dropout with a seed of more than 32 bits, for heads of which another rank has the first."""
        return Dropout(self.dropout, first_head=3, seed=SEED) if self.dropout else None

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
            dtype=_text(self.dtype),
            device=device,
            scale=self.factor,
            softcap=self.softcap,
            deterministic=self.deterministic,
            sinks=self.sinks,
            dropout=self.dropout_settings,
        )

    def possible(self) -> bool:
        """Return whether the choices can be combined."""
        return not self.conflict()

    def conflict(self) -> str:
        """Return why the choices cannot be combined; "" if they can."""
        if not self.make_mask().regions:
            return f"the mask {self.mask} has no visible pair among {self.length} tokens"
        try:
            self.make_strategy().check(self.make_call())
        except (InputError, UnsupportedError) as error:
            return str(error)
        except Exception:
            if strategy_name(self.strategy) in OURS:
                raise
            # An error in another package's strategy: the case runs, and its failure is reported.
        return ""


@lru_cache(maxsize=256)
def _strategy(label: str) -> Strategy:
    """Return the strategy of a label."""
    return make_strategy(label)


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")


def _sizes(text: str) -> tuple[int, int, int, int]:
    if text in HEADS:
        return HEADS[text]
    parts = text.split("x")
    if len(parts) != 4 or not all((parse_int(p) or 0) > 0 for p in parts) or int(parts[0]) % int(parts[1]):
        allowed = f"{', '.join(HEADS)}, or HEADSxKV_HEADSxSIZExVALUE_SIZE such as 4x2x80x64"
        raise InputError("invalid heads", got=repr(text), allowed=allowed)
    heads, kv_heads, size, value_size = map(int, parts)
    return heads, kv_heads, size, value_size


def _one_of(kind: str, names: Collection[str]) -> Callable[[str], object]:
    """Return a function that reads one of some names, or one of the values of a mapping by its name."""

    def read(text: str) -> object:
        if text not in names:
            raise unknown_name(kind, text, names)
        return names[text] if isinstance(names, Mapping) else text

    return read


def _count(text: str) -> int:
    number = parse_int(text)
    if number is None or not 1 <= number <= 1 << 20:
        raise InputError("invalid count", got=repr(text), allowed="1 to 1048576")
    return number


def _number(name: str, allowed: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise InputError(f"invalid {name}", got=repr(text), allowed=allowed)
        return value

    return read


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a function that returns its text, after `check` has accepted it."""

    def read(text: str) -> str:
        check(text)
        return text

    return read


DTYPES = {_text(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
_BOOLEANS = {"True": True, "False": False}

_READERS: Mapping[str, Callable[[str], object]] = {
    "mask": _one_of("mask", tuple(MASKS)),
    "layout": _one_of("layout", LAYOUTS),
    "strategy": _checked(_strategy),
    "ranks": _count,
    "heads": _checked(_sizes),
    "dtype": _one_of("dtype", DTYPES),
    "batch": _count,
    "softcap": _number("softcap", "a number above 0", lambda value: 0 < value < math.inf),
    "sinks": _one_of("boolean", _BOOLEANS),
    "length": _count,
    "deterministic": _one_of("boolean", _BOOLEANS),
    "values": _one_of("kind of values", VALUES),
    "memory": _one_of("memory layout", MEMORY),
    "scale": _number("scale", "a finite number, such as 0.05", math.isfinite),
    "dropout": _number("dropout", "a probability below 1, such as 0.3", lambda value: 0 <= value < 1),
}


Choices = dict[str, Any]
"""Some choices of a `Case` by name. The type of a value depends on the name."""
Axes = Mapping[str, tuple[Any, ...]]
"""The allowed values of each choice."""

AXES: Axes = {
    "mask": tuple(MASKS),
    "strategy": tuple(STRATEGIES),
    "layout": LAYOUTS,
    "ranks": (1, 2, 3, 4, 5, 6, 7, 8),
    "heads": tuple(HEADS),
    "dtype": tuple(DTYPES.values()),
    "softcap": (None, 5.0),
    "sinks": (False, True),
    "dropout": (0.0, 0.3),
}

PRODUCT_RANKS = (1, 2, 3, 4, 6, 8)
"""Numbers of ranks in products of choices. 5 and 7 occur only in pairs with each other choice."""


def product(axes: Axes = AXES) -> Iterator[Case]:
    """Yield every possible combination."""
    for values in itertools.product(*axes.values()):
        case = Case(**dict(zip(axes, values, strict=True)))
        if case.possible():
            yield case


def covering(axes: Axes = AXES, *, tries: int = 24) -> list[Case]:
    """Return few possible cases in which every pair of combinable choices occurs.

    Greedy and deterministic. For a pair that is still missing, `tries` random completions are compared; the one with
    most missing pairs is taken. A pair without a possible completion (Ulysses on 8 ranks with 12 heads) is left out.
    """
    return list(_covering(tuple((axis, tuple(values)) for axis, values in axes.items()), tries))


@lru_cache(maxsize=64)  # the checks of a backend list the cases of a kernel several times
def _covering(items: tuple[tuple[str, tuple[Any, ...]], ...], tries: int) -> tuple[Case, ...]:
    axes = dict(items)
    random_ = random.Random(0)
    missing = dict.fromkeys(_pairs(axes))
    cases = []
    while missing:
        pair = next(iter(missing))
        completions = [_complete(dict(pair), axes, random_) for _ in range(tries)]
        # Whether a case is possible takes longer to find out than how many pairs it has.
        completions.sort(key=lambda case: sum(pair in missing for pair in _pairs_of(case, axes)), reverse=True)
        best = next((case for case in completions if case.possible()), None)
        if best is None:
            del missing[pair]
            continue
        cases.append(best)
        for covered in _pairs_of(best, axes):
            missing.pop(covered, None)
    return tuple(cases)


Pair = tuple[tuple[str, object], tuple[str, object]]


def _pairs(axes: Axes) -> Iterator[Pair]:
    for (a, first), (b, second) in itertools.combinations(axes.items(), 2):
        yield from (((a, x), (b, y)) for x in first for y in second)


def _complete(chosen: Choices, axes: Axes, random_: random.Random) -> Case:
    rest = {axis: random_.choice(values) for axis, values in axes.items() if axis not in chosen}
    return Case(**chosen, **rest)


def _pairs_of(case: Case, axes: Axes) -> Iterator[Pair]:
    """Return the pairs of choices in a case."""
    return itertools.combinations(((axis, getattr(case, axis)) for axis in axes), 2)
