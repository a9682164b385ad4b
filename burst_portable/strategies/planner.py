"""Make the mask, the layout and the plan from the arguments of a call.

Every call of `attention` gets its mask (`mask_of`), its layout (`layout_of`) and its plan (`plan_to_run`) here.
`plan`, which is `burst_portable.plan`, makes a plan from sizes and names, without tensors, ranks or a device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from burst_portable.errors import InputError, LayoutError, ShapeError, shown, unknown_name
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.layout import OF_MASKS, Layout, make_layout, suited
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall, Dropout
from burst_portable.planning.plans import Plan
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.checked_plans import checked_plan, verified_plan
from burst_portable.strategies.registry import named_if_broken, strategy_of
from burst_portable.utils.text import by_time
from burst_portable.utils.values import as_float, size

LARGEST_HEAD = 1024  # far above what the kernels of any device support


def plan(
    *,
    seq_len: int,
    ranks: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    mask: Mask | str = "causal",
    strategy: Strategy | str = "auto",
    layout: Layout | str = "zigzag",
    batch: int = 1,
    itemsize: int = 2,
    dropout_p: float = 0.0,
) -> Plan:
    """Return the plan that `attention` would run, made without a device, for any number of ranks.

    `planning.cost.plan_cost` estimates its cost, `planning.verify.verify` checks it. Predictions use the hardware of
    `strategy` if that is an `AutoStrategy`.

    Args:
        seq_len: Tokens of the unsharded sequence.
        ranks: Number of ranks that share it.
        heads: Query heads.
        kv_heads: K/V heads. Default: as many as query heads.
        head_dim: Size of a head of Q and K; at most 1024.
        v_head_dim: Size of a head of V; at most 1024. Default: `head_dim`.
        mask: As for `attention`.
        strategy: As for `attention`.
        layout: As for `attention`, or "auto": the layout whose plan has the least predicted time. Then pass
            `plan(...).layout` to `shard` and `attention`.
        batch: Sequences per call.
        itemsize: Bytes of an element of Q, K and V.
        dropout_p: As for `attention`. Strategies that do not support dropout raise an error.

    Raises:
        InputError: Sizes, names, a mask or a layout are invalid or do not fit together (a ValueError).
        UnsupportedError: The named strategy cannot serve this call.
        StrategyError: The named strategy is broken.
    """
    call = call_of_sizes(
        seq_len=seq_len, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        mask=mask, layout=layout, batch=batch, itemsize=itemsize,
    )  # fmt: skip
    if probability := checked_probability(dropout_p):
        call = replace(call, dropout=Dropout(probability))
    return plan_call(strategy_of(strategy), call, layout)


def checked_probability(value: object) -> float:
    """Return a probability of dropout. Raise `InputError` for any other value."""
    number = as_float(value)
    if number is None or not 0.0 <= number < 1.0:
        raise InputError("dropout_p is no probability of dropout", got=shown(value), allowed="at least 0 and below 1")
    return number


def call_of_sizes(
    *,
    seq_len: int,
    ranks: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    v_head_dim: int | None = None,
    mask: Mask | str,
    layout: Layout | str,
    batch: int = 1,
    itemsize: int,
) -> AttentionCall:
    """Check these sizes and return their call; see `plan` for them. The layout "auto" becomes zigzag."""
    seq_len, ranks, heads = size("seq_len", seq_len), size("ranks", ranks), size("heads", heads)
    kv_heads = heads if kv_heads is None else size("kv_heads", kv_heads)
    head_dim = size("head_dim", head_dim)
    v_head_dim = head_dim if v_head_dim is None else size("v_head_dim", v_head_dim)
    batch, itemsize = size("batch", batch), size("itemsize", itemsize)
    for name, given in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if given > LARGEST_HEAD:
            raise InputError(f"{name} is too large", got=given, allowed=f"at most {LARGEST_HEAD}")
    check_heads(heads, kv_heads)
    mask = mask_of(mask, seq_len)
    made_layout = layout_of("zigzag" if _is_auto(layout) else layout, seq_len, ranks, mask)
    scale = 1.0 / math.sqrt(head_dim)
    return AttentionCall(mask, made_layout, heads, kv_heads, head_dim, v_head_dim, batch, itemsize, scale=scale)


def plan_call(strategy: Strategy, call: AttentionCall, layout: Layout | str) -> Plan:
    """Return the strategy's plan for a call, with the fastest layout if `layout` is "auto"."""
    return plan_with_best_layout(strategy, call) if _is_auto(layout) else cached_plan(strategy, call)


