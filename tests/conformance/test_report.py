"""Test conformance reports in every format."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from burst_portable.cli.conform_view import show
from burst_portable.conformance import Report, check_backend
from burst_portable.errors import InputError


def test_report_json_round_trip(failed):
    facts = json.loads(failed.to_json())
    assert facts["schema"] == "burst_portable.conformance/3"
    assert facts["ok"] is False
    assert facts["counts"]["failed"] == len(failed.failures)
    back = Report.from_json(failed.to_json())
    assert back.counts() == failed.counts()
    assert [r.command for r in back.results] == [r.command for r in failed.results]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "burst_portable.conformance/0"}'])
def test_report_rejects_other_json(text):
    with pytest.raises(InputError, match="not a conformance report"):
        Report.from_json(text)


def test_junit_counts_results(failed):
    (suite,) = ElementTree.fromstring(failed.junit())
    assert int(suite.get("tests")) == len(failed.results)
    assert int(suite.get("failures")) == len(failed.failures) == len(suite.findall(".//failure"))
    assert "burst-portable conform --backend planted --case" in suite.find(".//failure").text


def test_reports_escape_vendor_text(failed):
    """The text has control characters, and errors that are not numbers."""
    odd = replace(failed.failures[0], message="\x1b[31mred\x00 <&> \ud800", errors={"out": (float("nan"), 1.0)})
    report = replace(failed, results=(odd, replace(odd, ok=True, skipped="\x07")))
    (suite,) = root = ElementTree.fromstring(report.junit())
    for element in (root, suite):
        assert [element.get(name) for name in ("tests", "failures", "skipped")] == ["2", "1", "1"]
    assert suite.find(".//failure").get("message") == "?[31mred? <&> ?"
    back = Report.from_json(report.to_json())
    assert math.isnan(back.results[0].errors["out"][0])
    assert json.loads(report.to_json(), parse_constant=pytest.fail)


def test_markdown_lists_failures(failed):
    text = failed.markdown()
    assert "FAILED" in text
    assert all(result.command in text for result in failed.failures)


def test_report_conforms_only_if_all_tests_were_selected(capsys):
    """`--only claims` once printed "conforms" without a message between ranks."""
    part = check_backend("cpu", cases=["claims:device"], coverage="quick")
    alone = replace(part, only=(), not_examined={})
    every = replace(alone, results=(*alone.results, replace(alone.results[0], check="group", name="messages-2ranks")))
    shown = {
        "conforms (quick)": every,
        "conforms": replace(every, coverage="usual"),
        "conforms (quick, the backend's own transport was not tested)": alone,
        "conforms (quick, one rank only, the backend's own transport was not tested)": replace(alone, ranks=1),
        "passed the selected tests (claims; not kernels, ": replace(alone, only=("claims",)),
        "passed the selected tests (kernel cpu_flash; not kernels, ": replace(every, kernel="cpu_flash"),
        "does not conform": replace(every, results=(replace(every.results[0], ok=False),)),
    }
    for verdict, report in shown.items():
        assert report.conforms == verdict.startswith("conforms")
        show(report)
        assert f"\ncpu {verdict}{'' if verdict.endswith(', ') else ':'}" in capsys.readouterr().out


def test_report_of_a_strategy_names_it(capsys):
    part = replace(check_backend("cpu", cases=["claims:device"], coverage="quick"), only=(), strategy="my_ring")
    failed = replace(part, results=(replace(part.results[0], ok=False),))
    every = replace(part, results=tuple(replace(part.results[0], check=name) for name in ("attention", "fully_masked")))
    for report, verdict in (
        (part, "passed the selected tests (not attention, fully_masked): 1 passed"),
        (every, "conforms (quick): 2 passed"),
        (replace(every, kernel="reference"), "passed the selected tests (kernel reference): 2 passed"),
        (failed, "does not conform: "),
    ):
        assert not report.conforms  # the backend
        show(report)
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"strategy my_ring on cpu {verdict}")
        assert json.loads(report.to_json())["strategy"] == Report.from_json(report.to_json()).strategy == "my_ring"
        assert report.markdown().startswith("# Conformance of `strategy my_ring on cpu`: ")


def test_failures_with_the_same_smallest_case_are_printed_once(failed, capsys):
    one, other = replace(failed.failures[0], smallest="a:b"), replace(failed.failures[0], smallest="a:c", message="z")
    show(replace(failed, results=(one, replace(one, message="y"), other, replace(one, message="y"))))
    text = capsys.readouterr().out
    assert text.count("\nfailed ") == 2
    assert text.count("  smallest: a:b\n") == text.count("  2 more failed, with the same smallest case\n") == 1
    assert "  y\n" not in text
    assert "and " not in text.partition("smallest: a:c")[2].partition("planted")[0]


def test_failures_with_the_same_message_are_printed_once(failed, capsys):
    """A device without a guard in torch once gave the same error for every dtype and size."""
    names = [f"k-runs-what-it-claims-{n}" for n in range(4)]
    result = replace(failed.failures[0], check="claims", message="not linked", errors={})
    same = tuple(replace(result, name=name, smallest=f"claims:{name}") for name in names)
    show(replace(failed, results=(*same, replace(same[0], name="x", smallest="claims:x", message="other"))))
    text = capsys.readouterr().out
    assert text.count("\nfailed ") == 2
    assert text.count("  3 more failed, with the same message\n") == text.count("  not linked\n") == 1
    assert "\nand " not in text


def test_report_with_only_skips_is_not_ok():
    report = check_backend("cpu", only=["transport"], ranks=2, coverage="quick")
    skipped = tuple(replace(result, skipped="no device") for result in report.results)
    assert report.ok
    assert not replace(report, results=skipped).ok
    assert not replace(report, results=()).ok
