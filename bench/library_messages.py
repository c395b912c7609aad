"""The doctor against messages that libraries can raise: how often it names what they state.

    python bench/library_messages.py [--name NAME]

Some 30,000 messages of `raise` and `assert` statements were extracted from 52 trainers, engines
and libraries, several of them in two or three versions. 400 of them were drawn at random and
labelled by a reader who saw neither the doctor nor the other labels; 225 state an illness of the
vocabulary, the others are internal checks. bench/messages/labelled.tsv holds these 225: library,
file, exception, names that are right answers, message. Each is put below a traceback of one frame.

The messages that the doctor knows (health/failures/library_messages.txt) were labelled by other
readers. They contain most of these 225, so the figure says how well the labels of two readers
agree and how many messages are known, not what happens with a library that nobody has read.

    first     the first finding names it: by a rule, or as a known message, or by the message's form
    guess     the first guess names it
    wrong     something else is said
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import common
from threads import VAGUE, _named, _with_equals, wilson

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

FILE = Path(__file__).parent / "messages" / "labelled.tsv"
_VALUE = re.compile(r"\{[^}]*\}|%[sdrfi]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    counts = Counter(map(verdict, FILE.read_text(encoding="utf-8").splitlines()))
    total = counts.total()
    low, high = wilson(counts["first"], total)
    print(f"{total} messages, " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    print(f"right first {counts['first'] / total:.1%} ({low:.0%} to {high:.0%})")
    if chosen.name:
        common.write_result(
            chosen.name, {**common.machine(("numpy",)), "messages": total, **counts}
        )


def verdict(line: str) -> str:
    """Let the doctor read one message and compare what it says with the label."""
    _, file, exception, names, message = line.split("\t")
    said = answer(file, f"{exception}: {_VALUE.sub('X', message)}")
    if not said or _named(said).isdisjoint(_with_equals(names.split(","))):
        return "wrong"
    is_guess = said["name"] in VAGUE and "guess" in said["causes"][0]
    return "guess" if is_guess else "first"


def answer(file: str, error: str) -> dict[str, Any]:
    """Return the first finding about an error that this file of a library raised."""
    place = f"/usr/lib/python3/site-packages/{file}"
    view = read_text(
        f'Traceback (most recent call last):\n  File "{place}", line 1, in f\n{error}\n'
    )
    findings = as_json(diagnose(view, RULES), view)["findings"]
    return next((one for one in findings if one["level"] != "info"), next(iter(findings), {}))


if __name__ == "__main__":
    main()
