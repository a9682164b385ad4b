"""Draws what was measured: the SVG beside a result file, and the README's two from rows of some of them.

    python -m benchmarks.picture [--check]

Draws again every picture in benchmarks/results/ from its JSON, and the README's, of local kernels and of ranks. With
--check nothing is written, and the exit code is 1 where a picture on disk is another than its numbers make.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.script import end

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"

Chosen = tuple[tuple[str, dict[str, str], dict[str, str]], ...]
"""A result file, some of its rows and what they are called, some who ran there and what they are called."""

SPEED_ROWS: Chosen = (
    (
        "attention-h100-16-bits-2026-11-23",
        {
            "causal-16k": "causal",
            "full-16k": "no mask",
            "causal-16k-gqa": "causal, 32 query and 8 K/V heads",
            "causal-8k-d64": "causal, 8,192 tokens, heads of 64",
        },
        {"hopper-whole": "Hopper kernels (ours)", "flash-attn-4": "flash-attn-4", "cudnn": "cuDNN"},
    ),
    (
        "attention-h100-16-bits-2026-11-23",
        {"documents": "16 documents", "window": "a window of 1,024", "prefix": "prefix-LM, half of it the prefix"},
        {
            "hopper-whole": "Hopper kernels (ours)",
            "triton-whole": "portable (ours)",
            "flash-attn-4": "flash-attn-4",
            "flex": "FlexAttention",
        },
    ),
)

_BESIDE = {"auto peer_copy": "auto", "ulysses by the book": "Ulysses over NCCL"}
_ZIGZAG = {"ring-flash-attn zigzag": "ring-flash-attn, zigzag"}
_LLAMA3 = {"ring-flash-attn llama3 at once": "ring-flash-attn, llama3"}
_ALONE = {"plain call": "one call, nothing sent"}
RING_ROWS: Chosen = (
    ("ring-h200x2-fair-2026-11-23", {"32k": "32,768 tokens, 32 heads"}, {**_BESIDE, **_ZIGZAG, **_ALONE}),
    (
        "ring-h200x2-fair-long-2026-11-23",
        {"128k": "131,072 tokens, 32 heads"},
        {**_BESIDE, **_ZIGZAG, **_ALONE},
    ),
    (
        "ring-h200x2-one-group-2026-11-23",
        {"128k-gqa": "131,072 tokens, 32 query and 8 K/V heads"},
        {**_BESIDE, **_ZIGZAG, **_ALONE},
    ),
    (
        "ring-h200x2-at-once-2026-11-23",
        {
            "128k-documents": "131,072 tokens, 112 documents",
            "128k-window": "131,072 tokens, a window of 4,096",
        },
        {**_BESIDE, **_LLAMA3, **_ALONE},
    ),
)

OURS, PORTABLE, OTHERS, NOTHING_SENT = "ours", "portable", "others", "still"
OTHER_PEOPLES = ("cudnn", "flash", "flex", "ring-flash-attn", "context_parallel", "ulysses by the book")

WIDTH, LEFT, SECOND, LONGEST, LINE, GROUP = 880, 236, 574, 264, 17, 30  # pixels
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1b2430 } .head { font-weight: 600 }
  .soft { fill: #5b6775 } .end { text-anchor: end } .back { fill: #fff }
  .ours { fill: #1f9d63 } .portable { fill: #3b6fd4 } .others { fill: #98a3b0 } .still { fill: #b9e2cd }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebf1 } .soft { fill: #9aa7b5 } .back { fill: #0d1117 }
    .ours { fill: #2fb277 } .portable { fill: #5b93f5 } .others { fill: #66717d } .still { fill: #235a41 }
  }
"""


class Bar(NamedTuple):
    """One line of a picture: its group, its name, whose it is, and TFLOP/s by pass."""

    row: str
    name: str
    whose: str
    tflops: dict[str, float]


def whose(name: str) -> str:
    """Ours, our portable kernels, others', or a bound: the same with nothing sent, or one call of the kernel alone."""
    if name.endswith(", nothing sent") or name == "plain call":
        return NOTHING_SENT
    if name.startswith(OTHER_PEOPLES):
        return OTHERS
    return PORTABLE if name.startswith("triton") else OURS


