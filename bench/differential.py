"""Fit the table of illnesses on rounds of the clinic, and measure it on what was not fitted.

    python bench/differential.py --gather REPORT.json...   add rounds of `homeostat clinic`
    python bench/differential.py --fit --name differential
    python bench/differential.py --reports REPORT.json...  judge rounds that were not fitted
    python bench/differential.py --runs FOLDER... [--cases CASES.jsonl] [--threads]

bench/differential/rounds.jsonl holds what the doctor found in every ill run of each round: another
seed, so other doses, onsets and data. `--fit` chooses the weights by leaving out one round after
the other, writes src/homeostat/health/differential/illnesses.json from all of them, and reports

    right         the most likely illness is the one that was made (the first name of its fault),
                  in the round that was left out, beside the name of the doctor's first finding
    ECE           expected calibration error of that illness' probability, in ten bins
    struck out    the same with the run's own illness missing from the table

`--reports` (of `homeostat clinic --format json`), `--runs` (folders that `homeostat clinic --out`
wrote), `--cases` (see bench/doctor_cases.py) and `--threads` (the open half) measure the written
table and the first cause of the doctor's first finding on other readings; of a report it is the
finding's own name. `--name` writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np

from homeostat.cli.threads import Half, load
from homeostat.clinic.catalogue import INJECTORS
from homeostat.health.diagnose import diagnose
from homeostat.health.differential.illnesses import FILE, Form, Table, Weights, table_of
from homeostat.health.differential.posterior import illness_posterior, is_covered
from homeostat.health.differential.signs import Signs, signs_of
from homeostat.health.finding import Level
from homeostat.health.readers import open_run, read_text
from homeostat.health.registry import RULES
from homeostat.health.view import RunView

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = ROOT / "bench" / "differential" / "rounds.jsonl"
CODES = frozenset(rule.code for rule in RULES)
BINS = 10
GRID = {
    "smoothing": (0.25, 0.5, 1.0, 2.0),
    "sharpness": (0.75, 1.0, 1.25, 1.5),
    "lead": (0.0, 0.5, 1.0),
    "other": (0.02, 0.05, 0.1),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of one ill run. `first` are names: of the first finding, then of its causes."""

    round: int
    fault: str
    names: tuple[str, ...]
    signs: Signs
    first: tuple[str, ...] = ()

    @property
    def illness(self) -> str:
        return self.names[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gather", type=Path, nargs="*", default=[], metavar="REPORT")
    parser.add_argument("--fit", action="store_true", help="write illnesses.json")
    parser.add_argument("--reports", type=Path, nargs="*", default=[], metavar="REPORT")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--threads", action="store_true", help="the open half of bench/threads")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    for report in chosen.gather:
        gather(report)
    result: dict[str, Any] = {}
    if chosen.fit:
        result["rounds_left_out"] = fit(list(from_rounds()))
    table = table_of(json.loads(FILE.read_text(encoding="utf-8")))
    result |= {"weights": _weights(table.weights), "made_on": dict(table.made_on)}
    if chosen.reports:
        rows = [row for report in chosen.reports for row in rows_of(report)]
        result["reports"] = on_readings(list(from_rows(rows)), table)
    if chosen.runs:
        result["runs"] = on_readings(list(from_runs(chosen.runs)), table)
    if chosen.cases is not None:
        result["cases"] = on_readings(list(from_cases(chosen.cases)), table)
    if chosen.threads:
        result["threads"] = on_readings(list(from_threads()), table)
    print(json.dumps(result, indent=1))
    if chosen.name:
        common.write_result(chosen.name, {**common.machine(("numpy",)), **result})


def rows_of(report: Path) -> Iterator[dict[str, Any]]:
    """Yield what was found in every ill run of a round."""
    for one in json.loads(report.read_text(encoding="utf-8"))["faults"]:
        found = [one["first"]] if one["first"] else []
        found += [other for other in one["others"] if other not in found]
        row = {"round": one["seed"], "fault": one["name"], "names": one["expects"]}
        yield row | {"found": found}


def gather(report: Path) -> None:
    """Add the ill runs of a round to the material, unless its seed is there."""
    known = {one.round for one in from_rounds()} if ROUNDS.exists() else set()
    with open(ROUNDS, "a", encoding="utf-8") as out:
        for row in rows_of(report):
            if row["round"] not in known:
                out.write(json.dumps(row) + "\n")


def from_rounds() -> Iterator[Reading]:
    """Yield the runs of all rounds."""
    return from_rows(map(json.loads, ROUNDS.read_text(encoding="utf-8").splitlines()))


def from_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Reading]:
    """Yield the runs of rounds. In a run of ours every rule is judged."""
    for row in rows:
        codes = [text.split()[0] for text in row["found"]]
        signs = Signs(frozenset(codes), codes[0] if codes else "", CODES | frozenset(codes))
        first = tuple(text.split()[1] for text in row["found"][:1])
        yield Reading(row["round"], row["fault"], tuple(row["names"]), signs, first)


