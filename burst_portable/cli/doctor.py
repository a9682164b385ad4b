"""`burst-portable doctor`: what is installed here, and which backends can run."""

from __future__ import annotations

import platform


def doctor() -> None:
    """What is installed on this machine, and which backends can run on it."""
    print(f"Python {platform.python_version()}")
