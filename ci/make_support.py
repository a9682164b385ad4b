"""Writes docs/support.md from the evidence: the reports under backends/<vendor>/evidence/*.json.

    python ci/make_support.py [--check]

What no report covers reads "untested". With --check nothing is written, and the exit code is 1 where the page on disk
is another than the reports make.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from burst_portable.conformance.report import TIERS, Report

ROOT = Path(__file__).resolve().parent.parent
UNTESTED = "untested"

HEAD = """# What has been tested, on what

Made by `python ci/make_support.py` from the reports in `backends/*/evidence/`; do not edit it. On the machine in
question run `burst-portable conform --backend NAME --json backends/NAME/evidence/WHERE.json`, and then the script. What
no report covers reads "untested", whatever anybody believes. [Conformance](conformance.md) says what is tried.
"""

TIERS_HEAD = """## What the columns mean

From the weakest evidence to the strongest. A weaker one says nothing about a stronger one's question.
"""

STAND_IN = """
What a stand-in shows is plumbing. For Ascend that is torch_npu's API, its streams, HCCL calls, layouts, masks and the
conversion of LSE. The attention operator itself is emulated by this project from its documentation, so its numbers
prove nothing about Huawei's.

An interpreter runs a kernel's program with the blocks of a chip, in float32 and float16; Triton's computes bfloat16
wrongly. Machine code shows that a kernel compiles, and what it takes of a chip; none of it was run.
"""


def evidence(folder: Path) -> dict[str, Report]:
    """The reports of a vendor, by file name."""
    files = sorted((folder / "evidence").glob("*.json"))
    return {file.name: Report.from_json(file.read_text(encoding="utf-8")) for file in files}


def vendors(root: Path) -> dict[str, dict[str, Report]]:
    """Every folder of `backends/`, with its reports; those of Python's caches are none."""
    folders = [f for f in sorted((root / "backends").iterdir()) if f.is_dir() and f.name != "__pycache__"]
    return {f.name: evidence(f) for f in folders}


def page(found: dict[str, dict[str, Report]]) -> str:
    """The whole page."""
    lines = [HEAD, f"| backend | {' | '.join(TIERS)} |", f"| --- |{' --- |' * len(TIERS)}"]
    for name, reports in found.items():
        cells = [_cell([r for r in reports.values() if r.tier == tier]) for tier in TIERS]
        lines.append(f"| [{name}](../backends/{name}/README.md) | {' | '.join(cells)} |")
    lines += ["", TIERS_HEAD, *(f"- **{tier}**: {what}." for tier, what in TIERS.items()), STAND_IN]
    lines += ["## The reports", "", "| report | result | tried | on | with |", "| --- | --- | --- | --- | --- |"]
    for name, reports in found.items():
        lines += [_row(name, file, report) for file, report in reports.items()]
    failures = [(name, file, f) for name, reports in found.items() for file, r in reports.items() for f in r.failures]
    if failures:
        lines += ["", "## What failed", ""]
        lines += [
            f"- {name}/{file}: `{failure.check}:{failure.name}`: {failure.message}" for name, file, failure in failures
        ]
    return "\n".join(lines) + "\n"


def _cell(reports: list[Report]) -> str:
    if not reports:
        return UNTESTED
    newest = max(reports, key=lambda r: r.date)
    verdict = "passed" if newest.ok else "**FAILED**"
    return f"{verdict} {newest.date[:10]}, {newest.versions['burst_portable']}, torch {newest.versions['torch']}"


def _row(name: str, file: str, report: Report) -> str:
    counts = ", ".join(f"{count} {what}" for what, count in report.counts().items())
    groups = f"only {', '.join(report.only)}; " if report.only else ""
    kernel = "" if report.kernel == "auto" else f"kernel {report.kernel}; "
    tried = f"{groups}{kernel}{report.effort}, up to {report.ranks} ranks"
    device = _devices(report)
    versions = f"Python {report.versions['python']}, torch {report.versions['torch']}"
    link = f"[{name}/{file}](../backends/{name}/evidence/{file})"
    result = "passed" if report.ok else "**FAILED**"
    return f"| {link} | {result}: {counts} | {tried} | {device}, {report.date[:10]} | {versions} |"


def _devices(report: Report) -> str:
    """What it ran on: GPUs by name and number, else the processor, else the type of device alone."""
    told = report.device
    if "devices" in told:
        every = [one["name"] for one in ast.literal_eval(told["devices"])]
        return ", ".join(f"{every.count(name)} x {name}" for name in dict.fromkeys(every))
    return told.get("name") or told.get("processor") or told["type"]


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    target = ROOT / "docs" / "support.md"
    made = page(vendors(ROOT))
    if "--check" in arguments:
        same = target.is_file() and target.read_text(encoding="utf-8") == made
        print("docs/support.md is what the reports make" if same else "docs/support.md is old: run ci/make_support.py")
        return 0 if same else 1
    target.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
