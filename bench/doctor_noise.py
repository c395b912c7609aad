"""The doctor's answers to failures whose error stands among the other lines of a whole console.

    python bench/doctor_noise.py [--every N] [--worse] [--name NAME]

Threads quote the few lines that matter. A console has dozens of warnings before them that the run
survived (`noise/before.txt`), and after them what other ranks, the launcher and the scheduler say
when one process fails (`noise/after.txt`). Every Nth case of the open half is judged as it is and
with these lines before it, after it, and around it, by the verdicts of `threads.py`. `kept` is the
share of cases right first whose first answer is still right. `--worse` lists the others.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

import common
import threads

from homeostat.cli.threads import Case, Half, load

NOISE = Path(__file__).parent / "noise"
PLACES = ("before", "after", "around")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=12, help="judge every Nth case")
    parser.add_argument("--worse", action="store_true", help="list what was right first and is not")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    cases = load(threads.ROOT, Half.OPEN)[:: chosen.every]
    alone = [threads.judge(case) for case in cases]
    first = [one.case for one in alone if one.verdict == "first"]
    print(f"{len(cases)} cases, right first {len(first)}")
    found: dict[str, object] = {"cases": len(cases), "first": len(first)}
    for place in PLACES:
        judged = [threads.judge(among_noise(case, place)) for case in first]
        counts = Counter(one.verdict for one in judged)
        found[place] = {"kept": counts["first"] / max(1, len(first)), "counts": dict(counts)}
        print(f"{place:7} kept {counts['first']} of {len(first)}: {dict(counts)}")
        for one in judged if chosen.worse else ():
            if one.verdict != "first":
                print(f"  {one.verdict:6} {one.case.url} {list(one.case.names)} {list(one.said)}")
    if chosen.name:
        common.write_result(chosen.name, {**common.machine(("numpy",)), **found})


def among_noise(case: Case, place: str) -> Case:
    """Return a case with the lines of a console before, after or around its log."""
    before = [(NOISE / "before.txt").read_text()] if place in ("before", "around") else []
    after = [(NOISE / "after.txt").read_text()] if place in ("after", "around") else []
    return replace(case, log="\n".join([*before, case.log, *after]))


if __name__ == "__main__":
    main()
