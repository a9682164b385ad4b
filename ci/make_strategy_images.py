"""Draw docs/images/strategies.svg: what four ranks send and compute at each step of a strategy, read from its plan.

    PYTHONPATH=. python ci/make_strategy_images.py [--check]

With --check nothing is written, and the exit code is 1 if the picture differs from what would be written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import burst_portable as bp
from burst_portable.planning.plans import PassPlan
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Step
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "strategies.svg"
RANKS, LENGTH = 4, 4096
COLORS = ("#3b6fd4", "#e07b1a", "#1f9d63", "#a24bc4")  # by owner; of equal weight, and distinct for the color-blind
LEFT, TOP, WIDTH, HEIGHT = 196, 74, 156, 104  # of the cells: one per strategy and step
SPACING, RADIUS, BOX = 36, 11, 7
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b2430 }
  .name { font-weight: 600 } .soft { fill: #5b6775; font-size: 12px } .rank { fill: #fff; text-anchor: middle }
  .line { stroke: #d5dbe3 } .back { fill: #fff } path { fill: none; stroke-width: 2 }
  .q { stroke-dasharray: 5 3 } .result { stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebf1 } .soft { fill: #9aa7b5 } .rank { fill: #fff }
    .back { fill: #0d1117 } .line { stroke: #2b3540 }
  }
"""


@dataclass(frozen=True)
class Panel:
    """One row of the picture: a strategy, and the pass that is drawn."""

    lines: tuple[str, ...]
    strategy: Strategy
    mask: str = "full"
    layout: str = "contiguous"
    backward: bool = False

    def pass_plan(self) -> PassPlan:
        plan = bp.plan(seq_len=LENGTH, ranks=RANKS, heads=8, mask=self.mask, layout=self.layout, strategy=self.strategy)
        return plan.backward if self.backward else plan.forward


DOCUMENTS = "documents:0,2304,3072,4096"
PANELS = (
    Panel(("ring", "K and V circulate"), make_strategy("ring")),
    Panel(
        ("burst, backward", "Q, dO, LSE, delta circulate,", "dQ follows them (dotted)"),
        make_strategy("burst"),
        backward=True,
    ),
    Panel(("ring, transfer=direct", "each block from its owner"), make_strategy("ring", transfer="direct")),
    Panel(("double_ring", "two hosts of two ranks"), make_strategy("double_ring", ranks_per_node=2)),
    Panel(("all_gather", "for each group of heads"), make_strategy("all_gather")),
    Panel(("distflash", "causal; rank 0 helps 3:", "Q (dashed), out (dotted)"), make_strategy("distflash"), "causal"),
    Panel(("dispatch", "documents, dispatched,", "two stages"), make_strategy("dispatch"), DOCUMENTS, "dispatched"),
)


def steps_by_index(pass_plan: PassPlan) -> list[dict[int, Step]]:
    """Return, by step, the steps of the ranks that do something."""
    found = [{step.index: step for step in pass_plan.steps_of(rank)} for rank in range(RANKS)]
    last = max(max(steps) for steps in found)
    return [{rank: steps[index] for rank, steps in enumerate(found) if index in steps} for index in range(last + 1)]


def arrow(move: Move, left: float, y: float) -> str:
    """Draw a message from its source to its target, in the color of the block's owner."""
    start, end = (left + rank * SPACING for rank in (move.source, move.target))
    height = 10 + 8 * abs(move.target - move.source) + 5 * (end < start) + 3 * move.is_result  # so that none overlap
    inward = 4 if end > start else -4
    kind = "result" if move.is_result else move.side
    curve = f"M{start + inward:g},{y - RADIUS - 1:g} Q{(start + end) / 2:g},{y - RADIUS - 2 * height:g} "
    curve += f"{end - inward:g},{y - RADIUS - 3:g}"
    color = COLORS[move.owner]
    return f'<path class="{kind}" d="{curve}" stroke="{color}" marker-end="url(#end{move.owner})"/>'


def cell(steps: dict[int, Step], left: float, top: float) -> Iterator[str]:
    """Draw one step: messages that are sent above the ranks, and the blocks that each computes with below."""
    y = top + 58
    for step in steps.values():
        yield from (arrow(move, left, y) for move in (*step.sends, *step.gradient_sends))
    for rank in range(RANKS):
        x = left + rank * SPACING
        yield f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS}" fill="{COLORS[rank]}"/>'
        yield f'<text class="rank" x="{x:g}" y="{y + 4.5:g}">{rank}</text>'
        compute = steps[rank].compute if rank in steps else None
        if compute is None:
            continue
        sent = compute.q_owners if compute.k_owners == (rank,) != compute.q_owners else compute.k_owners
        first = x - len(sent) * (BOX + 1) / 2 + 0.5
        for place, owner in enumerate(sent):
            box = f'x="{first + place * (BOX + 1):g}" y="{y + RADIUS + 6:g}" width="{BOX}" height="{BOX}" rx="2"'
            yield f'<rect {box} fill="{COLORS[owner]}"/>'


def draw() -> str:
    """Return the picture."""
    rows = [steps_by_index(panel.pass_plan()) for panel in PANELS]
    columns = max(map(len, rows))
    width, height = LEFT + columns * WIDTH + 8, TOP + len(PANELS) * HEIGHT + 8
    parts = [f'<text class="soft" x="{LEFT - 14 + i * WIDTH}" y="52">step {i}</text>' for i in range(columns)]
    for number, (panel, row) in enumerate(zip(PANELS, rows, strict=True)):
        top = TOP + number * HEIGHT
        parts.append(f'<path class="line" d="M16,{top - 8} H{width - 16}"/>')
        for index, line in enumerate(panel.lines):
            kind = "soft" if index else "name"
            parts.append(f'<text class="{kind}" x="20" y="{top + 36 + 18 * index}">{line}</text>')
        for column, steps in enumerate(row):
            parts.extend(cell(steps, LEFT + column * WIDTH, top))
    markers = "".join(
        f'<marker id="end{owner}" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        f'<polygon points="0,0 8,4 0,8" fill="{color}"/></marker>'
        for owner, color in enumerate(COLORS)
    )
    title = "What four ranks send and compute at each step, by strategy"
    legend = (
        "Arrows: messages, in the color of the rank that owns the block. Squares: blocks that a rank computes with."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{markers}</defs>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
            f'<text class="soft" x="20" y="28">{legend}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the picture, or compare it."""
    if "--check" in sys.argv[1:]:
        same = PICTURE.read_text(encoding="utf-8") == draw()
        print(f"docs/images/strategies.svg is {'up to date' if same else 'stale: run ci/make_strategy_images.py'}")
        return 0 if same else 1
    PICTURE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
