"""Reads report.html as a browser would, and checks what must hold of every page."""

from __future__ import annotations

import json
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from homeostat.observe.report import write_report

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;"


class Page(HTMLParser):
    """Checks that tags balance; collects elements, text and what an attacker would want."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def report(run_dir: Path) -> Page:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = write_report(run_dir)
    text = path.read_text(encoding="utf-8")
    # Self-contained: no outside address, no import, and all drawn numbers are numbers.
    assert not re.search(r"https?://|@import|url\(", text)
    assert not re.search(r'[ "LM](?:nan|inf)\b', text)
    return Page(text)


def data_of(page: Page, label: str) -> dict[str, Any]:
    """The hover data of the plot that has a line or band of this name."""
    found = [json.loads(script) for script in page.scripts[:-1]]
    (one,) = [one for one in found if label in [line["label"] for line in one["lines"]]]
    return {line["label"]: line for line in one["lines"]}
