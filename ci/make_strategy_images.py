"""Draw docs/images/strategies/: what four ranks send and compute at each step of a strategy, read from its plan.

    PYTHONPATH=. python ci/make_strategy_images.py [--check]

There is one picture per section of docs/strategies.md. With --check nothing is written, and the exit code is 1 if a
picture differs from what would be written, is missing, or has no strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import burst_portable as bp
from burst_portable.planning.head_division import heads_of_rank
from burst_portable.planning.plans import PassPlan, Plan
from burst_portable.planning.schedule import Step
from burst_portable.strategies.registry import make_strategy

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "strategies"
RANKS, LENGTH, HEADS = 4, 4096, 8
COLORS = ("#3b6fd4", "#e07b1a", "#1f9d63", "#a24bc4")  # by owner; of equal weight, and distinct for the color-blind
LEFT, TOP, WIDTH, HEIGHT = 240, 46, 156, 128  # of the cells: one per pass and step
SPACING, RADIUS, BOX = 36, 11, 7
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b2430 }
  .name { font-weight: 600 } .soft { fill: #5b6775; font-size: 12px } .rank { fill: #fff; text-anchor: middle }
  .heads { fill: #5b6775; font-size: 11px; text-anchor: middle } .node { fill: none; stroke: #9aa7b5 }
  .line { stroke: #d5dbe3 } .back { fill: #fff } path { fill: none; stroke-width: 2 }
  .q { stroke-dasharray: 5 3 } .result { stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebf1 } .soft, .heads { fill: #9aa7b5 } .rank { fill: #fff }
    .back { fill: #0d1117 } .line { stroke: #2b3540 } .node { stroke: #5b6775 }
  }
"""


@dataclass(frozen=True)
class Panel:
    """One row of a picture: a pass of a strategy. The first line is its name."""

    lines: tuple[str, ...]
    label: str
    mask: str = "full"
    layout: str = "contiguous"
    backward: bool = False

    def plan(self) -> Plan:
        strategy = make_strategy(self.label)
        return bp.plan(seq_len=LENGTH, ranks=RANKS, heads=HEADS, mask=self.mask, layout=self.layout, strategy=strategy)

    @property
    def ranks_per_node(self) -> int | None:
        found: int | None = getattr(make_strategy(self.label), "ranks_per_node", None)
        return found


def both_passes(label: str, forward: str, backward: str, mask: str = "full", layout: str = "contiguous") -> list[Panel]:
    """Return a panel per pass. The lines of a description are separated by "|"."""
    return [
        Panel(("forward", *forward.split("|")), label, mask, layout),
        Panel(("backward", *backward.split("|")), label, mask, layout, backward=True),
    ]


TWO_NODES = "ranks_per_node=2"
CONTEXT_FIRST = f"usp({TWO_NODES}, placement=context_first)"
DOCUMENTS = "documents:0,2304,3072,4096"
PICTURES: dict[str, list[Panel]] = {
    "ring": both_passes("ring", "K and V circulate", "K and V circulate,|dK and dV (dotted) follow"),
    "ring-direct": both_passes(
        "ring(transfer=direct)", "K and V come from|their owner", "the same, and dK and dV|(dotted) return to it"
    ),
    "burst": both_passes("burst", "K and V circulate", "Q, dO, LSE, delta (dashed)|circulate, dQ (dotted) follows"),
    "double_ring": both_passes(
        f"double_ring({TWO_NODES})", "K and V, two nodes|of two ranks", "Q, dO, LSE, delta (dashed),|then dQ (dotted)"
    ),
    "distflash": both_passes(
        "distflash",
        "causal: K and V; rank 0 helps 3:|Q (dashed), out and LSE back|(dotted)",
        "K and V, then dK and dV;|Q, dO, LSE, delta (dashed) to|the helper, dQ back (dotted)",
        mask="causal",
    ),
    "all_gather": both_passes(
        "all_gather",
        "K and V to all ranks,|for each group of heads",
        "the same, and dK and dV|(dotted) to their owners",
    ),
    "dispatch": both_passes(
        "dispatch",
        "needed rows of K and V in two|stages; documents, dispatched",
        "the same, and dK and dV of|these rows (dotted)",
        DOCUMENTS,
        "dispatched",
    ),
    "ring_self_attention": [
        Panel(("forward, first ring", "K circulates, scores with all", "keys are stored"), "ring_self_attention"),
        Panel(("forward, second ring", "V circulates, after the softmax"), "ring_self_attention"),
        Panel(("backward, first ring", "V, then dV (dotted)"), "ring_self_attention", backward=True),
        Panel(("backward, second ring", "K, then dK (dotted)"), "ring_self_attention", backward=True),
    ],
    "ulysses": both_passes(
        "ulysses", "rows of all ranks for a part|of the heads, then out back", "dO in the same way,|dQ, dK and dV back"
    ),
    "usp": [
        Panel(("head_first, forward", "heads divided inside a node,", "a ring between nodes"), f"usp({TWO_NODES})"),
        Panel(("head_first, backward", "dK and dV (dotted) follow"), f"usp({TWO_NODES})", backward=True),
        Panel(("context_first, forward", "heads divided between nodes,", "a ring inside a node"), CONTEXT_FIRST),
        Panel(("context_first, backward", "dK and dV (dotted) follow"), CONTEXT_FIRST, backward=True),
    ],
}
LEGEND = "Arrows: messages, in the color of the rank that owns the rows. Squares: rows that a rank computes with."
HEADS_LEGEND = "h0-1: its heads."


