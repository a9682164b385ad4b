"""Test invalid arguments of plans: meaningless options and invalid combinations."""

from __future__ import annotations

import dataclasses

import pytest

from burst_portable.errors import InputError, LayoutError, UnknownNameError, UnsupportedError
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.strategies.planner import plan
from burst_portable.strategies.registry import OURS, make_strategy
from tests.support.plans import make_plan


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "brst"}, UnknownNameError, "did you mean 'burst'"),
        ({"strategy": "ring+direct"}, InputError, r"options of a strategy are malformed.*ring\(OPTION=VALUE"),
        ({"strategy": "usp(transfer)"}, InputError, "options of a strategy are malformed"),
        ({"strategy": "ring(transfer=direct"}, InputError, "options of a strategy are malformed"),
        ({"strategy": "ring(transfer=direct, transfer=ring)"}, InputError, "options of a strategy are malformed"),
        ({"strategy": "rong(transfer=direct)"}, UnknownNameError, "did you mean 'ring'"),
        ({"strategy": "ring(transfer=straight)"}, UnknownNameError, "unknown way to transfer"),
        ({"strategy": "ring(steps=2)"}, InputError, "no option 'steps'"),
        ({"strategy": "ulysses(head_groups=1.5)"}, InputError, "head_groups is not a number of groups"),
        ({"strategy": "usp(ranks_per_node=2)", "ranks_per_node": 4}, InputError, "ranks_per_node is given twice"),
        ({"strategy": "ring", "ranks_per_node": 2}, InputError, "no option 'ranks_per_node'"),
        ({"strategy": "double_ring", "ranks_per_node": 3}, InputError, "does not divide"),
        ({"strategy": "ring", "local_block_order": "last"}, InputError, "forwards the local block in step 0"),
        ({"strategy": "ulysses", "heads": 6}, UnsupportedError, "cannot divide these heads"),
        ({"strategy": "ulysses", "heads": 12, "kv_heads": 3}, UnsupportedError, "cannot divide these heads"),
        ({"ranks": 65}, LayoutError, "more ranks than tokens"),
        ({"ranks": 0}, InputError, "ranks is not a size"),
        ({"layout": "zig"}, UnknownNameError, "did you mean 'zigzag'"),
        ({"layout": "document_zigzag", "mask": Mask.prefix_lm(4)}, LayoutError, "documents that fill"),
    ],
)
def test_make_plan_rejects_conflicting_options(options, error, message):
    with pytest.raises(error, match=message):
        make_plan(**options)


WRONG = {
    "ranks_per_node": (2.0, "ranks_per_node is not a size; got 2.0"),
    "backward_circulates": ("k", "side to circulate"),
    "transfer": ("teleport", "direct, ring"),
    "prefetch_steps": (0, "prefetch_steps is not a number of steps; got 0"),
    "blocks_per_launch": (0, "blocks_per_launch is not a number of blocks; got 0"),
    "local_block_order": ("middle", "first, last"),
    "gradient_comm_dtype": ("bf16", "float32, input"),
    "head_groups": (0, "head_groups is not a number of groups; got 0"),
    "hardware": (1.0, "hardware"),
}


@pytest.mark.parametrize("name", OURS)
def test_make_strategy_rejects_invalid_option_values(name):
    for field in dataclasses.fields(make_strategy(name)):
        declared = field.metadata.get("option")
        value, told = WRONG.get(field.name) or (object(), declared.noun)
        with pytest.raises(InputError, match=told):
            make_strategy(name, **{field.name: value})


@pytest.mark.parametrize(("length", "ranks"), [(32, 2), (16, 4)])
def test_plan_rejects_layout_of_another_problem(length, ranks):
    """`plan` checks a given layout in the same way as `attention`."""
    with pytest.raises(LayoutError, match=r"another mesh or sequence.*allowed: 2 ranks and 16 tokens"):
        plan(seq_len=16, ranks=2, heads=2, layout=make_layout("zigzag", length, ranks))