def _is_auto(layout: Layout | str) -> bool:
    return isinstance(layout, str) and layout == "auto"


@lru_cache(maxsize=256)
def cached_plan(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return the strategy's plan for a call, cached."""
    with named_if_broken(strategy):
        return checked_plan(strategy, call)


@lru_cache(maxsize=256)
def plan_to_run(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return `cached_plan`, after verifying the plan of another package's strategy: a wrong one gives wrong numbers."""
    with named_if_broken(strategy):
        return verified_plan(strategy, call)


@lru_cache(maxsize=256)
def plan_with_best_layout(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return the plan with the layout of least predicted time, instead of the layout of the call."""
    auto = strategy if isinstance(strategy, AutoStrategy) else AutoStrategy()
    plans: dict[str, Plan] = {}
    for layout in suited(call.mask, call.layout.length, call.ranks):
        plans[layout.name] = cached_plan(strategy, replace(call, layout=layout, kv_layout=None))
    seconds = {name: auto.seconds(made) for name, made in plans.items()}
    best = min(seconds, key=lambda name: round(seconds[name], 7))
    made = plans[best]
    if len(plans) == 1:  # on one rank
        return made
    reasons = f"layout {best} by predicted time ({by_time(seconds)})", made.reason
    return replace(made, reason="; ".join(filter(None, reasons)))


def mask_of(mask: Mask | str, length: int) -> Mask:
    """Return the mask that a caller passed, for a sequence of this length."""
    made = Mask.parse(mask, length) if isinstance(mask, str) else mask
    if not isinstance(made, Mask):
        raise no_mask(mask)
    made.check_lengths(length, length)
    return made


def no_mask(mask: object) -> InputError:
    """Return the error for an argument that is neither a mask nor a short form, such as ``cu_seqlens`` or a matrix."""
    allowed = "a Mask, or its short form, such as 'causal'"
    next_step = "pass cu_seqlens as Mask.documents(cu_seqlens); express a matrix by Mask and Region"
    return InputError("mask is not a mask", got=shown(mask), allowed=allowed, next_step=next_step)


def layout_of(layout: Layout | str, length: int, ranks: int, mask: Mask | None) -> Layout:
    """Return the layout that a caller passed, for this many tokens and ranks. Only `OF_MASKS` read the mask."""
    if isinstance(layout, str) and layout == "auto":
        raise InputError(
            "shard and attention need the same layout, so choose it before both",
            got="the layout 'auto'",
            next_step="plan_for_mesh(mesh, seq_len=..., heads=...).layout is the fastest: pass it to both",
        )
    if isinstance(layout, str):
        return make_layout(layout, length, ranks, mask if layout in OF_MASKS else None)
    if not isinstance(layout, Layout):
        raise unknown_name("layout", layout, LAYOUTS)
    if layout.ranks != ranks or layout.length != length:
        raise LayoutError(
            "the layout is for another mesh or sequence",
            got=f"{layout.ranks} ranks and {layout.length} tokens",
            allowed=f"{ranks} ranks and {length} tokens",
        )
    return layout


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise `ShapeError` if query heads are not a multiple of K/V heads."""
    if heads % kv_heads:
        next_step = "make kv_heads a divisor of the query heads (GQA)"
        raise ShapeError(
            "query heads are not a multiple of K/V heads", got=f"{heads} and {kv_heads}", next_step=next_step
        )
