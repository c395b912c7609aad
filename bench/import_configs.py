"""Count what `homeostat import` takes over of other frameworks' configs: one row per file.

    python bench/import_configs.py configs/*.yml scripts/run.sh [--out table.json]

Reads any files of axolotl, TRL, LLaMA-Factory, verl, OpenRLHF, slime or miles, converts each, and
checks the keys of the recipe that comes out. Prints a Markdown table; nothing of a file is
executed, and no file is changed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homeostat.config.loading.load import build_config
from homeostat.errors import ConfigError
from homeostat.importing.convert import convert, stem_of
from homeostat.importing.entries import Status
from homeostat.importing.reading import read_foreign
from homeostat.importing.recognise import recognise

COLUMNS = (Status.TAKEN, Status.APPROXIMATED, Status.PLANNED, Status.NOT_NEEDED, Status.UNKNOWN)


def row_of(file: Path) -> dict[str, Any]:
    """Return the counts of one file, and what its recipe lacks."""
    found = read_foreign(file)
    framework = recognise(found)
    if framework is None:
        return {"file": file.name, "error": "no framework is recognised"}
    imported = convert(found, framework, stem=stem_of(file), devices=None)
    counts = Counter(entry.status for entry in imported.entries)
    unknown = [entry.given.name for entry in imported.entries if entry.status is Status.UNKNOWN]
    try:
        build_config(imported.recipe, [], file=None)
        keys = "pass"
    except ConfigError as error:
        keys = f"{len(error.problems)} problems"
    return {
        "file": file.name,
        "framework": imported.framework,
        "settings": len(imported.entries),
        "counts": {status.value: counts.get(status, 0) for status in COLUMNS},
        "unknown": unknown,
        "look_at": [one.key for one in imported.needed],
        "keys": keys,
    }


def as_markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table for people."""
    heads = ["file", "settings", *(status.value for status in COLUMNS), "to look at", "keys"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        if "error" in row:
            yield f"| `{row['file']}` | {row['error']}" + " |" * (len(heads) - 1)
            continue
        counts = [str(row["counts"][status.value]) for status in COLUMNS]
        cells = [f"`{row['file']}`", str(row["settings"]), *counts]
        yield f"| {' | '.join([*cells, str(len(row['look_at'])), row['keys']])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="write the rows as JSON, too")
    arguments = parser.parse_args()
    rows = [row_of(file) for file in arguments.files]
    for line in as_markdown(rows):
        print(line)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
