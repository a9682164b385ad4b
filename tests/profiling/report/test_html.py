"""Test the HTML report in a real browser: no error, no request, the numbers of the JSON, hover, zoom, and file size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from burst_portable.profiling.report import Report
from burst_portable.profiling.report.html import keep_units_together, page
from burst_portable.utils.text import bytes_text, percent, scaled, time_text
from tests.support import chromium
from tests.support.synthetic_records import Maker, ring, with_ablation

SAMPLE = Path(__file__).parents[3] / "profiling" / "sample" / "slow_link.json"
UNITS = {
    **dict.fromkeys(("flops_per_second", "planned_flops_per_second"), "FLOP/s"),
    **dict.fromkeys(("bytes_per_second", "planned_bytes_per_second"), "B/s"),
    "flops_per_byte": "",
}
# Return the color of the timeline at a point of the window. It is read from a copy, as reads would slow the canvas.
PIXEL = """(() => {
  const canvas = document.getElementById("timeline"), copy = document.createElement("canvas");
  const seen = canvas.getBoundingClientRect(), pen = copy.getContext("2d");
  const [x, y] = [%(x)f - seen.left, %(y)f - seen.top].map((place) => Math.round(place * %(pixels)d));
  pen.drawImage(canvas, x, y, 1, 1, 0, 0, 1, 1);
  return "#" + [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((c) => c.toString(16).padStart(2, "0")).join("");
})()"""


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.of(with_ablation(ring(4, 12, slow=[2])))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium.path() is None:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end("no chromium on this machine: apt-get install chromium")
    with chromium.launched() as launched:
        yield launched


@pytest.fixture(scope="module")
def events() -> list[str]:
    """Return everything that the page prints, throws or requests."""
    return []


@pytest.fixture(scope="module")
def profile_page(browser, report, events, tmp_path_factory) -> Page:
    file = tmp_path_factory.mktemp("html") / "profile.html"
    report.write_html(file)
    return open_page(browser, file, events)


def open_page(browser: Browser, file: Path, events: list[str], height: int = 900, pixels: int = 1) -> Page:
    page = browser.new_page(viewport={"width": 1200, "height": height}, device_scale_factor=pixels)
    page.on("console", lambda message: events.append(message.text))
    page.on("pageerror", lambda error: events.append(str(error)))
    page.on("request", lambda request: events.append(request.url))
    page.goto(file.as_uri())
    assert events.pop(0) == file.as_uri()
    return page


def test_page_of_eight_ranks_stays_below_a_megabyte():
    assert len(page(Report.of(ring(8, 1000)).data).encode()) < 1_000_000


def test_page_numbers_equal_json(profile_page, report):
    cells = profile_page.locator("[data-path]").evaluate_all(
        "cells => cells.map(e => [e.dataset.path, e.dataset.value, e.textContent])"
    )
    assert len(cells) > 40
    assert {path for path, *_ in cells} >= {
        f"ablation.3.{name}" for name in ("full_step_ns", "exposed_computing_ns", "hidden_ns")
    }
    for path, value, text in cells:
        found = report.data
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        assert math.isclose(float(value), found), path
        unit = UNITS.get(path.rpartition(".")[2])
        if path.rpartition(".")[2] in ("bytes", "sent_bytes", "planned_sent_bytes"):
            assert text == bytes_text(found), path
        elif unit is not None:
            assert text == scaled(found, unit), path
        elif path.endswith("ceiling_fraction"):
            assert text.startswith(percent(found)), path
        elif not path.endswith("messages"):
            assert text == time_text(found), path
    assert profile_page.locator("h1").text_content().replace("\u00a0", " ") == report.summary


def test_page_shows_tooltip_and_zooms(profile_page):
    timeline, shown = profile_page.locator("#timeline"), profile_page.locator("#range")
    timeline.evaluate("canvas => canvas.scrollIntoView({block: 'start'})")
    box = timeline.bounding_box()
    profile_page.mouse.move(box["x"] + 80, box["y"] + 30)
    tip = profile_page.locator("#tip").inner_text()
    assert tip.startswith("kernel on rank 0: 100 µs")
    assert "forward, ring step 0" in tip
    before = shown.text_content()
    profile_page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    profile_page.mouse.wheel(0, -600)
    expect(shown).not_to_have_text(before)
    profile_page.locator("#all").click()
    expect(shown).to_have_text(before)


def test_page_shows_longest_wait_of_step(profile_page):
    shown, button = profile_page.locator("#range"), profile_page.locator("button.step.most").first
    before, name = shown.text_content(), button.text_content()
    backward, step = (button.get_attribute(f"data-{key}") for key in ("backward", "step"))
    assert name == f"{('forward', 'backward')[int(backward)]} {step}"
    button.click()
    expect(shown).not_to_have_text(before)
    box, tips = profile_page.locator("#timeline").bounding_box(), []
    for rank in range(4):  # the middle of each rank's second track
        profile_page.mouse.move(box["x"] + 62 + (box["width"] - 70) / 2, box["y"] + 24 + rank * 61 + 25)
        tips.append(profile_page.locator("#tip").text_content())
    assert any("waiting on rank" in tip and f"{name.split()[0]}, ring step {step}," in tip for tip in tips), tips
    profile_page.locator("#all").click()


def kernels_of(ranks: int) -> Report:
    """Return a report of one equal kernel per rank, and one wait at step 1 of the rank before the last."""
    makers = [Maker(rank) for rank in range(ranks)]
    for one in makers:
        one.compute(0, 0, 100)
    makers[-2].message(1, ranks - 3, sends=False, posted=100, start=100, end=190)
    makers[-2].compute(1, 190, 200)
    return Report.of([one.records() for one in makers])


@pytest.fixture(scope="module")
def page_of_many_ranks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("many") / "profile.html"
    kernels_of(300).write_html(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("pixels", [pytest.param(1, marks=pytest.mark.full), 3])
def test_page_draws_visible_ranks_of_many(browser, page_of_many_ranks, pixels):
    """Browsers draw no canvas above 16,384 pixels."""
    ranks, row, half, labels = 300, 61, 450, 70
    events = []
    opened = open_page(browser, page_of_many_ranks, events, height=2 * half, pixels=pixels)
    box, tip = "document.querySelector('.timeline').getBoundingClientRect()", opened.locator("#tip")
    left, width, high = opened.evaluate(f"[{box}.left, {box}.width, {box}.height]")
    assert high > ranks * row > 16_384
    compute = opened.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--compute').trim()")
    at = left + labels + (width - labels - 8) / 4
    for rank in (0, 1, 63, 64, 127, 200, ranks - 1, 100, 0):
        down = 24 + row * rank + 8
        opened.evaluate(f"scrollTo(0, scrollY + {box}.top + {down - half})")
        chromium.next_frame(opened)
        assert opened.evaluate("document.getElementById('timeline').height") <= 16_384
        top = opened.evaluate(f"{box}.top") + down
        opened.mouse.move(at, top)
        assert tip.text_content().startswith(f"kernel on rank {rank}: 100 µs")
        assert 0 < tip.bounding_box()["y"] - top < 40
        assert opened.evaluate(PIXEL % {"x": at, "y": top, "pixels": pixels}) == compute
    opened.evaluate("document.querySelector('button.step.most').click()")
    chromium.next_frame(opened)
    opened.mouse.move(at + (width - labels) / 4, opened.evaluate(f"{box}.top") + 24 + row * (ranks - 2) + 25)
    assert tip.text_content().startswith(f"waiting on rank {ranks - 2}: 90 µs")
    label = opened.evaluate("document.getElementById('timeline').getContext('2d').measureText('rank 1023').width")
    assert label + 10 < labels, "it is drawn whole"
    assert events == []


def test_keep_units_together_uses_no_break_spaces():
    text = "rank 1 of 4 ranks brings 0.257 MB/s in 3 ms, 78.3 % of 2 MiB at 2.25 GFLOP/s; 8 kilograms"
    kept = "rank 1 of 4 ranks brings 0.257~MB/s in 3~ms, 78.3~% of 2~MiB at 2.25~GFLOP/s; 8 kilograms"
    assert keep_units_together(text) == kept.replace("~", "\u00a0")


def test_sample_page_is_current():
    there = SAMPLE.with_suffix(".html").read_text(encoding="utf-8")
    assert there == page(Report.load(SAMPLE).data), "run PYTHONPATH=. python ci/make_images.py"


def test_sample_report_has_all_fields():
    sample, today = Report.load(SAMPLE).data, Report.of(ring(4, 3)).data
    assert sample.keys() == today.keys(), "record it again, see profiling/README.md"
    assert sample["events"]["kinds"] == today["events"]["kinds"]
    assert sample["training"], "its steps are marked"


def test_page_follows_color_scheme_and_prints_light(profile_page):
    paper, seen = profile_page.locator("section").first, {}
    color = "section => getComputedStyle(section).backgroundColor"
    for scheme in ("light", "dark"):
        profile_page.emulate_media(color_scheme=scheme)
        seen[scheme] = paper.evaluate(color)
    assert seen["light"] != seen["dark"]
    profile_page.emulate_media(media="print")  # the color scheme is still dark
    assert paper.evaluate(color) == seen["light"] == "rgb(255, 255, 255)"
    profile_page.emulate_media(media="null", color_scheme="null")


def test_page_does_not_scroll_sideways(profile_page):
    fits = "document.documentElement.scrollWidth <= innerWidth"
    for width in (1200, 420):
        profile_page.set_viewport_size({"width": width, "height": 900})
        assert profile_page.evaluate(fits)
    profile_page.emulate_media(media="print")
    profile_page.set_viewport_size({"width": 700, "height": 900})  # A4 and letter, without their margins
    assert profile_page.evaluate(fits)
    cut_off = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
    assert profile_page.locator(".tile b").evaluate_all(cut_off) == []
    profile_page.emulate_media(media="null")
    profile_page.set_viewport_size({"width": 1200, "height": 900})


def test_sample_tables_fit_wide_screen(browser):
    """A table scrolls if it has no room, and readers would miss its last column."""
    opened = open_page(browser, SAMPLE.with_suffix(".html"), [])
    tables = opened.locator(".scroll").evaluate_all("all => all.map(e => [e.scrollWidth, e.clientWidth])")
    assert len(tables) > 4
    assert [(wide, room) for wide, room in tables if wide > room] == []


def test_page_requests_and_logs_nothing(profile_page, events):
    """The last test of the file: it covers the page of the tests before it."""
    assert events == []
