"""Make the pictures of docs/images/ that need no measurement, and the sample of a profile's page.

    PYTHONPATH=. python ci/make_images.py [--check]

- plan.svg is drawn from two plans: which rank computes which pairs of a causal mask at which ring step.
- profile.png and profile-dark.png are screenshots of the sample's page.
- profile-good.png shows a run without a delay, which this script records.

Screenshots need Chromium. With --check nothing is written, and the exit code is 1 if plan.svg differs from what would
be written. benchmarks/picture.py draws the speeds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import burst_portable as bp
from burst_portable.planning.plans import Plan
from burst_portable.profiling.report import Report

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PICTURE, SAMPLE = IMAGES / "plan.svg", ROOT / "profiling" / "sample" / "slow_link.json"
PAGE_SIZE = (1160, 1300)  # pixels of the page's photograph: down to the timeline's end
RANKS, CHUNKS, LENGTH = 4, 8, 8192
SLOWEST = 14 * (LENGTH // CHUNKS) ** 2  # pairs of the slowest rank of each step, contiguous: both panels' full width
CELL, LEFT, TOP, GAP = 38, 20, 96, 78
COLORS = ("#3b6fd4", "#e07b1a", "#1f9d63", "#a24bc4")  # of equal weight, and distinct for the color-blind
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b2430 }
  .head { font-size: 17px; font-weight: 600 } .soft { fill: #5b6775 }
  .step { fill: #fff; font-size: 12px; text-anchor: middle } .end { text-anchor: end }
  .empty { fill: #e9edf2 } .back { fill: #fff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebf1 } .soft { fill: #9aa7b5 } .empty { fill: #232c37 } .back { fill: #0d1117 } .step { fill: #fff }
  }
"""


def steps_of(plan: Plan) -> dict[tuple[int, int], int]:
    """Return {(rank, owner of the keys): step at which the rank computes with them}."""
    return {
        (rank, owner): step.index
        for rank in range(RANKS)
        for step in plan.forward.steps_of(rank)
        if step.compute
        for owner in step.compute.k_owners
    }


