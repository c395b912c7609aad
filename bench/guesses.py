"""Guesses about errors that no rule knows: how often they are right, by their share of the votes.

    python bench/guesses.py [--half open|sealed] [--name NAME]

Each case of bench/threads/ that the doctor's rules do not name is guessed without the threads of
its own repository. The table of `health/known_cases.py` (share of votes -> share of right guesses)
is read off the open half; the sealed half tests it. Of the sealed half only counts are printed.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import common
from threads import ROOT, VAGUE, _with_equals

from homeostat.cli.threads import Case, Half, load
from homeostat.health.diagnose import diagnose
from homeostat.health.known_cases import Guess, guesses, leaving_out
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.render import as_json

BINS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 1.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("open", "sealed"), default="open")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    cases = [case for case in load(ROOT, Half(chosen.half)) if not is_named(case)]
    judged = [(guess, guess.cause in _with_equals(case.names)) for case in cases
              for guess in guessed(case)]  # fmt: skip
    first = sum(guessed(case)[0].cause in _with_equals(case.names) for case in cases)
    among = sum(
        any(guess.cause in _with_equals(case.names) for guess in guessed(case)) for case in cases
    )
    print(f"{chosen.half}: {len(cases)} cases that no rule names")
    print(f"first guess right {first}, one of three {among}")
    rows = [row for low, high in pairwise(BINS) if (row := counted(judged, low, high))]
    for row in rows:
        print("votes {low:.2f} to {high:.2f}: {guesses:4} guesses, {right:.0%} right, "
              "{said:.0%} said".format(**row))  # fmt: skip
    error = sum(r["guesses"] * abs(r["right"] - r["said"]) for r in rows) / max(1, len(judged))
    print(f"expected calibration error {error:.3f}")
    if chosen.name:
        found = {"cases": len(cases), "first": first, "among_three": among, "bins": rows,
                 "calibration_error": error}  # fmt: skip
        common.write_result(chosen.name, {**common.machine(("numpy",)), chosen.half: found})


def is_named(case: Case) -> bool:
    """Return whether a rule says something specific, right or wrong."""
    view = read_text(case.log, config=None)
    found = as_json(diagnose(view, RULES), view)["findings"]
    return any(one["level"] != "info" and one["name"] not in VAGUE for one in found)


def guessed(case: Case) -> tuple[Guess, ...]:
    with leaving_out(case.url):
        return guesses(case.log.splitlines())


def counted(judged: list[tuple[Guess, bool]], low: float, high: float) -> dict[str, float]:
    """Return the guesses of a range of votes: their number, those that are right, what is said."""
    mine = [(guess, right) for guess, right in judged if low <= guess.votes < high]
    if not mine:
        return {}
    number = len(mine)
    said = sum(guess.right for guess, _ in mine) / number
    right = sum(right for _, right in mine) / number
    return {"low": low, "high": high, "guesses": number, "right": right, "said": said}


if __name__ == "__main__":
    main()
