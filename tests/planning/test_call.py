"""Test the description of a call."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

from burst_portable.backends.selection import load
from burst_portable.cli.plan_facts import plan_facts
from burst_portable.layout import Layout, make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.profiling.plan_facts import PlanFacts
from tests.support.plans import make_plan

PAGE = Path(__file__).parents[2] / "docs" / "writing_a_strategy.md"


def test_profiles_and_plans_describe_a_call_alike():
    """Both files have each fact of the call, and a layout without a name has its segments instead."""
    unnamed = Layout("", 64, make_layout("zigzag", 64, 2).shards)
    plan = make_plan(Mask.causal(), ranks=2)
    call = replace(plan.call, layout=unnamed)
    plan = replace(plan, call=call)
    expected = {"seq_len": 64, "ranks": 2, "mask": "causal", "layout": "2 segments per rank, step 1"}
    assert call.facts().items() >= expected.items()
    profile, page = PlanFacts(plan, 0).describe(load("cpu")), plan_facts(plan, HardwareSpec(1.0, 1.0), 0)
    assert {**profile, **call.facts()} == profile
    assert {**page["problem"], **call.facts()} == page["problem"]


def test_page_lists_what_a_strategy_reads():
    """The table has each field and property of a call, and nothing else."""
    table = PAGE.read_text(encoding="utf-8").partition("| of `call` | meaning |")[2].partition("\n\n")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    properties = [name for name, value in vars(AttentionCall).items() if isinstance(value, property)]
    assert sorted(listed) == sorted([*(field.name for field in fields(AttentionCall)), *properties])