def owners_of(plan: Plan) -> list[int]:
    """Return the rank that holds each chunk of the sequence."""
    first_rows = {segment.start: rank for rank, held in enumerate(plan.call.layout.shards) for segment in held}
    owner, owners = 0, []
    for chunk in range(CHUNKS):
        owner = first_rows.get(chunk * plan.call.layout.length // CHUNKS, owner)
        owners.append(owner)
    return owners


def matrix(plan: Plan, left: int) -> list[str]:
    """Draw the score matrix: one row per chunk of queries, one column per chunk of keys, masked above the diagonal."""
    owners, steps, parts = owners_of(plan), steps_of(plan), []
    for row, rank in enumerate(owners):
        y = TOP + row * CELL
        parts.append(f'<text class="soft end" x="{left - 8}" y="{y + 24}">{rank}</text>')
        parts.append(f'<text class="soft" x="{left + row * CELL + 15}" y="{TOP - 8}">{rank}</text>')
        for column, owner in enumerate(owners):
            x = left + column * CELL
            parts.append(f'<rect class="empty" x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3"/>')
            if column > row:
                continue
            side = CELL - 2
            shape = f"M{x},{y} L{x},{y + side} L{x + side},{y + side}" + ("" if column == row else f" L{x + side},{y}")
            parts.append(f'<path d="{shape} Z" fill="{COLORS[rank]}"/>')
            middle = (x + 11, y + 30) if column == row else (x + 18, y + 23)
            parts.append(f'<text class="step" x="{middle[0]}" y="{middle[1]}">{steps[rank, owner]}</text>')
    return parts


def bars(plan: Plan, left: int) -> list[str]:
    """Draw one box per rank and step, as long as its pairs. A step ends with its slowest rank."""
    areas = [
        {step.index: step.compute.tiles.num_pairs for step in plan.forward.steps_of(rank) if step.compute}
        for rank in range(RANKS)
    ]
    longest = [max(num_pairs.get(step, 0) for num_pairs in areas) for step in range(RANKS)]
    scale = CHUNKS * CELL / SLOWEST
    y, parts = TOP + CHUNKS * CELL + 44, []
    for rank, num_pairs in enumerate(areas):
        parts.append(f'<text class="soft end" x="{left - 8}" y="{y + 13}">{rank}</text>')
        for step in range(RANKS):
            x, width = left + scale * sum(longest[:step]), scale * num_pairs.get(step, 0)
            room = scale * longest[step] - 2
            parts.append(f'<rect class="empty" x="{x:.1f}" y="{y}" width="{room:.1f}" height="17" rx="3"/>')
            if width:
                filled = f'x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="17" rx="3" fill="{COLORS[rank]}"'
                parts.append(
                    f'<rect {filled}/><text class="step" x="{x + width / 2 - 1:.1f}" y="{y + 13}">{step}</text>'
                )
        y += 22
    busy = sum(sum(num_pairs.values()) for num_pairs in areas) / (RANKS * sum(longest))
    parts.append(f'<text x="{left}" y="{y + 14}">ranks compute {100 * busy:.0f} % of the time</text>')
    return parts


def panel(layout: str, left: int) -> list[str]:
    """Draw one layout: its matrix above its bars."""
    plan = bp.plan(seq_len=LENGTH, ranks=RANKS, heads=1, mask=bp.Mask.causal(), strategy="ring", layout=layout)
    heads = [
        f'<text class="head" x="{left}" y="44">{layout}</text>',
        f'<text class="soft" x="{left}" y="66">rows: queries, columns: keys, by their rank</text>',
        f'<text class="soft" x="{left}" y="{TOP + CHUNKS * CELL + 30}">time, step by step</text>',
    ]
    return heads + matrix(plan, left) + bars(plan, left)


def draw() -> str:
    """Return plan.svg."""
    lefts = (LEFT + 30, LEFT + 30 + CHUNKS * CELL + GAP)
    width, height = lefts[1] + CHUNKS * CELL + LEFT, TOP + CHUNKS * CELL + 166
    parts = [part for layout, left in zip(("contiguous", "zigzag"), lefts, strict=True) for part in panel(layout, left)]
    title = "One causal mask on four ranks, contiguous and zigzag: who computes what, at which ring step"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def record(mesh: bp.Mesh) -> Report | None:
    """Profile a ring whose blocks are long enough to hide its messages. Returns the report on rank 0."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 1024, 4, 64, requires_grad=True) for _ in range(3))
    with bp.profile(mesh=mesh) as session:
        for _ in range(4):
            bp.attention(q, k, v, mesh=mesh, strategy="ring", layout="zigzag").sum().backward()
            session.mark()
    return session.report(skip=1)


def photograph(page: Path, good: Path) -> None:
    """Write screenshots of the top of two pages, the first one in both color schemes."""
    from tests.support import chromium

    width, height = PAGE_SIZE
    with chromium.launched() as browser:
        opened = browser.new_page(viewport={"width": width, "height": height})
        opened.goto(page.as_uri())
        opened.screenshot(path=IMAGES / "profile.png")
        opened.emulate_media(color_scheme="dark")
        chromium.next_frame(opened)  # the timeline is drawn again, in dark colors
        opened.screenshot(path=IMAGES / "profile-dark.png")
        opened.emulate_media(color_scheme="light")
        opened.goto(good.as_uri())
        opened.screenshot(path=IMAGES / "profile-good.png")


def main() -> int:
    """Write the pictures, or compare plan.svg."""
    from tests.support import chromium

    if "--check" in sys.argv[1:]:
        same = PICTURE.read_text(encoding="utf-8") == draw()
        print(f"docs/images/plan.svg is {'up to date' if same else 'stale: run ci/make_images.py'}")
        return 0 if same else 1
    PICTURE.write_text(draw(), encoding="utf-8")
    page = SAMPLE.with_suffix(".html")
    Report.load(SAMPLE).write_html(page)
    if chromium.path() is None:
        print("no chromium on this machine: the screenshots stay as they are")
        return 0
    report, _ = bp.run_threads(2, record)
    assert report is not None, "rank 0 has the report"
    with tempfile.TemporaryDirectory() as folder:
        good = Path(folder) / "good.html"
        report.write_html(good)
        photograph(page, good)
    return 0


if __name__ == "__main__":
    sys.exit(main())
