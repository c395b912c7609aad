"""A round of the clinic: which runs, in which order, and the verdict on each.

    base policies -> healthy runs, ill runs, ill runs with remedies -> verdicts

A fault that a remedy should cure is run twice with the same dose: once with health.heal off, which
shows how well it is noticed, and once with what its cure needs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from homeostat.clinic.catalogue import HEALTHY, INJECTORS, SHORT
from homeostat.clinic.injector import Cure
from homeostat.clinic.job import Job, Kind
from homeostat.clinic.recipes import Base
from homeostat.clinic.verdict import Verdict, judge_cure, judge_healthy, judge_ill
from homeostat.clinic.ward import Ended, run_all
from homeostat.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs that are requested.

    `seeds` is the number of doses of each fault, and of seeds of each healthy run, counted from
    `first_seed`.
    """

    healthy: tuple[str, ...]
    faults: tuple[str, ...]
    seeds: int
    at_a_time: int
    folder: Path
    with_cures: bool = True
    first_seed: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """The verdicts of a round."""

    healthy: tuple[Verdict, ...]
    faults: tuple[Verdict, ...]
    seconds: float


def chosen(select: Iterable[str], *, short: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of healthy runs and of faults. Raises for a name that is neither."""
    names = list(select) or (list(SHORT) if short else [*HEALTHY, *INJECTORS])
    unknown = [name for name in names if name not in HEALTHY and name not in INJECTORS]
    if unknown:
        known = ", ".join([*HEALTHY, *INJECTORS])
        raise ConfigError(
            [Problem("--select", f"there is no run or fault {unknown[0]!r}.", f"Known: {known}.")]
        )
    return tuple(n for n in names if n in HEALTHY), tuple(n for n in names if n in INJECTORS)


def hold(plan: Plan, *, tell: Callable[[Ended], None]) -> Report:
    """Run the whole plan. `tell` is called whenever a run has ended."""
    started = time.perf_counter()
    run_all(_bases(plan), at_a_time=plan.at_a_time, tell=tell)
    healthy, ill, healed = _jobs(plan)
    # Start the longest first, so that none of them runs alone at the end.
    jobs = sorted(healthy + ill + healed, key=lambda job: -job.deadline_s)
    ended = run_all(jobs, at_a_time=plan.at_a_time, tell=tell)
    cures = {(job.name, job.seed): ended[job] for job in healed}
    return Report(
        healthy=tuple(judge_healthy(ended[job]) for job in healthy),
        faults=tuple(_judged(ended[job], cures.get((job.name, job.seed))) for job in ill),
        seconds=round(time.perf_counter() - started, 1),
    )


def _judged(ended: Ended, healed: Ended | None) -> Verdict:
    fault = INJECTORS[ended.job.name]
    dose = fault.dosed(ended.job.seed)
    verdict = judge_ill(ended, fault, dose)
    if healed is None:
        return verdict
    cured, notes = judge_cure(healed, ended, fault, dose)
    return dataclasses.replace(verdict, cured=cured, cure_notes=notes)


def _bases(plan: Plan) -> list[Job]:
    """Return jobs for the base policies that are needed and missing."""
    some = [HEALTHY[name] for name in plan.healthy]
    some += [INJECTORS[name].body for name in plan.faults]
    needed: dict[str, Base] = {body.base.name: body.base for body in some if body.base is not None}
    folder = plan.folder / "bases"
    return [
        Job(Kind.BASE, name, 0, str(folder / name), str(folder), base=base)
        for name, base in needed.items()
        if not base.weights(folder).is_dir()
    ]


def _jobs(plan: Plan) -> tuple[list[Job], list[Job], list[Job]]:
    healthy, ill, healed = [], [], []
    bases = str(plan.folder / "bases")
    for seed in range(plan.first_seed, plan.first_seed + plan.seeds):
        for name in plan.healthy:
            folder = plan.folder / "healthy" / f"{name}_{seed}"
            healthy.append(Job(Kind.HEALTHY, name, seed, str(folder), bases, heal="safe"))
        for name in plan.faults:
            fault = INJECTORS[name]
            folder = plan.folder / "ill" / f"{name}_{seed}"
            job = Job(Kind.ILL, name, seed, str(folder), bases, deadline_s=fault.deadline_s)
            ill.append(job)
            if plan.with_cures and fault.cure is not Cure.NONE:
                own = {"folder": f"{folder}_{fault.cure}", "heal": str(fault.cure)}
                healed.append(dataclasses.replace(job, **own))
    return healthy, ill, healed