def from_runs(folders: Iterable[Path]) -> Iterator[Reading]:
    """Yield the ill runs in folders that the clinic wrote, as the doctor reads them now."""
    for run in sorted(run for folder in folders for run in folder.glob("ill/*/runs/run")):
        name, _, seed = run.parents[1].name.rpartition("_")
        if name in INJECTORS:
            yield _read(open_run(run), INJECTORS[name].expects, fault=name, round=int(seed))


def from_cases(file: Path) -> Iterator[Reading]:
    """Yield the cases that are ill and have a known cause."""
    for case in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        wanted = case["expected"]
        if not wanted["healthy"] and wanted["cause"] != "unknown":
            names = (wanted["cause"], *case["alternatives_ok"])
            yield _read(read_text(case["text"], config=case["config"]), names, fault=case["id"])


def from_threads() -> Iterator[Reading]:
    for case in load(ROOT, Half.OPEN):
        yield _read(read_text(case.log, config=None), tuple(case.names), fault=case.url)


def _read(view: RunView, names: tuple[str, ...], *, fault: str, round: int = 0) -> Reading:
    diagnosis = diagnose(view, RULES)
    ill = [one for one in diagnosis.findings if one.level is not Level.INFO]
    said = [cause.name for cause in ill[0].causes] if ill else []
    first = (ill[0].name, *said) if ill else ()
    return Reading(round, fault, names, signs_of(ill, clear=diagnosis.clear), first)


def forms_of(readings: Sequence[Reading]) -> dict[str, Form]:
    """Count the signs of every form of illness."""
    forms = {}
    for fault in sorted({one.fault for one in readings}):
        own = [one for one in readings if one.fault == fault]
        forms[fault] = Form(
            names=own[-1].names,
            num_runs=len(own),
            present=dict(sorted(Counter(s for one in own for s in one.signs.present).items())),
            leads=dict(sorted(Counter(one.signs.lead for one in own if one.signs.lead).items())),
        )
    return forms


def fit(readings: Sequence[Reading]) -> dict[str, Any]:
    """Choose the weights, write the table, and return how well it does on the rounds left out."""
    rounds = sorted({one.round for one in readings})
    folds = [
        (
            forms_of([one for one in readings if one.round != left_out]),
            [one for one in readings if one.round == left_out and one.signs.present],
        )
        for left_out in rounds
    ]
    options = [Weights(*values) for values in itertools.product(*GRID.values())]
    best = min(options, key=lambda weights: surprise(folds, weights))
    table = Table(forms_of(readings), best, {"rounds": rounds, "runs": len(readings)})
    FILE.write_text(json.dumps(_raw(table), separators=(",", ":")) + "\n", encoding="utf-8")
    return left_out_rounds(folds, best, rounds=rounds)


Folds = Sequence[tuple[dict[str, Form], list[Reading]]]


