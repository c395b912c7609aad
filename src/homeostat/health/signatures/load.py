"""Read the signatures of this folder.

    *.toml -> compiled.json, if its checksums are those of the files -> rows -> Signature
           -> source.py, which parses and checks the files, otherwise -^

So an edited file takes effect at once, and compiled.json only ever saves time. A row is a stanza in
plain data: references within the TOML files are resolved, those to lists.py are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level
from homeostat.health.signatures.folder import COMPILED, FOLDER, Row, checksums, toml_texts
from homeostat.health.signatures.lists import AFTERMATH, LISTS
from homeostat.health.signatures.signature import Signature


@cache
def shipped() -> tuple[Signature, ...]:
    """Return the signatures of this folder, read once."""
    return load(FOLDER)


def load(folder: Path) -> tuple[Signature, ...]:
    """Return all signatures of a folder, in the order of files and stanzas."""
    return tuple(map(build, rows(folder)))


def rows(folder: Path = FOLDER) -> list[Row]:
    """Return the stanzas as plain data, from compiled.json if it is current, else from the TOML."""
    texts = toml_texts(folder)
    compiled = _compiled(folder / COMPILED)
    if compiled.get("checksums") == checksums(texts):
        return compiled["signatures"]
    # Only needed where something was edited; it is slow to import, too.
    from homeostat.health.signatures.source import parse

    return parse(texts)


def _compiled(file: Path) -> dict[str, Any]:
    """Read compiled.json; empty if there is no such file, or one that a merge has left broken."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def build(row: Row) -> Signature:
    """Make a signature of a row."""
    ends_run = row.get("ends_run", False)
    return Signature(
        code=row["code"],
        name=row["name"],
        family=Family(row["family"]),
        texts=_expanded(row["texts"]),
        what=row["what"],
        why=row["why"],
        fixes=tuple(map(_fix, row["fix"])),
        causes=tuple(Cause(one["name"], one["why"]) for one in row.get("cause", ())),
        context=_expanded(row.get("context", ())),
        within=row.get("within", 80),
        unless=_expanded(row.get("unless", ())),
        when={name: _argument(value) for name, value in row.get("when", {}).items()},
        notes=row.get("notes", False),
        survivable=row.get("survivable", False),
        passing=row.get("passing", False),
        ends_run=ends_run,
        level=Level(row.get("level", Level.ERROR)),
        confidence=Confidence(row.get("confidence", Confidence.MEASURED)),
        explains=_expanded(row.get("explains", ())) + (AFTERMATH if ends_run else ()),
    )


def _fix(row: Row) -> Fix:
    return Fix(
        row.get("setting", ""),
        row.get("value", ""),
        row["why"],
        grade=Grade(row.get("grade", Grade.ADVICE)),
        theirs=row.get("theirs", {}),
    )


def _argument(value: Any) -> Any:
    """Put the lists of lists.py in place of their names in a predicate's argument."""
    if isinstance(value, dict):
        return {name: _argument(one) for name, one in value.items()}
    return _expanded(value) if isinstance(value, list) else value


def _expanded(items: Iterable[str]) -> tuple[str, ...]:
    """Put the lists of lists.py in place of their names."""
    found: list[str] = []
    for item in items:
        if item.startswith("@"):
            found += LISTS[item[1:]]
        else:
            found.append(item)
    return tuple(found)
