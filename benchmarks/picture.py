"""Draw docs/images/speed.svg and ranks.svg from rows of the files in benchmarks/results.

    python -m benchmarks.picture [--check]

With --check nothing is written, and the exit code is 1 if a picture differs from what its numbers give. `draw_file`
draws all rows of one file: the benchmarks write such a picture next to each JSON file.
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

Names = dict[str, str]
Panel = tuple[str, Names, Names]
"""A file, some of its rows by their label, and some of its entries (providers or contestants) by their label."""

_KERNELS, _TWO = "local-kernels-h200-2026-11-29", "strategies-h200x2-2026-11-29"
SPEED_PANELS: tuple[Panel, ...] = (
    (
        _KERNELS,
        {
            "causal-16k": "causal",
            "full-16k": "no mask",
            "causal-16k-gqa": "causal, 32 query and 8 K/V heads",
            "causal-8k-d64": "causal, 8,192 tokens, head size 64",
        },
        {"hopper-whole": "Hopper kernels (ours)", "flash-attn-4": "flash-attn-4", "cudnn": "cuDNN"},
    ),
    (
        _KERNELS,
        {"documents": "16 documents", "window": "window of 1,024", "prefix": "prefix-LM, half of it the prefix"},
        {
            "hopper-whole": "Hopper kernels (ours)",
            "flash-attn-4": "flash-attn-4",
            "flex-flash": "FlexAttention, flash-attn-4",
            "flex": "FlexAttention",
        },
    ),
    (
        _KERNELS,
        {"causal-16k": "portable kernels, causal", "documents": "portable kernels, 16 documents"},
        {
            "triton-whole": "portable (ours)",
            "flex": "FlexAttention",
        },
    ),
)

_AUTO = {"auto peer_copy": "auto", "ulysses by the book": "Ulysses over NCCL"}
_ZIGZAG = {"ring-flash-attn zigzag": "ring-flash-attn, zigzag"}
_LLAMA3 = {"ring-flash-attn llama3 at once": "ring-flash-attn, llama3"}
_ALONE = {"plain call": "one kernel call, nothing sent"}
RANK_PANELS: tuple[Panel, ...] = (
    (
        _TWO,
        {
            "32k": "32,768 tokens, 32 heads",
            "128k": "131,072 tokens, 32 heads",
            "128k-gqa": "131,072 tokens, 32 query and 8 K/V heads",
        },
        {**_AUTO, **_ZIGZAG, **_ALONE},
    ),
    (
        _TWO,
        {
            "128k-documents": "131,072 tokens, 112 documents",
            "128k-window": "131,072 tokens, window of 4,096",
        },
        {**_AUTO, **_LLAMA3, **_ALONE},
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
    """One bar per pass: the row it belongs to, its label, its kind (a CSS class), and TFLOP/s by pass."""

    row: str
    name: str
    kind: str
    tflops: dict[str, float]


def kind_of(name: str) -> str:
    """Return whether an entry is ours, our portable kernels, another library, or a bound (nothing is sent)."""
    if name.endswith(", nothing sent") or name == "plain call":
        return NOTHING_SENT
    if name.startswith(OTHER_PEOPLES):
        return OTHERS
    return PORTABLE if name.startswith("triton") else OURS


def draw_file(data: dict[str, Any]) -> str:
    """Draw all rows of a result file of benchmarks/attention.py or benchmarks/ring.py."""
    where = data["setting"]
    many = f"{where['ranks']} x " if "ranks" in where else ""
    title = f"{many}{where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"
    bars = []
    for one in data["results"]:
        if one["tflops"]:
            name = one.get("provider") or one["contestant"]
            row = one["row"] if "provider" in one else f"{one['row']}, {one['kernel']}"
            bars.append(Bar(row, name, kind_of(name), one["tflops"]))
    return draw(title, f"TFLOP/s{' per GPU' if many else ''}", bars)


def draw_panels(panels: tuple[Panel, ...], title: str, unit: str) -> str:
    """Draw chosen rows and entries. An entry that could not serve a row has no bar."""
    bars = []
    for file, rows, names in panels:
        here = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["results"]
        here = [one for one in here if one.get("run", "peer copies") == "peer copies"]
        tflops = {(one["row"], one.get("provider") or one["contestant"]): one["tflops"] for one in here}
        for row, label in rows.items():
            served = {key: name for key, name in names.items() if tflops[row, key]}
            bars += [Bar(label, name, kind_of(key), tflops[row, key]) for key, name in served.items()]
    return draw(title, unit, bars)


def draw(title: str, unit: str, bars: list[Bar]) -> str:
    """Draw bars as SVG, forward on the left and backward on the right, in one scale, for light and dark pages."""
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
                parts.append(f'<rect class="{bar.kind}" {shape}/>')
                parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 11}">{int(bar.tflops[which])}</text>')
            y += LINE
    size = f'width="{WIDTH}" height="{y + 14}" viewBox="0 0 {WIDTH} {y + 14}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    back = '<rect class="back" width="100%" height="100%" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def _legend(bars: list[Bar]) -> list[str]:
    """Draw the legend of the colors that occur."""
    labels = {OURS: "ours", PORTABLE: "ours, portable", OTHERS: "others", NOTHING_SENT: "nothing sent: a bound"}
    x, parts = SECOND, []
    for kind, name in ((kind, name) for kind, name in labels.items() if any(bar.kind == kind for bar in bars)):
        parts.append(f'<rect class="{kind}" x="{x}" y="16" width="11" height="11" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 16}" y="26">{name}</text>')
        x += 30 + 7 * len(name)
    return parts


def pictures() -> dict[Path, str]:
    """Return the two pictures of the docs, by path."""
    kernels = draw_panels(
        SPEED_PANELS, "One H100, bf16, 16,384 tokens, head size 128, unless named", "TFLOP/s of visible pairs"
    )
    ranks = draw_panels(RANK_PANELS, "Two H200, bf16, causal, the same local kernel for all", "TFLOP/s per GPU")
    return {IMAGES / "speed.svg": kernels, IMAGES / "ranks.svg": ranks}


def main() -> int:
    """Write the pictures, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        for file, drawn in pictures().items():
            file.write_text(drawn, encoding="utf-8")
        return 0
    stale = [file.name for file, drawn in pictures().items() if file.read_text(encoding="utf-8") != drawn]
    print(f"stale: {', '.join(stale)}; run python -m benchmarks.picture" if stale else "all pictures are up to date")
    return 1 if stale else 0


if __name__ == "__main__":
    end(main)
