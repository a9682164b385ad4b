"""Test how cases are written and read, and which are possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from burst_portable.conformance import Case
from burst_portable.conformance.cases import HEADS, MASKS, STRATEGIES, covering, mask_of
from burst_portable.conformance.checks.attention import axes
from burst_portable.errors import InputError
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.strategies.registry import OURS

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------ cases


def test_case_parses_from_its_text():
    many = covering(axes(8))
    assert [Case.parse(case.spec()) for case in many] == many


@pytest.mark.parametrize("text", ["mask=fulll", "size=3", "heads=4x3x8x8", "ranks=0", "softcap=-1", "sinks=maybe"])
def test_case_parse_rejects_invalid_text(text):
    with pytest.raises(InputError):
        Case.parse(text)


def test_page_lists_case_values():
    page = " ".join((ROOT / "docs" / "conformance.md").read_text(encoding="utf-8").split())
    for axis, names in (("mask", MASKS), ("layout", LAYOUTS), ("heads", HEADS)):
        assert f"- `{axis}`: {', '.join(names)}" in page, axis
    assert f"- `strategy`: {', '.join(OURS)}; or one with options" in page
    labels = [f"- `{label}`" for label in STRATEGIES if label not in OURS]
    assert " ".join(labels) in page


def test_case_rejects_conflicting_values():
    with pytest.raises(InputError, match=r"cannot be combined: the mask custom has no visible pair among 4 tokens"):
        Case.parse("mask=custom,length=4")
    with pytest.raises(InputError, match=r"cannot be combined: .*8 ranks.*got the case 'ranks=8,length=4'"):
        Case.parse("ranks=8,length=4")
    with pytest.raises(InputError, match=r"cannot be combined: ulysses .*got the case 'strategy=ulysses,ranks=5'"):
        Case.parse("strategy=ulysses,ranks=5")


@pytest.mark.parametrize("length", [4, 20, 53, 64, 200])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_cases_fit_any_length(name, length):
    mask = mask_of(name, length)
    mask.check_lengths(length, length)
    assert mask_of(name, 53) is MASKS[name]