def of(data: dict[str, Any]) -> str:
    """The picture of a result file of benchmarks/attention.py or benchmarks/ring.py."""
    where = data["setting"]
    many = f"{where['ranks']} x " if "ranks" in where else ""
    title = f"{many}{where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"
    bars = []
    for one in data["results"]:
        if one["tflops"]:
            name = one.get("provider") or one["contestant"]
            row = one["row"] if "provider" in one else f"{one['row']}, {one['kernel']}"
            bars.append(Bar(row, name, whose(name), one["tflops"]))
    return draw(title, f"TFLOP/s{' a GPU' if many else ''}", bars)


def chosen(rows_of: Chosen, title: str, unit: str) -> str:
    """A picture of the README's; who was not there, or knows no such mask, has no bar."""
    bars = []
    for file, rows, names in rows_of:
        results = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["results"]
        tflops = {(one["row"], one.get("provider") or one["contestant"]): one["tflops"] for one in results}
        for row, called in rows.items():
            there = {key: name for key, name in names.items() if tflops[row, key]}
            bars += [Bar(called, name, whose(key), tflops[row, key]) for key, name in there.items()]
    return draw(title, unit, bars)


def draw(title: str, unit: str, bars: list[Bar]) -> str:
    """Bars as SVG, forward left and backward right; all to one scale. It follows the reader's light or dark."""
    most = max((max(bar.tflops.values()) for bar in bars), default=0.0) or 1.0
    parts = [f'<text class="head" x="16" y="26">{escape(title)}</text>', *_legend(bars)]
    for which, left in (("forward", LEFT), ("backward", SECOND)):
        parts.append(f'<text class="soft" x="{left}" y="50">{which}, {escape(unit)}</text>')
    y = 54
    for row in dict.fromkeys(bar.row for bar in bars):
        parts.append(f'<text class="head" x="16" y="{y + 20}">{escape(row)}</text>')
        y += GROUP
        for bar in (bar for bar in bars if bar.row == row):
            parts.append(f'<text class="soft" x="16" y="{y + 11}">{escape(bar.name)}</text>')
            for which, left in (("forward", LEFT), ("backward", SECOND)):
                length = LONGEST * bar.tflops[which] / most
                shape = f'x="{left}" y="{y}" width="{length:.1f}" height="{LINE - 4}" rx="2"'
                parts.append(f'<rect class="{bar.whose}" {shape}/>')
                parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 11}">{int(bar.tflops[which])}</text>')
            y += LINE
    size = f'width="{WIDTH}" height="{y + 14}" viewBox="0 0 {WIDTH} {y + 14}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    back = '<rect class="back" width="100%" height="100%" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def _legend(bars: list[Bar]) -> list[str]:
    """What the colours mean, on the title's line; those that occur."""
    told = {OURS: "ours", PORTABLE: "ours, portable", OTHERS: "others", NOTHING_SENT: "nothing sent: a bound"}
    x, parts = SECOND, []
    for kind, name in ((kind, name) for kind, name in told.items() if any(bar.whose == kind for bar in bars)):
        parts.append(f'<rect class="{kind}" x="{x}" y="16" width="11" height="11" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 16}" y="26">{name}</text>')
        x += 30 + 7 * len(name)
    return parts


def pictures() -> dict[Path, str]:
    """Every picture, by its file."""
    files = sorted(RESULTS.glob("*.svg"))
    drawn = {file: of(json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))) for file in files}
    one = chosen(
        SPEED_ROWS, "One H100, bf16, 16,384 tokens, heads of 128 but for one row", "TFLOP/s by exact mask area"
    )
    several = chosen(RING_ROWS, "Two H200, bf16, causal, one local kernel for all", "TFLOP/s a GPU")
    return {**drawn, IMAGES / "speed.svg": one, IMAGES / "ranks.svg": several}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        for file, drawn in pictures().items():
            file.write_text(drawn, encoding="utf-8")
        return 0
    old = [file.name for file, drawn in pictures().items() if file.read_text(encoding="utf-8") != drawn]
    print(
        f"old: {', '.join(old)}: run python -m benchmarks.picture" if old else "all pictures are what the numbers make"
    )
    return 1 if old else 0


if __name__ == "__main__":
    end(main)
