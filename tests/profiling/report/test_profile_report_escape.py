"""Test that texts of a report are shown as they are: they add no tag, script, link or formatting."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("text", ATTACKS)
def test_page_has_no_tags_of_texts(text):
    plain, attacked = Tags(page(with_texts("plain"))), Tags(page(with_texts(text)))
    assert attacked.found == plain.found
    assert sum(tag == "script" for tag, *_ in attacked.found) == 2


@pytest.mark.parametrize("text", [*ATTACKS, *FORMATTING])
def test_markdown_shows_texts_as_they_are(text):
    """The rendered page has the same tags as one of plain texts, and the text itself."""
    rendered, expected = (
        MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(Report(with_texts(one)).markdown())
        for one in (text, "plain")
    )
    written = Report(with_texts(text)).markdown()
    assert Tags(rendered).found == Tags(expected).found
    line = " ".join(text.split()).lower()
    left_out = not text.isprintable()  # the source of the hardware numbers
    assert Tags(rendered).text.count(line) == Tags(expected).text.count("plain") - left_out > 5
    for link in ("http://", "www.example"):  # GitHub makes links of these
        assert link not in written
