"""Judge one run: was the fault noticed, by which finding first, how late, and was it cured?

noticed       a finding of level warn or above is about the fault: its name, or one of its first two
              causes, is one that the injector expects. Either live (findings.jsonl), at or after
              the onset, or by the doctor on the finished run directory
right first   the doctor's first finding on the run directory is about the fault. If it has none
              any more (the fault passed), the first that opened live at or after the onset counts
steps late    from the onset to the step at which a right finding opened live; if the run died
              before that, to its last step
false alarm   a finding of level warn or above that opened before the onset, or in a healthy run,
              or that the doctor has of a healthy run. If the fault makes the run go back to a step
              before the onset, a finding about the fault there is right
cured         a second run, the same except for health.heal, ends by itself, no right finding is
              open at its end, and the fault's vital metric has recovered
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from homeostat.clinic.injector import Dose, Injector
from homeostat.clinic.ward import Ended
from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Finding, Level
from homeostat.health.readers import open_run
from homeostat.health.records import State, from_json
from homeostat.health.registry import RULES
from homeostat.observe.jsonl import iter_jsonl, read_metrics

# Number of records over which a vital metric is averaged, before the onset and at the end.
NUM_VITAL = 5


@dataclass(frozen=True, slots=True)
class Opened:
    """A finding, and the step at which it was reported."""

    step: int
    finding: Finding
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """The findings of a run of level warn or above, live and afterwards."""

    live: tuple[Opened, ...]
    after: tuple[Finding, ...]
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One line of the report.

    `others` are findings after the onset that are not about the fault.
    """

    name: str
    seed: int
    ended: str
    seconds: float
    first: str = ""
    false_alarms: tuple[str, ...] = ()
    # Only for faults.
    family: str = ""
    expects: tuple[str, ...] = ()
    onset: int = 0
    strength: float = 0.0
    noticed: bool = False
    right_first: bool = False
    steps_late: int | None = None
    others: tuple[str, ...] = ()
    cure: str = ""
    cured: bool | None = None
    cure_notes: tuple[str, ...] = field(default=())


def read_chart(run_dir: Path) -> Chart:
    """Read the findings of a run; a run that never began has none."""
    if not run_dir.is_dir():
        return Chart((), (), 0)
    live = []
    file = run_dir / "findings.jsonl"
    for record in iter_jsonl(file) if file.exists() else ():
        opened = Opened(record["step"], from_json(record), record["state"] == State.CLEARED)
        live.append(opened)
    view = open_run(run_dir)
    after = [f for f in diagnose(view, RULES).findings if _counts(f)]
    return Chart(tuple(o for o in live if _counts(o.finding)), tuple(after), view.last_step or 0)


def judge_healthy(ended: Ended) -> Verdict:
    chart = read_chart(ended.job.run_dir)
    live = [f"{one.finding.code} {one.finding.name} @{one.step}" for one in _opened(chart)]
    after = [f"{finding.code} {finding.name}" for finding in chart.after]
    return Verdict(
        name=ended.job.name,
        seed=ended.job.seed,
        ended=ended.how,
        seconds=ended.seconds,
        false_alarms=tuple(live + after),
    )


def judge_ill(ended: Ended, fault: type[Injector], dose: Dose) -> Verdict:
    chart = read_chart(ended.job.run_dir)
    since = [one for one in _opened(chart) if not _is_early(one, fault, dose)]
    right = [one for one in since if is_about(one.finding, fault)]
    first = next(iter(chart.after), None) or (since[0].finding if since else None)
    noticed = bool(right) or any(is_about(finding, fault) for finding in chart.after)
    known_at = right[0].step if right else chart.last_step
    others = [one.finding for one in since] + list(chart.after)
    return Verdict(
        name=fault.name,
        seed=dose.seed,
        ended=ended.how,
        seconds=ended.seconds,
        first=f"{first.code} {first.name}" if first is not None else "",
        false_alarms=tuple(
            f"{one.finding.code} {one.finding.name} @{one.step}"
            for one in _opened(chart)
            if _is_early(one, fault, dose)
        ),
        family=str(fault.family),
        expects=fault.expects,
        onset=dose.onset,
        strength=round(dose.strength, 6),
        noticed=noticed,
        right_first=first is not None and is_about(first, fault),
        steps_late=max(0, known_at - dose.onset) if noticed else None,
        others=tuple(sorted({f"{f.code} {f.name}" for f in others if not is_about(f, fault)})),
        cure=str(fault.cure),
    )


