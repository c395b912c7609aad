"""The doctor against failure cases whose cause is known.

    python bench/doctor_cases.py CASES.jsonl [--name NAME] [--without-config]

A case is one JSON object a line:

    id, framework, format   what it is
    text                    what a user would paste: log, metric lines, traceback
    config                  settings by that framework's names, or null
    expected                {"healthy": bool, "family": str, "cause": str}; the cause "unknown" is
                            for what cannot be recognised
    alternatives_ok         other names that are right; `wrong`: names that would mislead

Right: the first finding of level warn or above has the cause, or one of the other names, as its
name or among its first two causes; a healthy case is right without such a finding, and so is an
unknown one. Half: the second finding has it. Unknown: the doctor says nothing of that level.
Everything else is wrong. A case is a call of the doctor as a program makes it: text in, JSON out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import common

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--name", default="doctor_cases", help="of the file in bench/results")
    parser.add_argument("--without-config", action="store_true", help="give the text alone")
    chosen = parser.parse_args()
    lines = chosen.cases.read_text(encoding="utf-8").splitlines()
    rows = [judge(json.loads(line), with_config=not chosen.without_config) for line in lines]
    for row in rows:
        if row["verdict"] != "right":
            print(f"{row['id']:8} {row['verdict']:8} wanted {row['wanted']}, said {row['said']}")
    counts = Counter(row["verdict"] for row in rows)
    shares = {verdict: counts[verdict] / len(rows) for verdict in VERDICTS}
    families = sum(row["family_right"] for row in rows if row["family_right"] is not None)
    ill = sum(row["family_right"] is not None for row in rows)
    result = {
        **common.machine(("numpy",)),
        "cases": len(rows),
        "with_config": not chosen.without_config,
        "counts": {verdict: counts[verdict] for verdict in VERDICTS},
        "shares": shares,
        "family_right": families / max(1, ill),
        "not_right": [row for row in rows if row["verdict"] != "right"],
    }
    common.write_result(chosen.name, result)


VERDICTS = ("right", "half", "unknown", "wrong")


def judge(case: dict[str, Any], *, with_config: bool) -> dict[str, Any]:
    view = read_text(case["text"], config=case["config"] if with_config else None)
    answer = as_json(diagnose(view, RULES), view)
    alarms = [finding for finding in answer["findings"] if finding["level"] != "info"]
    expected = case["expected"]
    names = {expected["cause"], *case["alternatives_ok"]}
    said = [[found["name"], *(c["name"] for c in found["causes"][:2])] for found in alarms[:2]]
    if expected["healthy"] or expected["cause"] == "unknown":
        verdict = "wrong" if alarms else "right"
    elif not alarms:
        verdict = "unknown"
    elif names & set(said[0]):
        verdict = "right"
    else:
        verdict = "half" if len(said) > 1 and names & set(said[1]) else "wrong"
    is_ill = not expected["healthy"] and bool(alarms)
    return {
        "id": case["id"],
        "verdict": verdict,
        "wanted": "healthy" if expected["healthy"] else expected["cause"],
        "said": said,
        "family_right": alarms[0]["family"] == expected["family"] if is_ill else None,
    }


if __name__ == "__main__":
    main()
