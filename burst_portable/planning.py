"""A plan from a few numbers and names: what `api.plan` and `burst-portable plan` stand on. Pure, as plans are."""

from __future__ import annotations

from functools import lru_cache

from burst_portable.errors import InputError, ShapeError, explain, unknown_name
from burst_portable.layout import Layout, make_layout
from burst_portable.mask import Mask
from burst_portable.plans import Plan, Problem
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import NAMES as STRATEGIES
from burst_portable.strategies.registry import make_strategy


def plan(
    *,
    seq_len: int,
    ranks: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    mask: Mask | str = "causal",
    strategy: Strategy | str = "auto",
    layout: Layout | str = "zigzag",
    batch: int = 1,
    itemsize: int = 2,
) -> Plan:
    """The plan that `attention` would run, made without a device, for any number of ranks.

    Raises `InputError` or `UnsupportedError` as `attention` would. See `cost.plan_cost` and `verify.verify`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"seq_len": seq_len, "ranks": ranks, "heads": heads, "kv_heads": kv_heads, "batch": batch}
    sizes |= {"head_dim": head_dim, "value_dim": value_dim, "itemsize": itemsize}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(explain(f"{name} is no size", got=repr(size), allowed="an int of at least 1"))
    check_heads(heads, kv_heads)
    mask = Mask.parse(mask, seq_len) if isinstance(mask, str) else mask
    mask.check_lengths(seq_len, seq_len)
    where = layout if isinstance(layout, Layout) else named_layout(layout, seq_len, ranks, mask)
    problem = Problem(
        mask,
        where,
        where,
        heads,
        sizes["kv_heads"],
        head_dim,
        sizes["value_dim"],
        batch=batch,
        itemsize=itemsize,
    )
    return planned(make_strategy(strategy) if isinstance(strategy, str) else strategy, problem)


@lru_cache(maxsize=256)
def planned(strategy: Strategy, problem: Problem) -> Plan:
    """The strategy's plan for a problem; made once."""
    if not hasattr(strategy, "plan"):
        raise unknown_name("strategy", strategy, STRATEGIES)
    return strategy.plan(problem)


def named_layout(name: str, length: int, ranks: int, mask: Mask | None) -> Layout:
    """The layout of that name. Only `document_zigzag` reads the mask; others are shared between masks."""
    return make_layout(name, length, ranks, mask if name == "document_zigzag" else None)


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse query heads that K/V heads cannot be shared among evenly."""
    if heads % kv_heads:
        raise ShapeError(
            explain("query heads are no multiple of K/V heads", got=f"{heads} and {kv_heads}", next_step="see GQA")
        )
