"""What the attention benchmark prints and writes: tables, JSON, and a bar chart as SVG."""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

import torch

PEERS = ("cudnn", "flex", "flex-max", "flash-attn-4")
COLORS = {
    "triton": "#3b6fb6",
    "hopper": "#1f9d73",
    "hopper-whole": "#7fc8ad",
    "cudnn": "#8a8a8a",
    "flash": "#c9c9c9",
    "flex": "#d9a441",
}
OTHER_COLOR = "#a06cb5"


@dataclass
class Result:
    """One provider on one row."""

    row: str
    provider: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    seconds_to_start: float = 0.0
    kernel: str = ""  # that `auto` took


def setting() -> dict[str, str]:
    """Where and with what it ran."""
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def print_tables(results: list[Result], hosts: dict[str, dict[str, float]]) -> None:
    print(" ".join(f"{name} {value};" for name, value in setting().items()))
    print(f"{'row':16} {'provider':13} {'fwd':>7} {'bwd':>7} TFLOP/s  {'MiB':>11}  ratios to {', '.join(PEERS)}")
    for result in results:
        if result.reason:
            print(f"{result.row:16} {result.provider:13} - {result.reason[:90]}")
            continue
        peers = {r.provider: r for r in results if r.row == result.row and r.tflops and r.provider in PEERS}
        ratios = "  ".join(
            "/".join(f"{result.tflops[w] / peers[p].tflops[w]:.2f}" for w in ("forward", "backward"))
            for p in PEERS
            if p in peers
        )
        memory = "/".join(f"{result.peak_bytes[w] / 2**20:.0f}" for w in ("forward", "backward"))
        forward, backward = result.tflops["forward"], result.tflops["backward"]
        speeds = f"{forward:7.1f} {backward:7.1f}          {memory:>11}  {ratios}"
        print(f"{result.row:16} {result.provider:13} {speeds}{f'  with {result.kernel}' if result.kernel else ''}")
    for provider, times in hosts.items():
        print(f"host time of a cached call, {provider}: {times} microseconds")


def write(results: list[Result], hosts: dict[str, dict[str, float]], folder: Path, label: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = {"setting": setting(), "host_microseconds": hosts, "results": [asdict(r) for r in results]}
    (folder / f"{label}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"{label}.svg").write_text(picture(results))


def picture(results: list[Result]) -> str:
    """Bars of TFLOP/s by row and provider."""
    where = setting()
    title = f"{where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"
    shown = [(r.row, r.provider, COLORS.get(r.provider, OTHER_COLOR), r.tflops) for r in results if r.tflops]
    return bars(title, shown)


def bars(title: str, shown: list[tuple[str, str, str, dict[str, float]]]) -> str:
    """Bars as SVG, forward left and backward right. Of each: its row, label, color, and TFLOP/s by pass."""
    columns, longest, high, y = {"forward": 420, "backward": 740}, 270, 13, 40
    most = max((max(tflops.values()) for *_, tflops in shown), default=0.0) or 1.0
    parts = [f'<text x="6" y="16">{escape(title)}</text>']
    for which, left in columns.items():
        parts.append(f'<text x="{left}" y="32">{which}, TFLOP/s</text>')
    for row in dict.fromkeys(row for row, *_ in shown):
        parts.append(f'<text x="6" y="{y + 10}" font-weight="bold">{escape(row)}</text>')
        for _, label, color, tflops in (one for one in shown if one[0] == row):
            parts.append(f'<text x="170" y="{y + 10}">{escape(label)}</text>')
            for which, left in columns.items():
                length = longest * tflops[which] / most
                parts.append(f'<rect x="{left}" y="{y}" width="{length:.0f}" height="{high - 2}" fill="{color}"/>')
                parts.append(f'<text x="{left + length + 4:.0f}" y="{y + 10}">{tflops[which]:.0f}</text>')
            y += high
        y += 10
    size = f'width="1080" height="{y + 10}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
