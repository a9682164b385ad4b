"""The HTML report in a real browser: no error, no request, the JSON's numbers, hover and zoom; and its size."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from burst_portable.profiling.report import Report
from burst_portable.profiling.report.html import _whole, page
from burst_portable.utils.text import bytes_text, percent, scaled, time_text
from tests.support import chromium
from tests.support.synthetic_records import Maker, ablated, ring

SAMPLE = Path(__file__).parents[3] / "profiling" / "sample" / "slow_link.json"
UNITS = {
    **dict.fromkeys(("flop_rate", "planned_flop_rate"), "FLOP/s"),
    **dict.fromkeys(("bandwidth", "planned_bandwidth"), "B/s"),
    "intensity": "",
}
# The colour of the timeline at a place in the window, from a copy: the canvas itself is not made for being read.
PIXEL = """(() => {
  const canvas = document.getElementById("timeline"), copy = document.createElement("canvas");
  const seen = canvas.getBoundingClientRect(), pen = copy.getContext("2d");
  const [x, y] = [%(x)f - seen.left, %(y)f - seen.top].map((place) => Math.round(place * %(pixels)d));
  pen.drawImage(canvas, x, y, 1, 1, 0, 0, 1, 1);
  return "#" + [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((c) => c.toString(16).padStart(2, "0")).join("");
})()"""
needs_chromium = pytest.mark.skipif(chromium.path() is None, reason="no chromium on this machine: apt install chromium")


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.of(ablated(ring(4, 12, slow=[2])))


@pytest.fixture(scope="module")
def browser(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("html")
    report.write_html(folder / "profile.html")
    opened = chromium.Page(folder / "profile")
    opened.open(folder / "profile.html")
    yield opened
    opened.close()


def test_it_stays_below_a_megabyte_for_eight_ranks_and_a_thousand_steps():
    assert len(page(Report.of(ring(8, 1000)).data).encode()) < 1_000_000


@needs_chromium
def test_numbers_on_the_page_are_the_json_s(browser, report):
    cells = browser.run(
        "[...document.querySelectorAll('[data-path]')].map(e => [e.dataset.path, e.dataset.value, e.textContent])"
    )
    assert len(cells) > 40
    assert {path for path, *_ in cells} >= {f"ablation.3.{name}" for name in ("whole", "exposed_computing", "hidden")}
    for path, value, text in cells:
        found = report.data
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        assert math.isclose(float(value), found), path
        unit = UNITS.get(path.rpartition(".")[2])
        if path.rpartition(".")[2] in ("bytes", "sent_bytes", "sent", "planned_sent"):
            assert text == bytes_text(found), path
        elif unit is not None:
            assert text == scaled(found, unit), path
        elif path.endswith("of_ceiling"):
            assert text.startswith(percent(found)), path
        elif not path.endswith("messages"):
            assert text == time_text(found), path
    assert browser.run("document.querySelector('h1').textContent").replace("\u00a0", " ") == report.verdict


@needs_chromium
def test_hover_tells_and_the_wheel_zooms(browser):
    box = browser.run("(() => { const b = document.getElementById('timeline').getBoundingClientRect();"
                      "return [b.left, b.top, b.width, scrollY] })()")  # fmt: skip
    browser.run("document.getElementById('timeline').scrollIntoView({block: 'start'})")
    left, top, width, _ = box
    top = browser.run("document.getElementById('timeline').getBoundingClientRect().top")
    browser.mouse("mouseMoved", left + 80, top + 30)
    assert browser.run("document.getElementById('tip').hidden") is False
    told = browser.run("document.getElementById('tip').textContent")
    assert told.startswith("kernel on rank 0: 100 µs")
    assert "forward, ring step 0" in told
    before = browser.run("document.getElementById('range').textContent")
    browser.mouse("mouseWheel", left + width / 2, top + 40, deltaX=0, deltaY=-600)
    for _ in range(100):
        after = browser.run("document.getElementById('range').textContent")
        if after != before:
            break
    assert after != before
    browser.run("document.getElementById('all').click()")
    assert browser.run("document.getElementById('range').textContent") == before


@needs_chromium
def test_a_step_shows_its_longest_wait_in_the_timeline(browser):
    before = browser.run("document.getElementById('range').textContent")
    name, backward, step = browser.run(
        "(() => { const b = document.querySelector('button.step.most'); b.click();"
        "return [b.textContent, b.dataset.backward, b.dataset.step] })()"
    )
    assert name == f"{('forward', 'backward')[int(backward)]} {step}"
    assert browser.run("document.getElementById('range').textContent") != before
    left, top, width = browser.run("(() => { const b = document.getElementById('timeline').getBoundingClientRect();"
                                   "return [b.left, b.top, b.width] })()")  # fmt: skip
    told = []
    for rank in range(4):  # what is in the middle, on each rank's second track
        browser.mouse("mouseMoved", left + 62 + (width - 70) / 2, top + 24 + rank * 61 + 25)
        told.append(browser.run("document.getElementById('tip').textContent"))
    assert any("waiting on rank" in one and f"{name.split()[0]}, ring step {step}," in one for one in told), told
    browser.run("document.getElementById('all').click()")


def kernels_of(ranks: int) -> Report:
    """A kernel a rank, all alike, and one wait at step 1 of the rank before the last."""
    makers = [Maker(rank) for rank in range(ranks)]
    for one in makers:
        one.compute(0, 0, 100)
    makers[-2].message(1, ranks - 3, sends=False, posted=100, start=100, end=190)
    makers[-2].compute(1, 190, 200)
    return Report.of([one.records() for one in makers])


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("pixels", [1, 3])
def test_a_thousand_ranks_are_drawn_where_one_scrolls_to(tmp_path, pixels):
    """Browsers draw nothing on canvases that are too large: 16,384 pixels is what all of them can."""
    ranks, row, half, labels = 1024, 61, 450, 70
    kernels_of(ranks).write_html(tmp_path / "profile.html")
    with closing(chromium.Page(tmp_path / "profile")) as opened:
        opened.open(tmp_path / "profile.html")
        opened.resize(1200, 2 * half, pixels)
        box = "document.querySelector('.timeline').getBoundingClientRect()"
        left, width, high = opened.run(f"[{box}.left, {box}.width, {box}.height]")
        assert high > ranks * row
        compute = opened.run("getComputedStyle(document.documentElement).getPropertyValue('--compute').trim()")
        at = left + labels + (width - labels - 8) / 4
        for rank in (0, 1, 127, 128, 511, 700, ranks - 1, 300, 0):
            down = 24 + row * rank + 8
            opened.run(f"scrollTo(0, scrollY + {box}.top + {down - half})")
            opened.frames()
            assert opened.run("document.getElementById('timeline').height") <= 16_384
            top = opened.run(f"{box}.top") + down
            opened.mouse("mouseMoved", at, top)
            assert opened.run("document.getElementById('tip').textContent").startswith(f"kernel on rank {rank}: 100 µs")
            assert 0 < opened.run("document.getElementById('tip').getBoundingClientRect().top") - top < 40
            assert opened.run(PIXEL % {"x": at, "y": top, "pixels": pixels}) == compute
        opened.run("document.querySelector('button.step.most').click()")
        opened.frames()
        opened.mouse("mouseMoved", at + (width - labels) / 4, opened.run(f"{box}.top") + 24 + row * (ranks - 2) + 25)
        told = opened.run("document.getElementById('tip').textContent")
        assert told.startswith(f"waiting on rank {ranks - 2}: 90 µs")
        label = opened.run("document.getElementById('timeline').getContext('2d').measureText('rank 1023').width")
        assert label + 10 < labels, "it is drawn whole"
        assert (opened.said(), opened.requests()) == ([], [])


def test_a_number_stays_with_its_unit():
    told = _whole("rank 1 of 4 ranks brings 0.257 MB/s in 3 ms, 78.3 % of 2 MiB at 2.25 GFLOP/s; 8 kilograms")
    assert told == "rank 1 of 4 ranks brings 0.257~MB/s in 3~ms, 78.3~% of 2~MiB at 2.25~GFLOP/s; 8 kilograms".replace(
        "~", "\u00a0"
    )


def test_the_sample_is_what_the_page_is_today():
    there = SAMPLE.with_suffix(".html").read_text(encoding="utf-8")
    assert there == page(Report.load(SAMPLE).data), "run PYTHONPATH=. python ci/make_images.py"


def test_the_sample_has_all_that_a_report_has_today():
    sample, today = Report.load(SAMPLE).data, Report.of(ring(4, 3)).data
    assert sample.keys() == today.keys(), "record it again, see profiling/README.md"
    assert sample["events"]["kinds"] == today["events"]["kinds"]
    assert sample["training"], "its steps are marked"


@needs_chromium
def test_colours_follow_the_reader_and_paper_is_light(browser):
    paper = "getComputedStyle(document.querySelector('section')).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen[scheme] = browser.run(paper)
    assert seen["light"] != seen["dark"]
    browser.call("Emulation.setEmulatedMedia", media="print")  # of a reader in the dark
    assert browser.run(paper) == seen["light"] == "rgb(255, 255, 255)"
    browser.call("Emulation.setEmulatedMedia", media="", features=[])


@needs_chromium
def test_the_page_does_not_scroll_sideways(browser):
    for width in (1200, 420):
        browser.resize(width)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.resize(700)  # A4 and letter, without their margins
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    wide = ".filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
    assert browser.run(f"[...document.querySelectorAll('.tile b')]{wide}") == []
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.clearDeviceMetricsOverride")


@needs_chromium
def test_no_table_of_the_sample_is_cut_on_a_wide_screen(tmp_path):
    """A table scrolls where it has no room; on a screen it has, and its last column would be seen by nobody."""
    opened = chromium.Page(tmp_path / "profile")
    opened.open(SAMPLE.with_suffix(".html"))
    tables = opened.run("[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])")
    opened.close()
    assert len(tables) > 4
    assert [(wide, room) for wide, room in tables if wide > room] == []


@needs_chromium
def test_it_asks_for_nothing_and_complains_of_nothing(browser):
    """Last of its file: about all that the others did."""
    assert browser.said() == []
    assert browser.requests() == []
