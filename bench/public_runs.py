"""The doctor against metric logs in public repositories: false alarms and missed illnesses.

    python bench/public_runs.py FOLDER [--name NAME]

`bench/threads/runs.jsonl` lists the logs: repository, path, a label and the reason for it. The logs
themselves are not part of this repository; FOLDER holds those that you have, each as
FOLDER/<owner>/<name>/<path>. Others are skipped and counted.

    healthy   right if the doctor has no finding of level warn or error
    ill       right if one of its findings of that level has one of the label's names
    unclear   too little is logged to judge; counted as an alarm if the doctor calls it ill
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import common

from homeostat.health.diagnose import diagnose
from homeostat.health.readers import RunPlace, open_run
from homeostat.health.registry import RULES
from homeostat.health.render import as_json

LIST = Path(__file__).resolve().parent / "threads" / "runs.jsonl"
ALARMS = ("false alarm", "false error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    here = [row for row in rows if file_of(chosen.folder, row).is_file()]
    judged = [{**row, **judge(file_of(chosen.folder, row), row)} for row in here]
    for one in judged:
        if one["verdict"] != "right":
            print(f"{one['verdict']:12} {one['repository']} {one['path']}: {one['said']}")
    counts = Counter(f"{one['label']}: {one['verdict']}" for one in judged)
    for kind, number in sorted(counts.items()):
        print(f"{kind:24} {number:>4}")
    print(f"{len(rows) - len(here)} of {len(rows)} logs are not in {chosen.folder}.")
    if chosen.name:
        wrong = [one for one in judged if one["verdict"] != "right"]
        found = {"logs": len(here), "counts": dict(counts), "not_right": wrong}
        common.write_result(chosen.name, {**common.machine(("numpy",)), **found})


def file_of(folder: Path, row: dict[str, Any]) -> Path:
    return folder / row["repository"] / row["path"]


def judge(file: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Let the doctor read a log, and compare what it says with the label."""
    view = open_run(RunPlace(file), config=None)
    answer = as_json(diagnose(view, RULES), view)
    alarms = [one for one in answer["findings"] if one["level"] != "info"]
    said = [one["name"] for one in alarms]
    is_error = any(one["level"] == "error" for one in alarms)
    if row["label"] == "ill":
        verdict = "right" if set(said) & set(row["names"]) else "other" if said else "missed"
    elif row["label"] == "healthy":
        verdict = ALARMS[is_error] if said else "right"
    else:
        verdict = "false error" if is_error else "right"
    return {"verdict": verdict, "said": said}


if __name__ == "__main__":
    main()
