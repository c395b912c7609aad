"""The doctor against failures that were made: real libraries, run with one mistake each.

    python bench/made_failures.py [--half open|aside] [--wrong] [--name NAME]

328 short scripts were written as a practitioner would write them, each with one mistake that
people make, and run with the libraries that `make setup` installs (torch, transformers, peft,
datasets, accelerate, TRL, Ray). bench/made/ holds what they printed, with paths replaced, and the
cause, which was written down before the doctor read anything. They were parted by a hash of the
script's name: rules were written from `open`, none from `aside`. Verdicts as in bench/threads.py.

Real failures of today's versions, whose cause is sure; but whoever wrote the scripts chose what
goes wrong in them, and names of several causes are accepted where several are right. Threads hold
what people could not solve by themselves, and are harder. `--wrong` lists the cases of the open
half that are not right.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import common
from threads import VERDICTS, Judged, judge, wilson

from homeostat.cli.threads import Case

FOLDER = Path(__file__).parent / "made"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("open", "aside"), default="aside")
    parser.add_argument("--wrong", action="store_true", help="list what is not right (open half)")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    judged = [judge(case) for case in cases(chosen.half)]
    counts = Counter(one.verdict for one in judged)
    total = len(judged)
    low, high = wilson(counts["first"], total)
    print(f"{chosen.half}: {total} cases, " + ", ".join(f"{v} {counts[v]}" for v in VERDICTS))
    print(f"right first {counts['first'] / total:.1%} ({low:.0%} to {high:.0%})")
    if chosen.wrong and chosen.half == "open":
        show_wrong(judged)
    if chosen.name:
        result = {"half": chosen.half, "cases": total, **{v: counts[v] for v in VERDICTS}}
        common.write_result(chosen.name, {**common.machine(("numpy",)), **result})


def cases(half: str) -> list[Case]:
    """Read the cases of a half."""
    rows = map(json.loads, (FOLDER / f"{half}.jsonl").read_text(encoding="utf-8").splitlines())
    lists = ("names", "settings")
    return [Case(**{**row, **{key: tuple(row[key]) for key in lists}}) for row in rows]


def show_wrong(judged: list[Judged]) -> None:
    for one in judged:
        if one.verdict not in ("first", "three"):
            wanted = "|".join(one.case.names)
            print(f"{one.verdict:7} {one.case.url}: {wanted}, said {list(one.said)}")


if __name__ == "__main__":
    main()
