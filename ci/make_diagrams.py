"""Draw the diagrams of docs/how_it_works.md into docs/images/.

    PYTHONPATH=. python ci/make_diagrams.py [--check]

call.svg has the functions that a call of `attention` passes, and those that it passes only the first time.

layers.svg has the folders and modules at the root of the package, in the layers that pyproject.toml declares, and the
imports between them. An import that follows from others is left out: if a imports b and b imports c, no arrow leads
from a to c. With --check nothing is written, and the exit code is 1 if a file differs from what would be written.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PACKAGE = "burst_portable"
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1b2430; text-anchor: middle }
  .soft { fill: #5b6775; font-size: 13px } .start { text-anchor: start }
  .back { fill: #fff } .box { fill: #e9edf2; stroke: #9aa7b5 } .pure { fill: #d9efe3; stroke: #1f9d63 }
  .frame { fill: none; stroke: #9aa7b5; stroke-dasharray: 5 4 }
  .line { stroke: #5b6775; stroke-width: 1.4; fill: none } .tip { fill: #5b6775 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebf1 } .soft { fill: #9aa7b5 } .back { fill: #0d1117 }
    .box { fill: #232c37; stroke: #5b6775 } .pure { fill: #14382a; stroke: #1f9d63 }
    .line { stroke: #9aa7b5 } .tip { fill: #9aa7b5 }
  }
"""
WIDTH, HEIGHT, ROW, COLUMN, LEFT, TOP = 104, 30, 54, 150, 120, 74  # pixels: a box, and the distances between centers

# The column of each name, chosen so that no arrow crosses a box (see `check_crossings`).
COLUMNS = {
    "cli": 1.6, "bench": 4.6,
    "conformance": 1.45, "integrations": 3.7, "measuring": 0.0, "profiling": 1.3, "nn": 2.1, "api": 1.9,
    "sharding": 3.2, "gradients": 4.1, "runtime": 1.3, "mesh": 0.7, "backends": 1.1, "kernels": 1.5, "strategies": 2.5,
    "comm": 0.7, "planning": 2.2, "numerics": 1.4, "layout": 2.2, "mask": 2.2, "config": -0.3, "utils": 0.8,
    "errors": 1.4,
}  # fmt: skip

# call.svg: (x, y) of a box's center, its two lines, and the (file, name) in it that must exist. Boxes are numbered in
# this order, which is the order of a first call.
BOXES: dict[str, tuple[float, float, str, str, list[tuple[str, str]]]] = {
    "attention": (190, 50, "attention(q, k, v, mask=, ...)", "api.py", [("api.py", "attention")]),
    "prepare": (190, 136, "prepare", "runtime/prepare.py", [("runtime/prepare.py", "prepare")]),
    "describe": (
        490, 50, "describe: AttentionCall", "runtime/prepare.py",
        [("runtime/prepare.py", "describe"), ("planning/call.py", "AttentionCall")],
    ),
    "plan": (
        730, 50, "strategy.plan: Plan", "strategies/, planning/plans.py",
        [("strategies/base.py", "plan"), ("planning/plans.py", "Plan")],
    ),
    "tiles": (
        730, 136, "mask x layout → tiles", "planning/tiles.py",
        [("planning/tiles.py", "BlockPairs"), ("planning/tiles.py", "Tiles")],
    ),
    "choose": (
        490, 136, "choose_kernel: Kernel", "backends/selection.py",
        [("backends/selection.py", "choose_kernel"), ("kernels/base.py", "Kernel")],
    ),
    "transport": (
        490, 222, "transport_for: Transport", "mesh.py, comm/",
        [("mesh.py", "transport_for"), ("comm/base.py", "Transport")],
    ),
    "pass messages": (
        730, 222, "PassMessages", "planning/messages.py",
        [("planning/messages.py", "PassMessages")],
    ),
    "run": (190, 222, "run", "runtime/autograd.py", [("runtime/autograd.py", "run")]),
    "forward": (190, 340, "Attention.forward", "runtime/autograd.py", [("runtime/autograd.py", "Attention")]),
    "executor": (
        190, 426, "executor.forward", "runtime/executor.py or head_parallel.py",
        [("runtime/executor.py", "StepExecutor"), ("runtime/head_parallel.py", "HeadExecutor")],
    ),
    "messages": (
        499, 512, "transport.post, exchange", "comm/, between the steps of a plan",
        [("comm/base.py", "post"), ("comm/base.py", "exchange")],
    ),
    "kernel": (
        190, 512, "forward_single_call (one launch)", "or attend (several); kernels/, backends/VENDOR/",
        [("kernels/base.py", "forward_single_call"), ("kernels/base.py", "attend")],
    ),
    "launch": (190, 598, "launch", "Triton, Gluon, or an operator of torch", []),
    "backward": (800, 340, "Attention.backward", "runtime/autograd.py", [("runtime/autograd.py", "backward")]),
    "executor back": (
        800, 426, "executor.backward", "runtime/executor.py or head_parallel.py",
        [("runtime/prepared_call.py", "backward")],
    ),
    "kernel back": (
        800, 512, "backward_single_call (one launch)", "or attend_backward (several); kernels/, backends/",
        [("kernels/base.py", "backward_single_call"), ("kernels/base.py", "attend_backward")],
    ),
    "launch back": (800, 598, "launch", "Triton, Gluon, or an operator of torch", []),
}  # fmt: skip
WIDTHS = {
    "kernel": 330,
    "messages": 244,
    "kernel back": 340,
}  # pixels, of boxes unlike those around them
ARROWS = [
    ("attention", "prepare", "Request"), ("prepare", "run", "PreparedCall"), ("run", "forward", ""),
    ("forward", "executor", "PreparedCall, q, k, v"), ("executor", "kernel", "tiles of a step"),
    ("kernel", "launch", ""), ("plan", "tiles", ""), ("tiles", "pass messages", ""),
    ("executor", "messages", ""), ("executor back", "messages", ""), ("prepare", "describe", ""),
    ("backward", "executor back", "saved tensors, dout"), ("executor back", "kernel back", "tiles of a step"),
    ("kernel back", "launch back", ""),
]  # fmt: skip
FRAME = (362.0, 12.0, 496.0, 246.0)  # x, y, width and height around what is prepared once
NOTES = (
    "3 to 8: only the first time; the mesh remembers the result as a PreparedCall.",
    "6 comes before 4 too where auto must know how fast the kernel is (choose).",
)