class Arrow(NamedTuple):
    """A message. `kind` is "kv", "q" or "result"."""

    source: int
    target: int
    owner: int
    kind: str


def steps_by_index(pass_plan: PassPlan) -> list[dict[int, Step]]:
    """Return, by step, the steps of the ranks that do something."""
    found = [{step.index: step for step in pass_plan.steps_of(rank)} for rank in range(RANKS)]
    last = max(max(steps) for steps in found)
    return [{rank: steps[index] for rank, steps in enumerate(found) if index in steps} for index in range(last + 1)]


def draw_arrow(arrow: Arrow, left: float, y: float) -> str:
    """Draw a message from its source to its target, in the color of its owner."""
    start, end = (left + rank * SPACING for rank in (arrow.source, arrow.target))
    is_result = arrow.kind == "result"
    height = 10 + 8 * abs(arrow.target - arrow.source) + 5 * (end < start) + 3 * is_result  # so that none overlap
    inward = 4 if end > start else -4
    curve = f"M{start + inward:g},{y - RADIUS - 1:g} Q{(start + end) / 2:g},{y - RADIUS - 2 * height:g} "
    curve += f"{end - inward:g},{y - RADIUS - 3:g}"
    color = COLORS[arrow.owner]
    return f'<path class="{arrow.kind}" d="{curve}" stroke="{color}" marker-end="url(#end{arrow.owner})"/>'


def exchange(plan: Plan, back: bool) -> Iterator[Arrow]:
    """Yield the messages that exchange rows for heads, or results for rows of the own tokens."""
    if plan.heads is not None:
        for rank in range(RANKS):
            for other in plan.heads.peers(rank):
                if other != rank:
                    yield Arrow(rank, other, other if back else rank, "result" if back else "kv")


def messages(steps: Iterable[Step]) -> Iterator[Arrow]:
    """Yield the messages of one step."""
    for step in steps:
        for move in (*step.sends, *step.result_sends):
            yield Arrow(move.source, move.target, move.owner, "result" if move.is_result else move.side)


def owners_of(plan: Plan, steps: dict[int, Step], rank: int) -> list[int]:
    """Return the ranks whose rows a rank computes with: those of the blocks that were sent, or of the local one."""
    compute = steps[rank].compute if rank in steps else None
    if compute is None:
        return []
    blocks = compute.q_owners if compute.k_owners == (rank,) != compute.q_owners else compute.k_owners
    return [peer for owner in blocks for peer in (plan.heads.peers(owner) if plan.heads else (owner,))]


