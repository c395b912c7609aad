"""The doctor against ends of runs: no illness is never said over a run that died, hung or is NaN.

    python bench/doctor_ends.py [--seeds N] [--name NAME]

Every body of ends_bodies.py (healthy logs of many frameworks) is joined with every end of
ends_table.py, and read as a user's log is. Counted are answers of "no illness" over an end that is
none (must be 0), endings that are named wrong, and healthy ends over which the doctor says "ill".
An end that leaves no trace in a log which does not show its plan looks like a healthy one:
those pairs are left out (`needs_total`), and the answer there says that the end is not logged.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import common
from ends_bodies import BODIES, Body, body
from ends_table import HEALTHY, ILL, SURVIVED, EndCase

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

TOTAL = 100


@dataclass(frozen=True, slots=True)
class Composed:
    """A log with the end that it has."""

    framework: str
    end: str
    text: str
    how: tuple[str, ...]
    is_ill: bool


def composed(seed: int) -> Iterator[Composed]:
    """Return every body with every end that it can have."""
    for name in BODIES:
        for case in (*ILL, *HEALTHY):
            made = body(name, seed=seed, steps=case.steps, total=TOTAL)
            if case.needs_total and not made.shows_total:
                continue
            if case.name == "finish_server_down" and not made.finish:
                # Nothing tells the end of the run from that of its server.
                continue
            yield _joined(name, case, made, random.Random(f"{seed} {name} {case.name}"))
        for what, lines in SURVIVED.items():
            made = body(name, seed=seed, steps=TOTAL, total=TOTAL)
            half = len(made.lines) // 2
            text = (*made.lines[:half], *lines, *made.lines[half:], *made.finish)
            yield Composed(name, what, _text(text), ("finished", "unknown"), is_ill=False)


def _joined(name: str, case: EndCase, made: Body, rng: random.Random) -> Composed:
    lines = [*made.lines, *case.make(made, rng)]
    text = _text(lines)
    if case.name == "cut_line":
        text = text.rstrip("\n")
    return Composed(name, case.name, text, case.how, case.is_ill)


def _text(lines: Any) -> str:
    return "\n".join(lines) + "\n"


def judged(one: Composed) -> dict[str, Any]:
    """Return what the doctor says of a log, and whether that is right."""
    view = read_text(one.text)
    answer = as_json(diagnose(view, RULES), view)
    return {
        "framework": one.framework,
        "end": one.end,
        "verdict": answer["verdict"],
        "ending": answer["vital_signs"]["ending"],
        "first": next((found["code"] for found in answer["findings"]), ""),
        "missed": one.is_ill and answer["verdict"] == "no_illness",
        "false_alarm": not one.is_ill and answer["verdict"] == "ill",
        "ending_right": answer["vital_signs"]["ending"] in one.how,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="how often everything is composed")
    parser.add_argument("--name", default="doctor_ends", help="of the file in bench/results")
    chosen = parser.parse_args()
    all_of_them = [(one, judged(one)) for seed in range(chosen.seeds) for one in composed(seed)]
    rows = [row for _, row in all_of_them]
    wrong = [r for r in rows if r["missed"] or r["false_alarm"] or not r["ending_right"]]
    for row in wrong:
        print(row)
    ill = [row for one, row in all_of_them if one.is_ill]
    healthy = [row for one, row in all_of_them if not one.is_ill]
    result = {
        **common.machine(("numpy",)),
        "ill_ends": len(ill),
        "healthy_ends": len(healthy),
        "no_illness_over_an_ill_end": sum(row["missed"] for row in ill),
        "ill_over_a_healthy_end": sum(row["false_alarm"] for row in healthy),
        "ending_named_right": sum(row["ending_right"] for row in rows) / len(rows),
        "verdicts_of_ill_ends": dict(Counter(row["verdict"] for row in ill)),
        "verdicts_of_healthy_ends": dict(Counter(row["verdict"] for row in healthy)),
        "wrong": wrong,
    }
    common.write_result(chosen.name, result)


if __name__ == "__main__":
    main()
