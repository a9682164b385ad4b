"""Test that texts of a report are shown as they are: they add no tag, script, link or formatting."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from burst_portable.profiling.report import Report
from burst_portable.profiling.report.html import page
from burst_portable.profiling.report.schema import find_error
from tests.profiling.report.test_schema_mutations import complete_report, paths

ATTACKS = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "javascript:alert(1)",
    "<!--",
    "{{ 7*7 }}{% raw %}",
    "&lt;script&gt;",
)
FORMATTING = (
    "a | b", "<b>bold</b>", "> quote", "`code`", "*a* **b**", "_a_ __b__", "[text](http://example.com)",
    "![image](http://example.com/x.png)", "<http://example.com>", "http://example.com", "www.example.com", "~~a~~",
    "a\\|b", "&amp;", "# title", "- item", "a\n\n# title", "a\r\n| b |", "[ref]: http://example.com", "$a$",
)  # fmt: skip


class Tags(HTMLParser):
    """Collect the names of tags with those of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data):
        self.text += data.lower()


def with_texts(text: str) -> dict:
    """Return a report with this text in every place of a text that the check of a file accepts."""
    data = json.loads(complete_report())
    changed = 0
    for *parents, last in list(paths(data))[1:]:
        inside = data
        for key in parents:
            inside = inside[key]
        if isinstance(before := inside[last], str):
            inside[last] = text
            if (text.isprintable() and find_error(data)) or last in ("schema", "level", "bound"):
                inside[last] = before
            else:
                changed += 1
    data["evidence"][text.replace("\n", " ")] = text
    assert changed > 30
    return data


@cache
def plain_tags() -> tuple[Tags, Tags]:
    """Return the tags of the page and of the rendered Markdown, of a report with plain texts."""
    data = with_texts("plain")
    return Tags(page(data)), Tags(rendered(Report(data).markdown()))


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)


@pytest.mark.parametrize("text", ATTACKS)
def test_page_has_no_tags_of_texts(text):
    plain, attacked = plain_tags()[0], Tags(page(with_texts(text)))
    assert attacked.found == plain.found
    assert sum(tag == "script" for tag, *_ in attacked.found) == 2


@pytest.mark.parametrize("text", [*ATTACKS, *FORMATTING])
def test_markdown_shows_texts_as_they_are(text):
    """The rendered page has the same tags as one of plain texts, and the text itself."""
    written = Report(with_texts(text)).markdown()
    found, expected = Tags(rendered(written)), plain_tags()[1]
    assert found.found == expected.found
    line = " ".join(text.split()).lower()
    left_out = not text.isprintable()  # the source of the hardware numbers
    assert found.text.count(line) == expected.text.count("plain") - left_out > 5
    for link in ("http://", "www.example"):  # GitHub makes links of these
        assert link not in written