def cell(panel: Panel, plan: Plan, title: str, arrows: Iterable[Arrow], owners: list[list[int]]) -> Iterator[str]:
    """Draw one step at the origin: its messages above the ranks, and the rows that each computes with below."""
    y = 70.0
    yield f'<text class="soft" x="-14" y="12">{title}</text>'
    yield from (draw_arrow(arrow, 0, y) for arrow in arrows)
    if size := panel.ranks_per_node:
        for first in range(0, RANKS, size):
            box = f'x="{first * SPACING - 15}" y="{y - 15:g}" width="{(size - 1) * SPACING + 30}" height="30" rx="15"'
            yield f'<rect class="node" {box}/>'
    for rank in range(RANKS):
        x = rank * SPACING
        yield f'<circle cx="{x}" cy="{y:g}" r="{RADIUS}" fill="{COLORS[rank]}"/>'
        yield f'<text class="rank" x="{x}" y="{y + 4.5:g}">{rank}</text>'
        edge = x - len(owners[rank]) * (BOX + 1) / 2 + 0.5
        for place, owner in enumerate(owners[rank]):
            box = f'x="{edge + place * (BOX + 1):g}" y="{y + RADIUS + 8:g}" width="{BOX}" height="{BOX}" rx="2"'
            yield f'<rect {box} fill="{COLORS[owner]}"/>'
        if plan.heads and owners[rank]:
            heads = heads_of_rank(plan.heads.index(rank), plan.heads.ranks, HEADS)
            yield f'<text class="heads" x="{x}" y="{y + RADIUS + 28:g}">h{heads.start}-{heads.stop - 1}</text>'


def cells(panel: Panel, plan: Plan) -> Iterator[list[str]]:
    """Yield the steps of a panel, with the exchanges of heads before and after them."""
    nothing: list[list[int]] = [[] for _ in range(RANKS)]
    if plan.heads:
        yield list(cell(panel, plan, "all-to-all", exchange(plan, back=False), nothing))
    for index, steps in enumerate(steps_by_index(plan.backward if panel.backward else plan.forward)):
        owners = [owners_of(plan, steps, rank) for rank in range(RANKS)]
        yield list(cell(panel, plan, f"step {index}", messages(steps.values()), owners))
    if plan.heads:
        yield list(cell(panel, plan, "all-to-all", exchange(plan, back=True), nothing))


def draw(name: str) -> str:
    """Return one picture."""
    plans = [panel.plan() for panel in PICTURES[name]]
    rows = [list(cells(panel, plan)) for panel, plan in zip(PICTURES[name], plans, strict=True)]
    legend = [LEGEND] + [HEADS_LEGEND] * any(plan.heads is not None for plan in plans)
    width = max(LEFT + max(map(len, rows)) * WIDTH, 780)
    height = TOP + len(rows) * HEIGHT
    parts = []
    for number, (panel, row) in enumerate(zip(PICTURES[name], rows, strict=True)):
        top = TOP + number * HEIGHT
        parts.append(f'<path class="line" d="M16,{top - 6} H{width - 16}"/>')
        for index, line in enumerate(panel.lines):
            kind = "soft" if index else "name"
            parts.append(f'<text class="{kind}" x="20" y="{top + 48 + 18 * index}">{line}</text>')
        for column, drawn in enumerate(row):
            parts += [f'<g transform="translate({LEFT + column * WIDTH},{top})">', *drawn, "</g>"]
    markers = "".join(
        f'<marker id="end{owner}" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        f'<polygon points="0,0 8,4 0,8" fill="{color}"/></marker>'
        for owner, color in enumerate(COLORS)
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>What four ranks send and compute at each step of {name}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{markers}</defs>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
            f'<text class="soft" x="20" y="26">{" ".join(legend)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the pictures, or compare them."""
    drawn = {FOLDER / f"{name}.svg": draw(name) for name in PICTURES}
    written = set(FOLDER.glob("*"))
    if "--check" in sys.argv[1:]:
        same = {path for path in written & set(drawn) if path.read_text(encoding="utf-8") == drawn[path]}
        wrong = sorted(path.name for path in (written | set(drawn)) - same)
        found = f"stale: {', '.join(wrong)}; run ci/make_strategy_images.py" if wrong else "up to date"
        print(f"docs/images/strategies: {found}")
        return 1 if wrong else 0
    FOLDER.mkdir(exist_ok=True)
    for path in written - set(drawn):
        path.unlink()
    for path, text in drawn.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
