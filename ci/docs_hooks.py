"""Let pages of the site link to files outside docs/, with the relative paths that work in a repository view.

mkdocs calls the functions below. Each file that a page links to becomes a part of the site, under repository/. Markdown
becomes a page, source a page with one code block, and other files are copied. A link to a folder leads to its
README.md. A link to a missing file is a warning, which `make docs` turns into an error.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
CODE = {".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml"}
"""Files that are shown as a page: suffix -> language of their code block."""
LINK = re.compile(r"""(\]\(|^\[[^\]]+\]: +|(?:src|srcset|href)=")(?!\w+:|//|#)([^)\s"#]+)""", re.MULTILINE)
CODE_SPAN = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ to which pages link, and those to which these link."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    added: set[str] = set()
    while waiting:
        source = waiting.pop()
        for target in _links(source, (ROOT / source).read_text(encoding="utf-8")):
            if target.startswith("docs/") or target in added or not (ROOT / target).is_file():
                continue
            added.add(target)
            files.append(_file(config, target))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at the files of the site."""
    here = page.file.src_uri
    source = here.removeprefix("repository/") if here.startswith("repository/") else f"docs/{here}"

    def on_site(target: str) -> str:
        return posixpath.relpath(_address(target), posixpath.dirname(here) or ".")

    return _replaced(source, markdown, on_site)


def _links(source: str, text: str) -> list[str]:
    """Return the paths, from the root of the repository, to which a file links."""
    found: list[str] = []
    _replaced(source, text, lambda target: found.append(target) or target)  # type: ignore[func-returns-value]
    return found


def _replaced(source: str, text: str, replace: Callable[[str], str]) -> str:
    """Replace the path of each link outside code; `replace` takes it relative to the root of the repository."""

    def changed(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if (ROOT / target).is_dir():
            target += "/README.md"
        return match[1] + replace(target)

    parts, end = [], 0
    for code in CODE_SPAN.finditer(text):
        parts += [LINK.sub(changed, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(changed, text[end:])])


def _address(target: str) -> str:
    """Return where a file of the repository is in the site's sources."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"repository/{target}" + (".md" if Path(target).suffix in CODE else "")


def _file(config: MkDocsConfig, target: str) -> File:
    """Return the file of the site that shows a file of the repository."""
    address, path = _address(target), ROOT / target
    level = InclusionLevel.NOT_IN_NAV
    if (language := CODE.get(path.suffix)) is None:
        return File.generated(config, address, abs_src_path=os.fspath(path), inclusion=level)
    text = path.read_text(encoding="utf-8")
    return File.generated(config, address, content=f"# {target}\n\n````{language}\n{text}````\n", inclusion=level)
