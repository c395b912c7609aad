"""Say what changed in a run's health: as a few lines for people, and as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from homeostat.health.finding import Finding, Level
from homeostat.health.formats.as_json import finding_json
from homeostat.health.formats.report import fix_line
from homeostat.health.frameworks import Framework
from homeostat.health.frameworks.telling import in_their_words, told_all
from homeostat.health.records import Change, State
from homeostat.health.words import shortened
from homeostat.observe.redact import Scrubber, mask_text
from homeostat.observe.safe_text import safe_text

_MAX_TEXT = 400
_MAX_FIXES = 2
_COLORS = {Level.ERROR: "1;31", Level.WARN: "1;33", Level.INFO: "1;36"}


class News(StrEnum):
    """What happened to a finding."""

    OPENED = "opened"
    WORSE = "worse"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Message:
    """A change of a run's health, and the framework whose names the report uses."""

    news: News
    run: str
    step: int
    finding: Finding
    framework: Framework

    def lines(self, *, color: bool = False) -> list[str]:
        """Return it for people: what, since when, why, and what to change."""
        finding, level = self.finding, self.finding.level
        about = f" ({finding.subject})" if finding.subject else ""
        head = f"{level} {finding.code} {finding.name}{about}"
        if self.news is News.CLEARED:
            return [_safe(f"homeostat: step {self.step:,}: cleared: {head}")]
        worse = "worse: " if self.news is News.WORSE else ""
        since = finding.first_step
        begun = f" (since step {since:,})" if since is not None and since != self.step else ""
        said = self._told(finding.message)
        mark = f"\033[{_COLORS[level]}m{worse}{head}\033[0m" if color else f"{worse}{head}"
        lines = [f"homeostat: step {self.step:,}: {mark}{begun}: {_safe(said)}"]
        if finding.causes:
            cause = finding.causes[0]
            lines.append(f"    likely cause: {_safe(f'{cause.name}: {self._told(cause.why)}')}")
        for fix in told_all(finding.fixes, self.framework)[:_MAX_FIXES]:
            lines.append(f"    what to do: {_safe(fix_line(fix))}")
        return [*lines, f"    more: homeostat explain {finding.code}"]

    def as_json(self) -> dict[str, Any]:
        """Return it for programs. `text` is one line, which chat services show."""
        found = {
            "event": self.news.value,
            "run": self.run,
            "step": self.step,
            "framework": self.framework.name,
            "text": self.lines()[0],
            "finding": finding_json(self.finding, self.framework),
        }
        return Scrubber().tree(found)

    def _told(self, text: str) -> str:
        return shortened(in_their_words(text, self.framework), _MAX_TEXT)


def _safe(text: str) -> str:
    return safe_text(mask_text(" ".join(text.split())))


class Teller:
    """Turn changes into messages, and drop those of findings below a level."""

    def __init__(self, *, run: str, level: Level) -> None:
        self._run = run
        self._level = level
        self._told: set[tuple[str, str]] = set()

    def messages(self, changes: list[Change], framework: Framework) -> list[Message]:
        return [
            Message(news, self._run, change.step, change.finding, framework)
            for change in changes
            if (news := self._news(change)) is not None
        ]

    def _news(self, change: Change) -> News | None:
        key = change.finding.key
        if change.state is State.CLEARED:
            known = key in self._told
            self._told.discard(key)
            return News.CLEARED if known else None
        if change.finding.level.rank < self._level.rank:
            return None
        news = News.WORSE if key in self._told else News.OPENED
        self._told.add(key)
        return news
