"""Open pages in the Chromium of this machine, through Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def path() -> str | None:
    """Return the path of Chromium on this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """Start Chromium without a window and close it on exit."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def next_frame(page: Page) -> None:
    """Return when the page has been laid out and its observers have run."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
