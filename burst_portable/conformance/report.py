"""Define the report of a conformance run, and write it as JSON, JUnit XML and Markdown.

The fields of the JSON file are described in docs/conformance.md.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from burst_portable.errors import InputError, in_a_line
from burst_portable.utils.files import parse_json

SCHEMA = "burst_portable.conformance/3"

NOT_STATED = "not stated"
"""The level of a report if neither the backend's probe nor the caller states one."""

EVIDENCE_LEVELS = {
    NOT_STATED: "the backend's probe states no evidence_level",
    "reference": "only the reference kernel, in plain torch",
    "interpreter": "kernels in an interpreter on the CPU",
    "machine code": "kernels compiled for a chip, but not run",
    "simulated": "the vendor's real Python package on a simulated driver, which tests calls only",
    "device": "the real device, as the backend or the caller states",
}
"""Levels of evidence, the weakest first."""


@dataclass(frozen=True)
class Result:
    """The result of one test.

    Attributes:
        check: Name of the group.
        name: Name of the test within the group.
        ok: Whether it passed or was skipped.
        seconds: Duration.
        errors: Quantity -> (error, tolerance).
        message: What is wrong, in one line; "" if nothing is.
        skipped: Why it was not run; "" if it was.
        smallest: Name of the smallest test that still fails; "" if it passed.
        command: Command that runs only the smallest test; "" if it passed.
        kernels: Names of the kernels that computed in it.
    """

    check: str
    name: str
    ok: bool
    seconds: float = 0.0
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    message: str = ""
    skipped: str = ""
    smallest: str = ""
    command: str = ""
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """One group in one line. `closest`: the quantity that came closest to its tolerance, with the share of it."""

    check: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    closest: str