Edges = dict[str, set[str]]
Point = tuple[float, float]


def read_contracts() -> tuple[dict[str, int], set[str]]:
    """Return the layer of every name, 0 at the top, and the names that import no torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {one["id"]: one for one in project["tool"]["importlinter"]["contracts"]}
    layers = contracts["layers"]["layers"]
    rows = {name: row for row, names in enumerate(layers) for name in names.split(" | ") if name != "__main__"}
    pure = {name.removeprefix(f"{PACKAGE}.") for name in contracts["pure"]["source_modules"]}
    return rows, pure & rows.keys()


def imports_between(names: set[str]) -> Edges:
    """Return which of the names import which, without imports that follow from others."""
    graph, edges = grimp.build_graph(PACKAGE, cache_dir=None), {name: set[str]() for name in names}
    for module in graph.modules - {PACKAGE}:
        for imported in graph.find_modules_directly_imported_by(module) - {PACKAGE}:
            a, b = (name.split(".")[1] for name in (module, imported))
            if a in names and b in names and a != b:
                edges[a].add(b)

    def reached(name: str) -> set[str]:
        return edges[name].union(*(reached(other) for other in edges[name]))

    below = {name: reached(name) for name in names}
    return {
        name: {one for one in edges[name] if not any(one in below[other] for other in edges[name])} for name in names
    }


def center(name: str, rows: dict[str, int]) -> Point:
    """Return the center of a box."""
    return LEFT + COLUMN * COLUMNS[name], TOP + ROW * (rows[name] - 1)


def check_crossings(rows: dict[str, int], edges: Edges) -> None:
    """Raise `SystemExit` if an arrow leads upward or crosses a box."""
    for a, targets in sorted(edges.items()):
        for b in sorted(targets):
            if rows[b] <= rows[a]:
                raise SystemExit(f"the import of {b} by {a} leads upward")
            (x1, y1), (x2, y2) = center(a, rows), center(b, rows)
            for name, row in rows.items():
                x, y = center(name, rows)
                for edge in (y - HEIGHT / 2, y + HEIGHT / 2) if rows[a] < row < rows[b] else ():
                    if abs(x1 + (x2 - x1) * (edge - y1) / (y2 - y1) - x) < WIDTH / 2 + 4:
                        raise SystemExit(f"the arrow from {a} to {b} crosses {name}; change COLUMNS")


def arrow(start: Point, end: Point) -> list[str]:
    """Draw a line with a tip at its end."""
    (x1, y1), (x2, y2) = start, end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    bx, by = x2 - 9 * ux, y2 - 9 * uy
    tip = f"{x2:.1f},{y2:.1f} {bx - 4 * uy:.1f},{by + 4 * ux:.1f} {bx + 4 * uy:.1f},{by - 4 * ux:.1f}"
    line = f'<path class="line" d="M{x1:.1f},{y1:.1f} L{bx:.1f},{by:.1f}"/>'
    return [line, f'<polygon class="tip" points="{tip}"/>']


def box(middle: Point, text: str, kind: str = "box", width: int = WIDTH) -> list[str]:
    """Draw a box with a line of text."""
    x, y = middle
    shape = f'x="{x - width / 2:.1f}" y="{y - HEIGHT / 2:.1f}" width="{width}" height="{HEIGHT}" rx="5"'
    return [f'<rect class="{kind}" {shape}/>', f'<text x="{x:.1f}" y="{y + 5:.1f}">{text}</text>']


def picture(title: str, width: float, height: float, parts: list[str]) -> str:
    """Return an SVG file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def draw_layers() -> str:
    """Return layers.svg."""
    rows, pure = read_contracts()
    if missing := rows.keys() ^ COLUMNS.keys():
        raise SystemExit(f"COLUMNS and the layers of pyproject.toml differ in {', '.join(sorted(missing))}")
    edges = imports_between(set(rows))
    check_crossings(rows, edges)
    parts = []
    for a in rows:
        for b in sorted(edges[a], key=COLUMNS.__getitem__):
            (x1, y1), (x2, y2) = center(a, rows), center(b, rows)
            shift = max(-WIDTH / 2 + 12, min(WIDTH / 2 - 12, HEIGHT / 2 * (x2 - x1) / (y2 - y1)))
            parts += arrow((x1 + shift, y1 + HEIGHT / 2), (x2 - shift, y2 - HEIGHT / 2 - 1))
    for name in rows:
        parts += box(center(name, rows), name, "pure" if name in pure else "box")
    width, height = LEFT + 5 * COLUMN + 30, TOP + ROW * (max(rows.values()) - 1) + 36
    legend = [("box", "may import torch"), ("pure", "imports no torch")]
    for number, (kind, text) in enumerate(legend):
        y = height - 58 + 26 * number
        parts.append(f'<rect class="{kind}" x="{width - 170}" y="{y - 11}" width="22" height="14" rx="3"/>')
        parts.append(f'<text class="soft start" x="{width - 140}" y="{y}">{text}</text>')
    note = "An arrow leads to what is imported. Imports that follow from others are left out."
    parts.append(f'<text class="soft start" x="20" y="32">{note}</text>')
    return picture("The folders of burst_portable and their imports, from high to low", width, height, parts)


