"""The doctor against failures that were made: real libraries, run with one mistake each.

    python bench/made_failures.py [--half open|aside] [--wrong] [--name NAME]

More than five hundred short scripts and settings were written as a practitioner would write them,
each with one mistake that people make, and run for real on a CPU. The first 328 used the libraries
that `make setup` installs (torch, transformers, peft, datasets, accelerate, TRL, Ray). The others
used the commands of axolotl, LLaMA-Factory, ms-swift, verl, OpenRLHF, torchtune, torchtitan,
Lightning, DeepSpeed, LitGPT, TRL, sentence-transformers, Stable-Baselines3, vLLM's CPU build, and
torchrun with two gloo ranks. bench/made/ holds what they printed, with paths replaced, and the
cause, which was written down before the doctor read anything. A script whose mistake had no
consequence, or that ended earlier for another reason, was left out. Verdicts as in
bench/threads.py.

A hash of the script's name parts them. For those after the first 328 the half is `open` if the
first byte of the name's SHA-256 (what follows "made/" in the address) is even, else `aside`. Rules
were written from `open`, none from `aside`.

Real failures of today's versions, whose cause is sure; but whoever wrote the scripts chose what
goes wrong in them, and names of several causes are accepted where several are right. Threads hold
what people could not solve by themselves, and are harder. `--wrong` lists the cases of the open
half that are not right, and counts are given by framework, too.
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
    for framework, of_one in by_framework(judged).items():
        print(f"  {framework:22} " + ", ".join(f"{v} {of_one[v]}" for v in VERDICTS))
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


def by_framework(judged: list[Judged]) -> dict[str, Counter[str]]:
    """Count the verdicts of each framework, in the order in which the cases stand."""
    counts: dict[str, Counter[str]] = {}
    for one in judged:
        counts.setdefault(one.case.framework, Counter())[one.verdict] += 1
    return counts


def show_wrong(judged: list[Judged]) -> None:
    for one in judged:
        if one.verdict not in ("first", "three"):
            wanted = "|".join(one.case.names)
            print(f"{one.verdict:7} {one.case.url}: {wanted}, said {list(one.said)}")


if __name__ == "__main__":
    main()
