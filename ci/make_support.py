"""Write docs/support.md from the evidence: the reports in backends/<vendor>/evidence/*.json.

    python ci/make_support.py [--check]

With --check nothing is written, and the exit code is 1 if the page differs from what would be written.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from burst_portable.conformance.report import EVIDENCE_LEVELS, NOT_STATED, Report

ROOT = Path(__file__).resolve().parent.parent
UNTESTED = "untested"
LEVELS = {name: text for name, text in EVIDENCE_LEVELS.items() if name != NOT_STATED}

HEAD = """# Support

The table lists the backends that passed the conformance suite, with the newest report of each kind,
its date and versions. "(only ...)" names the groups of checks if not all ran. "untested" means that
there is no report. [Conformance](conformance.md) describes the checks.
"""

LEVELS_HEAD = """## Columns

From the weakest evidence to the strongest. Weak evidence does not replace strong evidence.
"""

LIMITS = """
Limits of the evidence without a device:

- **simulated**: For Ascend, this tests calls of torch_npu's API, streams, HCCL, layouts, masks and
  the conversion of LSE. This project emulates the attention operator from its documentation, so
  the numbers prove nothing about Huawei's operator.
- **interpreter**: It runs a kernel with the block sizes of a chip, in float32 and float16. Triton's
  interpreter computes bfloat16 incorrectly.
- **machine code**: It shows that a kernel compiles, and which resources of the chip it needs.
  Nothing was run.
"""

FOOT = """
## Add a report

This page is written by `python ci/make_support.py` from the reports in `backends/*/evidence/`.
To add one, run this on the device, and then the script:

```sh
burst-portable conform --backend NAME --json backends/NAME/evidence/DEVICE.json
```
"""


def evidence(folder: Path) -> dict[str, Report]:
    """Return the reports of a vendor, by file name."""
    files = sorted((folder / "evidence").glob("*.json"))
    return {file.name: Report.from_json(file.read_text(encoding="utf-8")) for file in files}


def vendors(root: Path) -> dict[str, dict[str, Report]]:
    """Return the reports in each folder of `backends/`, by vendor."""
    folders = [f for f in sorted((root / "backends").iterdir()) if f.is_dir() and f.name != "__pycache__"]
    return {f.name: evidence(f) for f in folders}


def page(found: dict[str, dict[str, Report]]) -> str:
    """Return the text of the page."""
    lines = [HEAD, f"| backend | {' | '.join(LEVELS)} |", f"| --- |{' --- |' * len(LEVELS)}"]
    for name, reports in found.items():
        cells = [_cell([r for r in reports.values() if r.evidence_level == level]) for level in LEVELS]
        lines.append(f"| [{name}](../backends/{name}/README.md) | {' | '.join(cells)} |")
    lines += ["", LEVELS_HEAD, *(f"- **{level}**: {what}." for level, what in LEVELS.items()), LIMITS]
    lines += ["## Reports", "", "| report | result | tried | on | with |", "| --- | --- | --- | --- | --- |"]
    for name, reports in found.items():
        lines += [_row(name, file, report) for file, report in reports.items()]
    failures = [(name, file, f) for name, reports in found.items() for file, r in reports.items() for f in r.failures]
    if failures:
        lines += ["", "## Failures", ""]
        lines += [
            f"- {name}/{file}: `{failure.check}:{failure.name}`: {failure.message}" for name, file, failure in failures
        ]
    return "\n".join([*lines, FOOT])


def _cell(reports: list[Report]) -> str:
    if not reports:
        return UNTESTED
    newest = max(reports, key=lambda r: r.date)
    verdict = "passed" if newest.ok else "**FAILED**"
    limits = f" (only {', '.join(newest.only)})" if newest.only else ""
    return (
        f"{verdict}{limits} {newest.date[:10]}, {newest.versions['burst_portable']}, torch {newest.versions['torch']}"
    )


def _row(name: str, file: str, report: Report) -> str:
    counts = ", ".join(f"{count} {what}" for what, count in report.counts().items())
    groups = f"only {', '.join(report.only)}; " if report.only else ""
    kernel = "" if report.kernel == "auto" else f"kernel {report.kernel}; "
    tried = f"{groups}{kernel}{report.coverage}, up to {report.ranks} ranks"
    device = _devices(report)
    versions = f"Python {report.versions['python']}, torch {report.versions['torch']}"
    link = f"[{name}/{file}](../backends/{name}/evidence/{file})"
    result = "passed" if report.ok else "**FAILED**"
    return f"| {link} | {result}: {counts} | {tried} | {device}, {report.date[:10]} | {versions} |"


def _devices(report: Report) -> str:
    """Return the device of a report: GPUs by name and number, else the processor, else the type of device."""
    device = report.device
    if "devices" in device:
        every = [one["name"] for one in ast.literal_eval(device["devices"])]
        return ", ".join(f"{every.count(name)} x {name}" for name in dict.fromkeys(every))
    return device.get("name") or device.get("processor") or device["type"]


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with the file."""
    target = ROOT / "docs" / "support.md"
    made = page(vendors(ROOT))
    if "--check" in arguments:
        same = target.is_file() and target.read_text(encoding="utf-8") == made
        print("docs/support.md is up to date" if same else "docs/support.md is out of date: run ci/make_support.py")
        return 0 if same else 1
    target.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
