"""The suite as a product: the smallest case, reports in every format, the command, the decorator, the support page."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from burst_portable.cli import main
from burst_portable.conformance import Case, Report, check_backend
from burst_portable.conformance.cases import HEADS, MASKS, STRATEGIES, covering, mask_of, product
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.checks.attention import axes
from burst_portable.conformance.pytest import backend_checks
from burst_portable.conformance.suite import candidates, smallest, trial_of, trials_of
from burst_portable.conformance.trial import Subject
from burst_portable.errors import BackendUnavailableError, InputError
from burst_portable.layout import NAMES as LAYOUTS
from tests.conformance import planted
from tests.conformance.planted import Planted

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------ cases


def test_a_case_survives_its_text():
    many = covering(axes(8))
    assert [Case.parse(case.spec()) for case in many] == many


@pytest.mark.parametrize("text", ["mask=fulll", "size=3", "heads=4x3x8x8", "ranks=0", "softcap=-1", "sinks=maybe"])
def test_a_case_that_is_none_is_refused(text):
    with pytest.raises(InputError):
        Case.parse(text)


def test_the_page_lists_the_choices():
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    for axis, names in (("mask", MASKS), ("layout", LAYOUTS), ("strategy", STRATEGIES), ("heads", HEADS)):
        assert f"| `{axis}` | {', '.join(names)}" in page, axis


def test_choices_that_do_not_go_together_are_refused():
    with pytest.raises(InputError, match="do not go together"):
        Case.parse("ranks=8,length=4")


@pytest.mark.parametrize("length", [4, 20, 53, 64, 200])
@pytest.mark.parametrize("name", MASKS)
def test_masks_fit_any_length(name, length):
    mask = mask_of(name, length)
    mask.check_lengths(length, length)
    assert mask_of(name, 53) is MASKS[name]


def test_the_smallest_case_is_found():
    """Something that only three ranks and a window show."""
    start = next(c for c in product({**axes(8), "mask": ("window",), "ranks": (8,)}) if c.softcap and c.sinks)
    found = smallest(start, lambda case: case.ranks >= 3 and case.mask == "window")
    assert found == Case(
        mask="window", layout="contiguous", ranks=3, heads="1x1x8x8", length=3, batch=1, dtype=torch.float32
    )


def test_each_step_is_smaller_and_possible():
    case = Case(ranks=6, heads="wide_values", values="large", memory="padded", sinks=True)
    for simpler in candidates(case):
        assert simpler.possible()
        assert simpler != case
        assert simpler.sizes[0] <= max(HEADS[case.heads][0], 12)


# ---------------------------------------------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def failed() -> Report:
    return check_backend(Planted(planted.BandOffByOne), ranks=3, only=["attention"], effort="quick")


def test_a_failure_tells_its_smallest_case_and_how_to_run_it(failed):
    first = failed.failures[0]
    case = Case.parse(first.smallest.removeprefix("attention:"))
    assert case.ranks == 1
    assert case.mask in ("window", "window_both")
    assert case.length < 10
    assert first.command == f"burst-portable conform --backend planted --case {first.smallest}"
    again = check_backend(Planted(planted.BandOffByOne), cases=[first.smallest], effort="quick", fail_fast=True)
    assert not again.ok
    assert check_backend("cpu", cases=[first.smallest]).ok


def test_json_comes_back(failed):
    facts = json.loads(failed.to_json())
    assert facts["schema"] == "burst_portable.conformance/1"
    assert facts["ok"] is False
    assert facts["counts"]["failed"] == len(failed.failures)
    back = Report.from_json(failed.to_json())
    assert back.counts() == failed.counts()
    assert [r.command for r in back.results] == [r.command for r in failed.results]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "burst_portable.conformance/0"}'])
def test_json_that_is_no_report_is_refused(text):
    with pytest.raises(InputError, match="not a report"):
        Report.from_json(text)


def test_junit_counts(failed):
    (suite,) = ElementTree.fromstring(failed.junit())
    assert int(suite.get("tests")) == len(failed.results)
    assert int(suite.get("failures")) == len(failed.failures) == len(suite.findall(".//failure"))
    assert "burst-portable conform --backend planted --case" in suite.find(".//failure").text


def test_every_format_holds_what_vendors_say(failed):
    """Colours and other control characters; errors that are no numbers."""
    odd = replace(failed.failures[0], message="\x1b[31mred\x00 <&> \ud800", errors={"out": (float("nan"), 1.0)})
    report = replace(failed, results=(odd, replace(odd, ok=True, skipped="\x07")))
    (suite,) = root = ElementTree.fromstring(report.junit())
    for element in (root, suite):
        assert [element.get(name) for name in ("tests", "failures", "skipped")] == ["2", "1", "1"]
    assert suite.find(".//failure").get("message") == "?[31mred? <&> ?"
    back = Report.from_json(report.to_json())
    assert math.isnan(back.results[0].errors["out"][0])
    assert json.loads(report.to_json(), parse_constant=pytest.fail)


def test_every_failure_is_shrunk(failed):
    assert len(failed.failures) > 3
    for result in failed.failures:
        tried, least = Case.parse(result.name), Case.parse(result.smallest.partition(":")[2])
        assert (least.ranks, least.length) < (tried.ranks, tried.length)


def test_markdown_shows_failures(failed):
    text = failed.markdown()
    assert "FAILED" in text
    assert all(result.command in text for result in failed.failures)


def test_a_report_of_nothing_but_skips_is_no_pass():
    report = check_backend("cpu", only=["transport"], ranks=2, effort="quick")
    skipped = tuple(replace(result, skipped="no device") for result in report.results)
    assert report.ok
    assert not replace(report, results=skipped).ok
    assert not replace(report, results=()).ok


# ------------------------------------------------------------------------------------------- the suite, the command


def test_names_of_trials_are_unique_and_lead_back():
    subject = Subject(Planted(planted.Around), 4, "quick")
    texts = [trial.text for trial in trials_of(subject)]
    assert len(set(texts)) == len(texts)
    assert {text.partition(":")[0] for text in texts} == set(CHECKS)
    for text in texts[:: len(texts) // 12]:
        assert trial_of(subject, text).text == text


def test_a_backend_that_cannot_run_is_refused():
    with pytest.raises(BackendUnavailableError, match="cannot run here"):
        check_backend("cuda")


@pytest.mark.slow
def test_messages_between_processes():
    assert check_backend("cpu", cases=["group:messages-2ranks"]).ok


@pytest.mark.full
def test_attention_between_processes():
    report = check_backend("cpu", ranks=4, only=["group"])
    assert report.ok, report.markdown()


def test_the_command_writes_every_format(tmp_path, capsys):
    files = [tmp_path / name for name in ("r.json", "r.xml", "r.md")]
    formats = [word for pair in zip(("--json", "--junit", "--markdown"), map(str, files), strict=True) for word in pair]
    options = ["--backend", "cpu", "--quick", "--ranks", "2", "--only", "transport,blind"]
    assert main(["conform", *options, *formats]) == 0
    captured = capsys.readouterr()
    assert "cpu conforms" in captured.out
    # No terminal: a line for each group that is done.
    told = re.findall(r"^(\w+): (\d+) checks in \d+\.\d s$", captured.err, re.MULTILINE)
    counts = {line.check: line.passed + line.skipped for line in Report.from_json(files[0].read_text()).lines()}
    assert {group: int(count) for group, count in told} == counts
    assert [group for group, _ in told] == list(counts)
    assert len(captured.err.splitlines()) == len(told) == 2
    assert Report.from_json(files[0].read_text()).ok
    assert ElementTree.fromstring(files[1].read_text()).tag == "testsuites"
    assert files[2].read_text().startswith("# Conformance of `cpu`: passed")


WRONG = {
    "backend": (["--backend", "cup"], "did you mean 'cpu'"),
    "not here": (["--backend", "cuda"], "cannot run here"),
    "group": (["--backend", "cpu", "--only", "nothing"], "unknown group"),
    "case": (["--backend", "cpu", "--case", "attention:mask=no"], "unknown mask"),
    "trial": (["--backend", "cpu", "--case", "claims:no"], "unknown trial"),
    "ranks": (["--backend", "cpu", "--ranks", "0"], "1 to 64"),
    "ranks, no number": (["--backend", "cpu", "--ranks", "two"], "--ranks"),
    "kernel": (["--backend", "cpu", "--kernel", "no"], "unknown kernel"),
    "two kernels": (
        ["--backend", "cpu", "--kernel", "cpu_flash", "--case", "kernels:reference:default"],
        "of another kernel",
    ),
    "tier": (["--backend", "cpu", "--tier", "gold"], "unknown tier"),
    "both": (["--quick", "--full"], "exclude"),
    "file": (["--backend", "cpu", "--json", "/no/such/folder/x.json"], "cannot be written"),
}


@pytest.mark.parametrize(("options", "says"), WRONG.values(), ids=list(WRONG))
def test_bad_input_is_one_line_and_2(options, says, capsys):
    assert main(["conform", *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_the_command_fails_with_1(monkeypatch, capsys):
    monkeypatch.setattr("burst_portable.conformance.suite.load", lambda name: Planted(planted.WrongScale))
    assert main(["conform", "--backend", "planted", "--case", "kernels:reference:ranks=1"]) == 1
    printed, told = capsys.readouterr()
    assert "does not conform" in printed
    assert re.fullmatch(r"kernels: 1 check in \d+\.\d s, 1 failed\n", told)
    assert "again:    burst-portable conform --backend planted --case kernels:reference:" in printed


# --------------------------------------------------------------------------------------------------- the decorator


@backend_checks("cpu", ranks=2, effort="quick", only=["blind", "transport"])
def test_the_decorator(check):
    check()


def test_the_decorator_fails_with_the_smallest_case():
    mark = backend_checks(Planted(planted.SwappedGradients), ranks=2, effort="quick", only=["blind"])
    (check, *_) = mark.args[1]
    with pytest.raises(pytest.fail.Exception, match=r"(?s)dk is off.*smallest: blind:.*again: burst-portable conform"):
        check()


def test_the_decorator_skips_what_cannot_run():
    ((only,),) = [backend_checks("cuda").args[1]]
    assert "CUDA" in only.marks[0].kwargs["reason"]


# ------------------------------------------------------------------------------------------------ the support page


def make_support():
    spec = importlib.util.spec_from_file_location("make_support", ROOT / "ci" / "make_support.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_support_page_is_what_the_reports_make():
    script = make_support()
    assert script.main(["--check"]) == 0
    assert (ROOT / "docs" / "support.md").read_text() == script.page(script.vendors(ROOT))


def test_a_cache_of_python_s_is_no_vendor(tmp_path):
    for name in ("cpu", "__pycache__"):
        (tmp_path / "backends" / name).mkdir(parents=True)
    assert make_support().vendors(tmp_path) == {"cpu": {}}


def test_what_has_no_report_is_untested(failed):
    script = make_support()
    page = script.page({"new": {}, "bad": {"x.json": failed}})
    row = next(line for line in page.splitlines() if line.startswith("| [new]"))
    assert row.count("untested") == 5
    assert "**FAILED**" in page


@pytest.mark.full
@pytest.mark.timeout(0)
def test_the_cpu_backend_conforms():
    report = check_backend("cpu")
    assert report.ok, report.markdown()
