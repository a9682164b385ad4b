"""Text that goes on below its beginning, beside a label."""

from __future__ import annotations

import textwrap


def beside(label: str, text: str, width: int | None) -> str:
    """`text` in lines that stand behind `label`, which is on the first and not returned, `width` characters in all.

    None: one line, as for a log, whose readers wrap it. A word that is too long for a line, as paths are, is left whole
    and to the terminal, so that it can be copied.
    """
    if width is None:
        return text
    lines = textwrap.wrap(text, max(1, width - len(label)), break_long_words=False, break_on_hyphens=False)
    return f"\n{'':{len(label)}}".join(lines)