def surprise(folds: Folds, weights: Weights) -> float:
    """Return the sum of -log P(the illness) over the readings that were left out.

    An illness of which no other round has a run counts as another illness.
    """
    total = 0.0
    for forms, left_out in folds:
        table = Table(forms, weights, {})
        for one in left_out:
            shares = illness_posterior(one.signs, table)
            share = shares.get(one.illness)
            total -= math.log(share if share is not None else shares["another illness"])
    return total


def left_out_rounds(folds: Folds, weights: Weights, *, rounds: Sequence[int]) -> dict[str, Any]:
    """Return accuracy and calibration over all rounds, each judged by a table without it."""
    said: list[tuple[float, bool]] = []
    unknown: list[tuple[float, bool]] = []
    names: list[bool] = []
    by_round = {}
    for number, (forms, left_out) in zip(rounds, folds, strict=True):
        table = Table(forms, weights, {})
        own = [_most_likely(one, table) for one in left_out]
        unknown += [_most_likely(one, _struck_out(one, table)) for one in left_out]
        names += [one.first[0] == one.illness for one in left_out]
        by_round[str(number)] = {"runs": len(own), "right": _share(hit for _, hit in own)}
        said += own
    return {
        "by_round": by_round,
        "runs": len(said),
        "right": _share(hit for _, hit in said),
        "name_of_first_finding_right": _share(names),
        "ece": ece(said),
        "bins": bins(said),
        "struck_out": {"bins": bins(unknown)},
    }


def on_readings(readings: Sequence[Reading], table: Table) -> dict[str, Any]:
    """Return how well the written table does beside the doctor's first cause."""
    found = [one for one in readings if one.signs.present]
    covered = [one for one in found if is_covered(one.signs, table)]
    said = [_most_likely(one, table) for one in covered]
    return {
        "readings": len(readings),
        "with_findings": len(found),
        "covered": len(covered),
        "right": _share(hit for _, hit in said),
        "first_cause_right": _share(one.first[min(1, len(one.first) - 1)] == one.illness
                                    for one in covered),
        "ece": ece(said),
        "bins": bins(said),
    }  # fmt: skip


def _most_likely(one: Reading, table: Table) -> tuple[float, bool]:
    name, share = next(iter(illness_posterior(one.signs, table).items()))
    return share, name == one.illness


def _struck_out(one: Reading, table: Table) -> Table:
    """Return the table without the forms for which the reading's illness is a right answer."""
    own = {*one.names}
    left = {name: form for name, form in table.forms.items() if own.isdisjoint(form.names)}
    return replace(table, forms=left)


def bins(pairs: Sequence[tuple[float, bool]]) -> list[dict[str, float]]:
    """Return the reliability table: how often it was right, by the probability that was said."""
    places = [min(BINS - 1, int(share * BINS)) for share, _ in pairs]
    found = []
    for place in sorted(set(places)):
        own = [pair for pair, at in zip(pairs, places, strict=True) if at == place]
        said, right = (float(np.mean(column)) for column in zip(*own, strict=True))
        found.append({"said": round(said, 3), "right": round(right, 3), "num": len(own)})
    return found


def ece(pairs: Sequence[tuple[float, bool]]) -> float | None:
    gaps = [abs(row["said"] - row["right"]) * row["num"] for row in bins(pairs)]
    return round(sum(gaps) / len(pairs), 4) if pairs else None


def _share(hits: Iterable[bool]) -> float | None:
    found = list(hits)
    return round(sum(found) / len(found), 4) if found else None


def _weights(weights: Weights) -> dict[str, float]:
    return {name: getattr(weights, name) for name in GRID}


def _raw(table: Table) -> dict[str, Any]:
    return {
        "made_on": dict(table.made_on),
        "weights": _weights(table.weights),
        "forms": {
            name: {"names": list(form.names), "runs": form.num_runs,
                   "present": dict(form.present), "leads": dict(form.leads)}
            for name, form in table.forms.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
