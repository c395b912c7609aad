"""Drive a real Chromium by its debugging protocol: open a page, run JavaScript, take a picture.

Enough for tests that look at a page; no driver program is needed.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 30.0


class Page:
    """One tab of the browser."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        # What the page wrote to the console as an error, and exceptions that nobody caught.
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params)))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def theme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Return the value of an expression, of a promise if it is one."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Return the value of an expression as soon as it is truthy."""
        end = time.monotonic() + DEADLINE_S
        while not (value := self.run(condition)):
            assert time.monotonic() < end, (condition, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def click(self, text: str) -> None:
        """Click the first link or button whose text begins so."""
        found = f"[...document.querySelectorAll('a, button')].find((one) => {_begins(text)})"
        self.wait(f"{found} !== undefined")
        self.run(f"{found}.click()")

    def drag(self, selector: str, *, start: float, end: float) -> None:
        """Drag the mouse over an element, from one share of its width to another."""
        box = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        y = box["y"] + box["height"] / 2
        places = [box["x"] + box["width"] * share for share in (start, (start + end) / 2, end)]
        mouse = {"y": y, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=places[0], y=y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=places[0], **mouse)
        for x in places[1:]:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, buttons=1, **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=places[-1], **mouse)

    def text(self) -> str:
        return self.run("document.body.innerText")

    def picture(self, file: Path) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=False)
        file.write_bytes(base64.b64decode(found["data"]))


def _begins(text: str) -> str:
    return f"one.textContent.startsWith({text!r})"


@contextmanager
def opened_browser(folder: Path) -> Iterator[Page]:
    """Start a browser with a profile in `folder`; skip the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    client = pytest.importorskip("websockets.sync.client")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run"]
    process = subprocess.Popen(
        [program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with client.connect(_address(folder), max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_S)


def _address(folder: Path) -> str:
    """Return the address of the first tab, as soon as the browser has written its port."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        told = folder / "DevToolsActivePort"
        if told.is_file() and (lines := told.read_text().splitlines()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise AssertionError("the browser did not start")
