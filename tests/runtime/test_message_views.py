"""Run plans whose messages contain several ranges of rows, and compare with float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from burst_portable.conformance.cases import Case
from tests.support.attention_cases import check_on_threads, sent_and_planned
from tests.support.row_ranges import LENGTH, MASKS, scattered


@dataclass(frozen=True)
class Scattered(Case):
    """A case with the layout and a mask of `tests.support.row_ranges`."""

    number: int = 0
    scatters: bool = True

    def make_layout(self):
        return scattered(self.ranks) if self.scatters else super().make_layout()

    def make_mask(self):
        return MASKS[self.number]


CASE = Scattered(ranks=4, length=LENGTH, batch=1)
CASES = [
    replace(CASE, strategy="ring(transfer=direct)"),
    replace(CASE, strategy="ring(transfer=direct, blocks_per_launch=2)", number=1, dtype=torch.bfloat16),
    replace(CASE, strategy="burst(transfer=direct)", number=2, heads="wide_values", batch=2),
    replace(CASE, strategy="burst(transfer=direct, prefetch_steps=64, blocks_per_launch=64)", ranks=3),
    replace(CASE, strategy="all_gather", heads="mqa", sinks=True),
    replace(CASE, strategy="distflash", number=3, heads="mha", scatters=False, layout="contiguous"),
]


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_several_ranges_of_rows_match_the_oracle(case, peers):
    check_on_threads(case, peers=peers)


def test_queries_of_the_last_case_are_sent_in_several_ranges():
    plan = CASES[-1].make_strategy().plan(CASES[-1].make_call())
    moves = [m for step in plan.steps("forward", 3) for m in (*step.sends, *step.result_receives)]
    assert {m.side for m in moves if len(m.rows) > 1} == {"q"}
    assert any(m.is_partial for m in moves if len(m.rows) > 1)


@pytest.mark.parametrize("strategy", ["ring(transfer=direct)", "burst(transfer=direct)", "all_gather"])
def test_transport_counts_the_bytes_of_several_ranges(strategy):
    sent, planned = sent_and_planned(replace(CASE, strategy=strategy, dtype=torch.bfloat16))
    assert sent == planned