@dataclass(frozen=True)
class Report:
    """The report on one backend.

    Attributes:
        ok: Whether at least one test ran and none failed.
        not_examined: Kernels of the backend that computed in no test of this report -> reason.
        strategy: Name of the one strategy that was tested; "" for the whole backend.
    """

    backend: str
    evidence_level: str
    date: str
    seconds: float
    ranks: int
    coverage: str
    kernel: str
    only: tuple[str, ...]
    kernels: tuple[str, ...]
    device: Mapping[str, str]
    versions: Mapping[str, str]
    results: tuple[Result, ...]
    not_examined: Mapping[str, str] = field(default_factory=dict)
    strategy: str = ""

    @property
    def ok(self) -> bool:
        """Return whether at least one test ran and none failed."""
        return bool(self.results) and not self.failures and any(not r.skipped for r in self.results)

    @property
    def conforms(self) -> bool:
        """Return whether `ok` is true, all tests were selected, and each kernel of the backend computed in one."""
        return self.ok and not self.selection and not self.not_examined

    @property
    def selection(self) -> tuple[str, ...]:
        """The groups, cases, strategy or kernel to which the run was limited; () if it was not."""
        kernel = () if self.kernel == "auto" else (f"kernel {self.kernel}",)
        return (*self.only, *((f"strategy {self.strategy}",) if self.strategy else ()), *kernel)

    @property
    def subject(self) -> str:
        """What was tested: the backend, or one strategy on it."""
        return f"strategy {self.strategy} on {self.backend}" if self.strategy else self.backend

    @property
    def failures(self) -> tuple[Result, ...]:
        """Results of the failed tests."""
        return tuple(r for r in self.results if not r.ok)

    @property
    def skipped(self) -> tuple[Result, ...]:
        """Results of the skipped tests."""
        return tuple(r for r in self.results if r.skipped)

    def lines(self) -> list[Line]:
        """Return one line per group, in the order of the results."""
        checks = dict.fromkeys(result.check for result in self.results)
        return [_line(check, [r for r in self.results if r.check == check]) for check in checks]

    def computed(self) -> dict[str, int]:
        """Return the number of tests in which each kernel of the backend computed."""
        found = Counter(name for result in self.results for name in result.kernels)
        return {name: found[name] for name in dict.fromkeys((*self.kernels, *found))}

    def counts(self) -> dict[str, int]:
        """Return the numbers of passed, failed and skipped tests."""
        skipped, failed = len(self.skipped), len(self.failures)
        return {"passed": len(self.results) - skipped - failed, "failed": failed, "skipped": skipped}

    # ------------------------------------------------------------------------------------------- formats

    def to_json(self) -> str:
        """Return the report as a JSON object, with one result per line."""
        facts = {"schema": SCHEMA, **{k: v for k, v in asdict(self).items() if k != "results"}}
        facts |= {"seconds": round(self.seconds, 1), "ok": self.ok, "counts": self.counts()}
        head = json.dumps(facts, indent=1, default=str)
        rows = ",\n  ".join(json.dumps(_lean(result)) for result in self.results)
        return f'{head[:-2]},\n "results": [\n  {rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote.

        Raises:
            InputError: If the text is not such a report.
        """
        facts = parse_json(text, "this", "a conformance report")
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            got = repr(facts.get("schema"))[:80] if isinstance(facts, dict) else type(facts).__name__
            raise InputError("not a conformance report of this version", got=got, allowed=SCHEMA)
        try:
            for derived in ("schema", "ok", "counts"):
                facts.pop(derived)
            results = tuple(_read(row) for row in facts.pop("results"))
            only, kernels = (tuple(facts.pop(name)) for name in ("only", "kernels"))
            return cls(**facts, only=only, kernels=kernels, results=results)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            what = "not a conformance report of this library: a field is missing or wrong"
            raise InputError(what, got=in_a_line(error)) from error

    def junit(self) -> str:
        """Return the report as JUnit XML, with one test suite per group."""
        root = ElementTree.Element("testsuites", name=f"burst-portable conform {self.backend}")
        root.set("time", f"{self.seconds:.3f}")
        _set_counts(root, tests=len(self.results), failures=len(self.failures), skipped=len(self.skipped))
        for line in self.lines():
            results = [r for r in self.results if r.check == line.check]
            suite = ElementTree.SubElement(root, "testsuite", name=line.check, time=f"{line.seconds:.3f}")
            _set_counts(suite, tests=len(results), failures=line.failed, skipped=line.skipped)
            for result in results:
                _junit_case(suite, self.backend, result)
        ElementTree.indent(root)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'

    def markdown(self) -> str:
        """Return the report as Markdown: facts, one line per group, and every failure with its command."""
        counts = self.counts()
        facts = {
            "tried": f"{self.coverage}, up to {self.ranks} ranks, kernel {self.kernel}",
            "strategy": self.strategy or "all",
            "groups": ", ".join(self.only) or "all",
            "kernels": computed_text(self),
            **self.versions,
            **{f"device: {name}": value for name, value in self.device.items()},
        }
        parts = [
            f"# Conformance of `{self.subject}`: {'passed' if self.ok else 'FAILED'}",
            "",
            f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, on {self.date[:10]}. "
            f"Evidence: {self.evidence_level} ({EVIDENCE_LEVELS.get(self.evidence_level, 'unknown')}).",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {_cell(value)} |" for name, value in facts.items()),
            "",
            "| group | passed | failed | skipped | closest to the limit | seconds |",
            "| --- | ---: | ---: | ---: | --- | ---: |",
            *(
                f"| {x.check} | {x.passed} | {x.failed} | {x.skipped} | {x.closest} | {x.seconds:.1f} |"
                for x in self.lines()
            ),
        ]
        parts += ["", "## Failures"] if self.failures else []
        for r in self.failures:
            parts += ["", f"`{r.check}:{r.name}`: {r.message}", "", "```sh", r.command, "```"]
        parts += ["", "## Skipped", ""] if self.skipped else []
        reasons = Counter(result.skipped for result in self.skipped)
        parts += [f"- {count} times: {_cell(reason)}" for reason, count in reasons.items()]
        return "\n".join(parts) + "\n"


def computed_text(report: Report) -> str:
    """Return in how many tests each kernel computed, and which kernels were not examined, with the reason."""
    if not any(result.kernels for result in report.results) and not report.not_examined:
        return ", ".join(report.kernels)  # a report that records no kernels
    found = report.computed()
    parts = [f"{name} computed in {count} tests" for name, count in found.items() if count]
    parts += [f"{name} was not examined: {reason}" for name, reason in report.not_examined.items()]
    return "; ".join(parts)


def _set_counts(element: ElementTree.Element, **counts: int) -> None:
    for name, count in counts.items():
        element.set(name, str(count))


def _line(check: str, results: list[Result]) -> Line:
    parts = [
        (error / allowed if allowed else float("inf") if error else 0.0, name)
        for r in results
        for name, (error, allowed) in r.errors.items()
    ]
    failed = sum(not r.ok for r in results)
    skipped = sum(bool(r.skipped) and r.ok for r in results)
    seconds = sum(r.seconds for r in results)
    part, quantity = max(parts, default=(0.0, ""))
    closest = f"{quantity} at {100 * part:.0f} %" if quantity else ""
    return Line(check, len(results) - failed - skipped, failed, skipped, seconds, closest)


def _lean(result: Result) -> dict[str, Any]:
    """Return the result without empty fields, with numbers of three digits. Infinity and NaN become text, for JSON."""
    facts = asdict(result)
    facts["errors"] = {name: [_short(error), _short(allowed)] for name, (error, allowed) in result.errors.items()}
    return {name: fact for name, fact in facts.items() if fact not in ("", {}, ())}


def _short(number: float) -> float | str:
    return float(f"{number:.3g}") if math.isfinite(number) else str(number)


def _read(row: dict[str, Any]) -> Result:
    pairs = {name: (float(error), float(allowed)) for name, (error, allowed) in row.pop("errors", {}).items()}
    return Result(errors=pairs, kernels=tuple(row.pop("kernels", ())), **row)


def _junit_case(suite: ElementTree.Element, backend: str, result: Result) -> None:
    case = ElementTree.SubElement(suite, "testcase", name=result.name, time=f"{result.seconds:.3f}")
    case.set("classname", f"{backend}.{result.check}")
    if not result.ok:
        failure = ElementTree.SubElement(case, "failure", message=_for_xml(result.message))
        failure.text = _for_xml(f"{result.message}\nsmallest: {result.smallest}\nagain: {result.command}")
    elif result.skipped:
        ElementTree.SubElement(case, "skipped", message=_for_xml(result.skipped))


def _for_xml(text: str) -> str:
    """Replace control characters, which XML does not allow. Messages of vendors contain them for colors."""
    return "".join(c if c in "\t\n" or c.isprintable() else "?" for c in text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
