"""Test the description of a call."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from burst_portable.planning.call import AttentionCall

PAGE = Path(__file__).parents[2] / "docs" / "writing_a_strategy.md"


def test_page_lists_what_a_strategy_reads():
    """The table has each field and property of a call, and nothing else."""
    table = PAGE.read_text(encoding="utf-8").partition("| of `call` | meaning |")[2].partition("\n\n")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    properties = [name for name, value in vars(AttentionCall).items() if isinstance(value, property)]
    assert sorted(listed) == sorted([*(field.name for field in fields(AttentionCall)), *properties])
