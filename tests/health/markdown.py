"""Rule tests written in Markdown: a section is a case, its blocks are the run and what is expected.

```toml    framework, kind, total_steps; [options] [settings] [facts] [decimals]
```csv     metrics: `step, name, name`; a step may be `1..30`, a value `0.1->0.9` (a line) or
           `0.5~0.1` (normal noise around 0.5, seeded), or empty (not logged)
```earlier metrics of an earlier run in the same log, as in csv
```events  JSON lines: kind, step, fields
```samples JSON lines: step, text, ...
```log     console text, one line each; `[step N]` alone on a line sets the step
```expect  clear = true | not_evaluated = "text" | first_step, level, causes (the first ones, in
           order), fixes (the first settings), contains (in the message), confidence, subject
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.log import Log, LogLine
from homeostat.health.view import Event, Kind, RunView, SampleText, Series

KINDS = ("Fires", "Near miss", "Healthy", "Not evaluated")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Case:
    """One section of a rule's test."""

    code: str
    title: str
    blocks: dict[str, str]

    @property
    def expected(self) -> dict[str, Any]:
        return tomllib.loads(self.blocks["expect"])

    @property
    def about(self) -> dict[str, Any]:
        return tomllib.loads(self.blocks.get("toml", ""))

    def view(self) -> RunView:
        about = self.about
        events = [json.loads(line) for line in self._lines("events")]
        samples = [json.loads(line) for line in self._lines("samples")]
        return RunView(
            metrics=_metrics(self.blocks.get("csv", "")),
            framework=_framework(about.get("framework", "homeostat")),
            kind=Kind(about.get("kind", _kind(self.code))),
            settings=about.get("settings", {}),
            raw_settings=about.get("raw_settings", {}),
            events=tuple(Event(e.pop("kind"), e.pop("step", None), e) for e in events),
            log=_log(self.blocks.get("log", "")),
            samples=tuple(SampleText(**sample) for sample in samples),
            facts=about.get("facts", {}) | self._earlier(),
            total_steps=about.get("total_steps"),
            decimals=about.get("decimals", {}),
        )

    def _earlier(self) -> dict[str, Any]:
        """An earlier run of the same log."""
        if "earlier" not in self.blocks:
            return {}
        return {"runs": ({"label": "earlier", "metrics": _metrics(self.blocks["earlier"])},)}

    def _lines(self, block: str) -> list[str]:
        return [line for line in self.blocks.get(block, "").splitlines() if line.strip()]


def by_code(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases of each rule, so that `pytest -k CODE` finds them."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.code, []).append(case)
    return found


def by_letters(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases of the rules whose codes begin alike: RWD, POL, ... One test for all of them
    is a thousand tests fewer, of which each takes longer to start than a case does to judge."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.code[:3], []).append(case)
    return found


@contextmanager
def named(title: str) -> Iterator[None]:
    """Add the title of a case to what fails in it."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"in the case: {title}")
        raise


def read_cases(file: Path) -> Iterator[Case]:
    text = file.read_text(encoding="utf-8")
    code = text.split(maxsplit=2)[1]
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        yield Case(code, title.strip(), dict(_BLOCK.findall(body)))


def _kind(code: str) -> str:
    return "sft" if code.startswith("LRN") else "rl"


def _framework(name: str) -> Any:
    if name == "homeostat":
        return HOMEOSTAT
    from homeostat.health.frameworks import ALL

    return ALL[name]


def _metrics(text: str) -> dict[str, Series]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return {}
    names = [name.strip() for name in lines[0].split(",")][1:]
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    noise = np.random.default_rng(0)
    for line in lines[1:]:
        cell, *values = (part.strip() for part in line.split(","))
        first, _, last = cell.partition("..")
        steps = range(int(first), int(last or first) + 1)
        for name, value in zip(names, values, strict=True):
            if value:
                found[name] += zip(steps, _spread(value, len(steps), noise), strict=True)
    return {
        name: Series(np.array([s for s, _ in pairs]), np.array([v for _, v in pairs], dtype=float))
        for name, pairs in found.items()
        if pairs
    }


def _spread(value: str, count: int, noise: np.random.Generator) -> list[float]:
    if "->" in value:
        start, end = map(float, value.split("->"))
        return np.linspace(start, end, count).tolist()
    if "~" in value:
        mean, deviation = map(float, value.split("~"))
        return noise.normal(mean, deviation, count).tolist()
    return [float(value)] * count


def _log(text: str) -> Log:
    lines, step = [], None
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.fullmatch(r"\[step (\d+)\]", line.strip()):
            step = int(found[1])
        else:
            lines.append(LogLine(number, line, step))
    return Log(lines)