def check_names() -> None:
    """Raise `SystemExit` if a function or class that call.svg names does not exist."""
    for *_, names in BOXES.values():
        for file, name in names:
            path = ROOT / PACKAGE / file
            if not path.is_file() or not re.search(rf"^ *(def|class) {name}\b", path.read_text("utf-8"), re.MULTILINE):
                raise SystemExit(f"call.svg names {name} of {file}, which does not exist; change BOXES")


def draw_call() -> str:
    """Return call.svg."""
    check_names()
    x, y, width, height = FRAME
    parts = [f'<rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>']
    for line, note in enumerate(NOTES):
        at = y + height + 18 * (line + 1)
        parts.append(f'<text class="soft start" x="{x + 2}" y="{at}">{note}</text>')
    for a, b, label in ARROWS:
        (x1, y1, *_), (x2, y2, *_) = BOXES[a], BOXES[b]
        if a == "prepare" and b == "describe":
            parts += arrow((x1 + 140, y1), (x - 2, y1))
            continue
        side = 90 if x2 > x1 else -90 if x2 < x1 else 0
        parts += arrow((x1 + side, y1 + 24), (x2 - side / 2, y2 - 25))
        parts.append(f'<text class="soft start" x="{x1 + 10}" y="{(y1 + y2) / 2 + 5}">{label}</text>' if label else "")
    for number, (name, (middle_x, middle_y, first, second, _)) in enumerate(BOXES.items(), 1):
        wide = WIDTHS.get(name, 280 if middle_y > 230 or middle_x < 300 else 222)
        left, top = middle_x - wide / 2, middle_y - 24
        parts.append(f'<rect class="box" x="{left}" y="{top}" width="{wide}" height="48" rx="5"/>')
        parts.append(f'<text x="{middle_x}" y="{middle_y - 4}">{first}</text>')
        parts.append(f'<text class="soft" x="{middle_x}" y="{middle_y + 15}">{second}</text>')
        parts.append(f'<circle class="box" cx="{left + 4}" cy="{top + 3}" r="11"/>')
        parts.append(f'<text class="soft" x="{left + 4}" y="{top + 7.5}">{number}</text>')
    return picture("The way of one call, from attention to the kernel launch", 980, 638, [one for one in parts if one])


DIAGRAMS = {"call.svg": draw_call, "layers.svg": draw_layers}


def main() -> int:
    """Write the diagrams, or compare them with the files."""
    stale = 0
    for name, draw in DIAGRAMS.items():
        file, text = IMAGES / name, draw()
        if "--check" not in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"docs/images/{name} is stale: run PYTHONPATH=. python ci/make_diagrams.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
