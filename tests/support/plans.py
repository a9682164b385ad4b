"""Make plans with the usual sizes for the tests of planning."""

from __future__ import annotations

import burst_portable as bp
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.registry import make_strategy


def plan(strategy, ranks=8, **changes):
    usual = {"seq_len": 32768, "heads": 32, "kv_heads": 8, "layout": "zigzag"}
    return bp.plan(ranks=ranks, strategy=strategy, **{**usual, **changes})


def make_plan(mask=None, layout="zigzag", strategy="ring", ranks=4, length=64, heads=8, kv_heads=8, **options) -> Plan:
    mask = Mask.causal() if mask is None else mask
    where = make_layout(layout, length, ranks, mask)
    problem = AttentionCall(mask, where, heads, kv_heads, 64, 64)
    made = make_strategy(strategy, **options) if isinstance(strategy, str) else strategy
    return made.plan(problem)