def _is_early(one: Opened, fault: type[Injector], dose: Dose) -> bool:
    """Return whether a finding opened before the fault could cause it."""
    return one.step < dose.onset and not (fault.goes_back and is_about(one.finding, fault))


def is_about(finding: Finding, fault: type[Injector]) -> bool:
    """Return whether a finding is about the fault, by its name or one of its first two causes."""
    return bool({finding.name, *(cause.name for cause in finding.causes[:2])} & {*fault.expects})


def judge_cure(
    healed: Ended, ill: Ended, fault: type[Injector], dose: Dose
) -> tuple[bool, tuple[str, ...]]:
    """Return whether the fault was cured, and the objections."""
    notes = []
    if healed.exit_code != 0:
        notes.append(f"the run ended by {healed.how}")
    if not fault.stays:
        open_now = _open_at_end(read_chart(healed.job.run_dir))
        notes += [f"{f.code} {f.name} is open" for f in open_now if is_about(f, fault)]
    if fault.vital and (note := _vital(healed, ill, fault, dose)):
        notes.append(note)
    return not notes, tuple(notes)


def _vital(healed: Ended, ill: Ended, fault: type[Injector], dose: Dose) -> str:
    """Return why the vital metric did not recover.

    It must return to its value before the onset or, in a run that was ill from the start, move away
    from where the ill run ended; if a fault `learns`, from its own first value.
    """
    values = _series(healed.job.run_dir, fault.vital)
    if len(values) < 2 * NUM_VITAL:
        return f"{fault.vital} has {len(values)} records"
    if fault.learns:
        # A skipped step has no loss.
        sound = [value for value in values.values() if math.isfinite(value)]
        first, now = _mean(sound[:NUM_VITAL]), _mean(sound[-NUM_VITAL:])
        good = now < fault.vital_share * first if fault.vital_is_loss() else now > first
        return "" if good else f"{fault.vital} is {now:.3g}, began at {first:.3g}"
    now = _mean(list(values.values())[-NUM_VITAL:])
    before = [value for step, value in values.items() if step < dose.onset][-NUM_VITAL:]
    if before:
        goal = fault.vital_share * _mean(before)
        good = now <= _mean(before) / fault.vital_share if fault.vital_is_loss() else now >= goal
        return "" if good else f"{fault.vital} is {now:.3g}, was {_mean(before):.3g}"
    left = list(_series(ill.job.run_dir, fault.vital).values())[-NUM_VITAL:]
    worst = _mean(left)
    better = now < fault.vital_share * worst if fault.vital_is_loss() else now > worst
    return "" if better or math.isnan(worst) else f"{fault.vital} is {now:.3g}, ill {worst:.3g}"


def _series(run_dir: Path, name: str) -> dict[int, float]:
    file = run_dir / "metrics.jsonl"
    records = read_metrics(file) if file.exists() else ()
    return {int(record["step"]): float(record[name]) for record in records if name in record}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else math.nan


def _counts(finding: Finding) -> bool:
    return finding.level is not Level.INFO


def _opened(chart: Chart) -> list[Opened]:
    return [one for one in chart.live if not one.is_over]


def _open_at_end(chart: Chart) -> list[Finding]:
    found: dict[tuple[str, str], Finding] = {}
    for one in chart.live:
        if one.is_over:
            found.pop(one.finding.key, None)
        else:
            found[one.finding.key] = one.finding
    return list(found.values())
