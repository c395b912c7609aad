"""The doctor against metric logs in public repositories: false alarms and missed illnesses.

    python bench/public_runs.py FOLDER [--half open|sealed|both] [--name NAME]

`bench/threads/runs.jsonl` lists the logs: repository, path, checksum, a label and the reason for
it. The logs themselves are not part of this repository; FOLDER holds those that you have, each as
FOLDER/<owner>/<name>/<path>. Others are skipped and counted, and so are files whose checksum is
another than the listed one.

    healthy   right if the doctor has no finding of level warn or error
    ill       right if one of its findings of that level has one of the label's names, noted if
              only a finding of level info has
    unclear   too little is logged to judge; counted as an alarm if the doctor calls it ill

A log's half follows from a hash of its repository, so nobody chooses it; logs whose results were
printed before there were halves (`seen`) are open. For the sealed half only counts are printed.
Shares come with 95 % Wilson intervals.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
from threads import wilson

from homeostat.cli.threads import Half
from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import RunPlace, open_run
from homeostat.health.registry import RULES

LIST = Path(__file__).resolve().parent / "threads" / "runs.jsonl"
LONG_AGO_S = 86_400.0
ALARMS = ("false alarm", "false error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=("open", "sealed", "both"), default="open")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    halves = list(Half) if chosen.half == "both" else [Half(chosen.half)]
    rows = [json.loads(line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {}
    for half in halves:
        own = [row for row in rows if half_of(row) is half]
        here = [row for row in own if is_listed_file(file_of(chosen.folder, row), row)]
        judged = [{**row, **judge(file_of(chosen.folder, row), row)} for row in here]
        found[half.value] = show(half, judged)
        print(f"{len(own) - len(here)} of {len(own)} logs are not in {chosen.folder} as listed.")
    if chosen.name:
        common.write_result(chosen.name, {**common.machine(("numpy",)), **found})


def half_of(row: dict[str, Any]) -> Half:
    """Return the half that the repository gives."""
    digest = hashlib.sha256(row["repository"].lower().encode()).digest()
    return Half.SEALED if digest[0] % 2 and not row["seen"] else Half.OPEN


def file_of(folder: Path, row: dict[str, Any]) -> Path:
    return folder / row["repository"] / row["path"]


def is_listed_file(file: Path, row: dict[str, Any]) -> bool:
    """Tell whether a file is there and is the one that was labelled."""
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == row["sha256"]


def judge(file: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Let the doctor read a log, and compare what it says with the label."""
    view = open_run(RunPlace(file), config=None)
    if "quiet_s" in view.facts:
        # The age of a file here is that of its download.
        view = replace(view, facts={**view.facts, "quiet_s": LONG_AGO_S})
    answer = as_json(diagnose(view, RULES), view)
    alarms = [one for one in answer["findings"] if one["level"] != "info"]
    said = [one["name"] for one in alarms]
    is_error = any(one["level"] == "error" for one in alarms)
    if row["label"] == "ill":
        noted = {one["name"] for one in answer["findings"] if one["level"] == "info"}
        verdict = "other" if said else "missed"
        verdict = "noted" if noted & set(row["names"]) else verdict
        verdict = "right" if set(said) & set(row["names"]) else verdict
    elif row["label"] == "healthy":
        verdict = ALARMS[is_error] if said else "right"
    else:
        verdict = "false error" if is_error else "right"
    return {"verdict": verdict, "said": said}


def show(half: Half, judged: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Print a half's counts, for the open half each log that is not right, and return both."""
    judged = list(judged)
    wrong = [one for one in judged if one["verdict"] != "right" and half is Half.OPEN]
    for one in wrong:
        print(f"{one['verdict']:12} {one['repository']} {one['path']}: {one['said']}")
    counts = Counter(f"{one['label']}: {one['verdict']}" for one in judged)
    totals = Counter(one["label"] for one in judged)
    print(f"\n{half.value}: {len(judged)} logs")
    for kind, number in sorted(counts.items()):
        total = totals[kind.split(":")[0]]
        low, high = wilson(number, total)
        print(f"{kind:24} {number:>4} of {total:>3}  {low:.0%} to {high:.0%}")
    by_illness: dict[str, Counter[str]] = {}
    for one in judged:
        if one["label"] == "ill":
            by_illness.setdefault(one["names"][0], Counter())[one["verdict"]] += 1
    for name, verdicts in sorted(by_illness.items()):
        print(f"    {name:32} " + ", ".join(f"{verdicts[v]} {v}" for v in sorted(verdicts)))
    return {
        "logs": len(judged),
        "counts": dict(counts),
        "by_illness": {name: dict(verdicts) for name, verdicts in by_illness.items()},
        "not_right": wrong,
    }


if __name__ == "__main__":
    main()
