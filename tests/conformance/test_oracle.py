"""Test that the oracle checks the 2-norm and the largest absolute error, and detects errors that only one of them
shows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import attention, errors, expected, find_violations, make_inputs, relative_error
from tests.support.remembered_oracle import Remembering

QUANTITIES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def answers(request):
    case = replace(Case(), mask="causal", length=256, dtype=request.param)
    return *expected(case, make_inputs(case)), case.dtype


def test_judge_accepts_plain_attention(answers):
    exact, plain, dtype = answers
    assert find_violations(plain, exact, plain, dtype) == {}
    assert errors(plain, exact, plain, dtype).keys() == {
        f"{name}{more}" for name in QUANTITIES for more in ("", " (max)")
    }


@pytest.mark.parametrize("name", QUANTITIES)
def test_judge_finds_one_wrong_element_by_its_maximum_only(answers, name):
    exact, plain, dtype = answers
    right = getattr(exact, name)
    wrong = getattr(plain, name).double().clone(memory_format=torch.contiguous_format)
    _, allowed = errors(plain, exact, plain, dtype)[f"{name} (max)"]
    wrong.view(-1)[-1] += 2 * allowed * right.abs().max()
    assert find_violations(replace(plain, **{name: wrong}), exact, plain, dtype).keys() == {f"{name} (max)"}


@pytest.mark.parametrize("name", QUANTITIES)
def test_judge_finds_small_error_everywhere_by_its_norm_only(answers, name):
    exact, plain, dtype = answers
    _, allowed = errors(plain, exact, plain, dtype)[name]
    wrong = getattr(exact, name) * (1 + 1.1 * allowed)
    assert find_violations(replace(plain, **{name: wrong}), exact, plain, dtype).keys() == {name}


def test_relative_error_compares_infinities():
    exact = torch.tensor([3.0, -math.inf, 4.0])
    assert relative_error(exact, exact) == relative_error(exact, exact, math.inf) == 0.0
    for order in (2, math.inf):
        assert relative_error(torch.tensor([3.0, 0.0, 4.0]), exact, order) == math.inf
        assert relative_error(torch.tensor([math.nan, -math.inf, 4.0]), exact, order) == math.inf
    assert relative_error(torch.tensor([3.0, -math.inf, 5.0]), exact) == 0.2
    assert relative_error(torch.tensor([3.0, -math.inf, 5.0]), exact, math.inf) == 0.25
    blind = torch.full((2,), -math.inf)
    assert relative_error(blind, blind, math.inf) == 0.0


@pytest.mark.parametrize("changed", ["q", "dout", "mask", "scale", "dtype"])
def test_remembered_oracle_computes_each_difference(changed):
    """One changed bit is another case, and changing an answer changes no later one."""
    x, remembering = make_inputs(Case(length=7, dtype=torch.bfloat16)), Remembering(attention)
    given = {
        **{name: getattr(x, name) for name in ("q", "k", "v", "dout")},
        "mask": torch.ones(7, 7).tril().bool(), "scale": 0.25, "dtype": torch.float32,
    }  # fmt: skip
    remembering(**given).out.zero_()
    other = {**given, "scale": 0.5, "dtype": torch.float64}[changed]
    if changed in ("q", "dout", "mask"):
        other = given[changed].clone()
        other.view(-1)[0] = not other.view(-1)[0]
    for arguments in (given, {**given, changed: other}) * 2:
        assert remembering(**arguments).differs(attention(**arguments)) == ""
    assert remembering.computed == 2
