"""Write `known/<framework>.toml`: the sources with the places of their settings, then the kinds."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping

from homeostat.health.frameworks.known import Kind, Known, Source

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_COLUMNS = 100


def file_text(facts: Known) -> str:
    """Return the whole file, in an order that depends on nothing but the facts."""
    blocks = [*map(_source, facts.sources), _settings(facts.settings or {})]
    return "\n".join(blocks)


def _source(source: Source) -> str:
    lines = ["[[source]]"]
    for key in ("repository", "commit", "date", "version", "prefix"):
        if value := getattr(source, key):
            lines.append(f"{key} = {json.dumps(value)}")
    if source.found:
        lines += ["", "[source.found]"]
        for place in sorted(source.found):
            lines += _listed(place, sorted(source.found[place]))
    return "\n".join([*lines, ""])


def _listed(place: str, names: list[str]) -> Iterator[str]:
    items = ", ".join(map(json.dumps, names))
    line = f"{json.dumps(place)} = [{items}]"
    if len(line) <= _COLUMNS:
        yield line
        return
    yield f"{json.dumps(place)} = ["
    yield from textwrap.wrap(
        f"{items},",
        width=_COLUMNS,
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    yield "]"


def _settings(settings: Mapping[str, Kind]) -> str:
    lines = ["[settings]"]
    for name in sorted(settings):
        kind = settings[name]
        value = json.dumps(list(kind) if isinstance(kind, tuple) else kind)
        lines.append(f"{name if _BARE.fullmatch(name) else json.dumps(name)} = {value}")
    return "\n".join([*lines, ""])
