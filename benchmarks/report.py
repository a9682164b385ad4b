"""Print and write the results of the kernel benchmark: tables, JSON, and a picture."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import picture

HostTimes = dict[str, dict[str, dict[str, float]]]
"""By provider, pass, and whether it is the least or the median."""

OTHER_PACKAGES = ("ring-flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "transformers")
"""What our code is measured beside or inside of, and does not come with torch; the third compiles flash-attn-4."""

PEERS = ("cudnn", "flex", "flex-max", "flex-flash", "flash-attn-4")


@dataclass
class Result:
    """One provider on one row."""

    row: str
    provider: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)  # milliseconds, in the order of time
    peak_bytes: dict[str, int] = field(default_factory=dict)
    seconds_to_start: float = 0.0
    kernel: str = ""  # that `auto` took


def setting() -> dict[str, str]:
    """Return device, date and versions of packages that are installed."""
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **installed(OTHER_PACKAGES),
    }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed. Packages that are only on the path have none."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def print_tables(results: list[Result], hosts: HostTimes) -> None:
    print(" ".join(f"{name} {value};" for name, value in setting().items()))
    print(f"{'row':16} {'provider':13} {'fwd':>7} {'bwd':>7} TFLOP/s  {'MiB':>11}  ratios to {', '.join(PEERS)}")
    for result in results:
        if result.reason:
            print(f"{result.row:16} {result.provider:13} - {result.reason[:90]}")
            continue
        peers = {r.provider: r for r in results if r.row == result.row and r.tflops and r.provider in PEERS}
        ratios = "  ".join(
            "/".join(f"{beside(result, peers[p], w):.2f}" for w in ("forward", "backward")) for p in PEERS if p in peers
        )
        memory = "/".join(f"{result.peak_bytes[w] / 2**20:.0f}" for w in ("forward", "backward"))
        forward, backward = result.tflops["forward"], result.tflops["backward"]
        speeds = f"{forward:7.1f} {backward:7.1f}          {memory:>11}  {ratios}"
        print(f"{result.row:16} {result.provider:13} {speeds}{f'  with {result.kernel}' if result.kernel else ''}")
    for provider, passes in hosts.items():
        times = ", ".join(f"{which} {t['least']:g} to {t['median']:g}" for which, t in passes.items())
        print(f"host microseconds of a cached call, least to median, {provider}: {times}")


def print_matrix(results: list[Result]) -> None:
    """Print one line per row: the kernel that `auto` took, its speed, and the best other provider by both passes."""
    for row in dict.fromkeys(r.row for r in results):
        here = {r.provider: r for r in results if r.row == row}
        timed = {name: r for name, r in here.items() if r.tflops}
        lost = [f"{name} {r.reason[:40]}" for name, r in here.items() if r.reason.startswith(("FAILED", "WRONG"))]
        if "auto" not in timed:
            print(f"{row:20} no auto  {lost}")
            continue
        speeds = {n: "/".join(f"{r.tflops[w]:.0f}" for w in ("forward", "backward")) for n, r in timed.items()}
        others = {n: both_beside(timed["auto"], r) for n, r in timed.items() if n in PEERS or n == "flash"}
        best = min(others, key=lambda name: others[name], default=None)
        beside_best = f"{best} {speeds[best]} {others[best]:.3f}" if best else "alone"
        own = {
            n: f"{speeds[n]} {both_beside(timed['auto'], r):.3f}"
            for n, r in timed.items()
            if n not in (*others, "auto")
        }
        print(f"{row:20} {timed['auto'].kernel:14} {speeds['auto']:9} {beside_best:28} {own or ''} {lost or ''}")


def both_beside(one: Result, other: Result) -> float:
    """Return how many times as fast one provider is as another, both passes together."""
    times = [zip(r.rounds["forward"], r.rounds["backward"], strict=True) for r in (one, other)]
    pairs = zip(*([sum(passes) for passes in rounds] for rounds in times), strict=True)
    return statistics.median(theirs / mine for mine, theirs in pairs)


def beside(one: Result, other: Result, which: str) -> float:
    """Return how many times as fast one provider is as another: the median over rounds that ran side by side."""
    rounds = zip(one.rounds[which], other.rounds[which], strict=True)
    return statistics.median([theirs / mine for mine, theirs in rounds])


def write(results: list[Result], hosts: HostTimes, folder: Path, label: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = {"setting": setting(), "host_microseconds": hosts, "results": [asdict(r) for r in results]}
    (folder / f"{label}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"{label}.svg").write_text(picture.draw_file(data))
