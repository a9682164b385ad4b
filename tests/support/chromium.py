"""Chromium without a head, spoken to over pipes in its own protocol (CDP): no driver to install."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def path() -> str | None:
    """Where Chromium is on this machine, if it is."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page, and everything that it says: console messages, exceptions, requests."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()

        def pipes() -> None:  # Chromium reads commands on descriptor 3, and answers on 4
            reader, writer = os.dup(to_child), os.dup(from_child)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        self._process = subprocess.Popen(
            [
                path() or "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={width},{height}",
                "--no-first-run", "--disable-background-networking", "--hide-scrollbars", "about:blank",
            ],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        target = pages[0]["targetId"] if pages else self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, file: Path) -> None:
        self.call("Page.navigate", url=file.as_uri())
        until = time.monotonic() + 30
        while self.run("document.readyState") != "complete":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def resize(self, width: int, height: int = 900, pixels: int = 1) -> None:
        """Another size of the window, of so many pixels to one of CSS; returns when the page has been told."""
        size = {"width": width, "height": height, "deviceScaleFactor": pixels}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
        until = time.monotonic() + 10
        while self.run("[innerWidth, devicePixelRatio]") != [width, pixels]:
            assert time.monotonic() < until, "the window does not change"
        self.frames()

    def frames(self) -> None:
        """Returns when the page has been laid out, and told what changed."""
        self.run("new Promise(told => requestAnimationFrame(() => requestAnimationFrame(() => told(0))))")

    def screenshot(self, file: Path) -> None:
        """What the window shows, as PNG."""
        shot = self.call("Page.captureScreenshot")
        file.write_bytes(base64.b64decode(shot["data"]))

    def said(self) -> list[str]:
        """Console messages, exceptions and log entries."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]

    def requests(self) -> list[str]:
        """What it asked for, the file itself and data: URLs apart."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:"))]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
