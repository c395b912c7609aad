"""Guesses about errors that no rule knows: how often they are right, by their share of the votes.

    python bench/guesses.py [--half open|sealed] [--unseen] [--name NAME]

Each case of bench/threads/ that the doctor's rules do not name is guessed without the threads of
its own repository. Then the guesses beside an illness that a rule did name are counted
(health/guesses/second_opinion.py). `--unseen` is for the open half: each case is read and guessed
without the texts of signatures that it alone contains, so that more cases are not named, as in a
fresh half. The table of `health/guesses/known_cases.py` (share of votes -> share of right guesses)
is read off it; the sealed half tests it. Of the sealed half only counts are printed.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import common
from threads import ROOT, VAGUE, Text, _with_equals, answer_to, own_texts

from homeostat.cli.threads import Case, Half, load
from homeostat.health.guesses.known_cases import Guess, guesses, leaving_out

BINS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 1.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("open", "sealed"), default="open")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    parser.add_argument(
        "--unseen", action="store_true", help="without the texts that only this case has"
    )
    chosen = parser.parse_args()
    if chosen.unseen and chosen.half != "open":
        parser.error("--unseen is for the open half: no rule was written from the sealed one")
    cases = load(ROOT, Half(chosen.half))
    texts = own_texts(cases) if chosen.unseen else [frozenset[Text]()] * len(cases)
    pairs = [(case, own, answer_to(case, own)) for case, own in zip(cases, texts, strict=True)]
    tried = [
        [(guess, guess.cause in _with_equals(case.names)) for guess in guessed(case, own)]
        for case, own, answer in pairs
        if not specific(answer)
    ]
    judged = [one for each in tried for one in each]
    first = sum(each[0][1] for each in tried if each)
    among = sum(any(right for _, right in each) for each in tried)
    print(f"{chosen.half}: {len(tried)} cases that no rule names")
    print(f"first guess right {first}, one of three {among}")
    rows = [row for low, high in pairwise(BINS) if (row := counted(judged, low, high))]
    for row in rows:
        print("votes {low:.2f} to {high:.2f}: {guesses:4} guesses, {right:.0%} right, "
              "{said:.0%} said".format(**row))  # fmt: skip
    error = sum(r["guesses"] * abs(r["right"] - r["said"]) for r in rows) / max(1, len(judged))
    print(f"expected calibration error {error:.3f}")
    named = [(case, answer) for case, _, answer in pairs if specific(answer)]
    beside = [(case, names) for case, answer in named if (names := guesses_in(answer))]
    right = sum(not _with_equals(case.names).isdisjoint(names) for case, names in beside)
    print(
        f"{len(named)} cases that a rule names; {len(beside)} with a guess beside it, {right} right"
    )
    if chosen.name:
        found = {"cases": len(tried), "first": first, "among_three": among, "bins": rows,
                 "calibration_error": error,
                 "named": len(named), "beside": len(beside), "beside_right": right}  # fmt: skip
        common.write_result(chosen.name, {**common.machine(("numpy",)), chosen.half: found})


def specific(answer: dict[str, Any]) -> bool:
    """Return whether a rule says something specific, right or wrong."""
    return any(one["level"] != "info" and one["name"] not in VAGUE for one in answer["findings"])


def guesses_in(answer: dict[str, Any]) -> set[str]:
    """Return the guesses beside the first finding."""
    return {cause["name"] for cause in answer["findings"][0]["causes"] if "guess" in cause}


def guessed(case: Case, own: frozenset[Text]) -> tuple[Guess, ...]:
    with leaving_out(case.url, {text for _, text in own}):
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
