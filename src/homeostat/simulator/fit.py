"""Fit the rates of a machine to a few measured steps.

A stage's seconds are linear in the rates, and two configurations cannot determine all of them. So
the fit keeps as close as it can to the rates that it starts from (the machine's file, in relative
terms) while it explains what was measured, in relative errors, too:

    minimise  sum over stages ((predicted - measured) / measured)^2
              + pull * sum over rates (d_r / uncertainty_r)^2
    where     rate = start * (1 + d_r) is at least a hundredth of where it started

A rate that a benchmark measured on its own has a small uncertainty in the machine's file; the cost
of Python around it, which differs from host to host, has 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from homeostat.simulator.layout import Layout
from homeostat.simulator.loop import StepSeconds, start
from homeostat.simulator.machine import Machine
from homeostat.simulator.publication import published_bytes
from homeostat.simulator.rates import RATE_NAMES, Rates, Work, added
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.training import step_work
from homeostat.simulator.workload import Workload

STAGES = ("generate", "reward", "score", "train", "publish", "other")
_PULL = 0.003
_LEAST = 0.01


@dataclass(frozen=True, slots=True)
class Measured:
    """A configuration on one device, and the seconds of its stages."""

    name: str
    shape: ModelShape
    workload: Workload
    seconds: Mapping[str, float]
    max_concurrency: int = 256
    # Whether weights are sent to an engine in a process of its own.
    sends_weights: bool = False


def fit(machine: Machine, measured: Sequence[Measured], *, pull: float = _PULL) -> Machine:
    """Return the machine with rates that explain the measured configurations."""
    rows: list[tuple[Work, float]] = []
    for case in measured:
        works = stage_work(case, machine)
        rows += [
            (works[stage], case.seconds[stage])
            for stage in STAGES
            if case.seconds.get(stage, 0.0) > 0 and works[stage]
        ]
    sure = dict(machine.uncertainty)
    pulls = {name: pull / sure.get(name, 1.0) ** 2 for name in RATE_NAMES}
    return replace(machine, rates=_solve(machine.rates, rows, pulls=pulls))


def stage_work(case: Measured, machine: Machine) -> dict[str, dict[str, float]]:
    """Return the units of work of each stage of a synchronous step on one device."""
    layout = Layout(trainer_gpus=1, engine_gpus=1)
    shape, workload = case.shape, case.workload
    run = start(shape, workload, layout, machine, max_concurrency=case.max_concurrency)
    for engine in run.engines:
        engine.work = {}
    run.admit(0, 0.0)
    run.run(batch=0)
    score, train = step_work(shape, workload, layout)
    waves = _reward_waves(case, run.batches[0].ready > run.batches[0].last_completion)
    sent = published_bytes(shape, workload, dtype_bytes=machine.dtype_bytes)
    publish = {"publication": 1.0, "publish_byte": sent} if case.sends_weights else {}
    return {
        "generate": added(*(engine.work or {} for engine in run.engines)),
        "reward": waves,
        "score": score if workload.scored else {},
        "train": train,
        "publish": publish,
        "other": {"step": 1.0, "row": float(workload.rows)},
    }


def _reward_waves(case: Measured, waited: bool) -> dict[str, float]:
    """Return the calls that are still to be made, one after the other, after the last completion.

    Only of completions of equal lengths, whose groups all end together, and of rewards that cost
    nothing but the call: then the number of calls does not depend on the rates.
    """
    workload = case.workload
    if not waited or workload.lengths.spread or workload.reward_s:
        return {}
    together = min(workload.prompts, max(1, case.max_concurrency // workload.samples))
    calls = -(-together // workload.reward_workers)
    return {
        "reward_call": float(calls),
        "answer_token": calls * workload.samples * workload.lengths.mean,
    }


def _solve(
    rates: Rates, rows: Sequence[tuple[Work, float]], *, pulls: Mapping[str, float]
) -> Rates:
    """Solve the normal equations; rates that would fall below the least are held there."""
    begin = rates.as_dict()
    names = sorted({name for work, _ in rows for name in work if begin[name] > 0})
    held: dict[str, float] = {}
    while True:
        free = [name for name in names if name not in held]
        found = _changes(begin, free, held, rows, pulls=pulls)
        low = {name for name in free if found[name] < _LEAST - 1}
        if not low:
            values = {name: begin[name] * (1 + d) for name, d in {**held, **found}.items()}
            return replace(rates, **values)
        held |= dict.fromkeys(low, _LEAST - 1)


def _changes(
    begin: Mapping[str, float],
    free: Sequence[str],
    held: Mapping[str, float],
    rows: Sequence[tuple[Work, float]],
    *,
    pulls: Mapping[str, float],
) -> dict[str, float]:
    size = len(free)
    matrix = [[pulls[free[i]] * (i == j) for j in range(size)] for i in range(size)]
    right = [0.0] * size
    for work, seconds in rows:
        shares = [begin[name] * work.get(name, 0.0) / seconds for name in free]
        fixed = sum(
            begin[name] * units * (1 + held.get(name, 0.0)) / seconds
            for name, units in work.items()
        )
        for i in range(size):
            right[i] += shares[i] * (1 - fixed)
            for j in range(size):
                matrix[i][j] += shares[i] * shares[j]
    return dict(zip(free, _solved(matrix, right), strict=True))


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is positive definite because of the pull."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found


def predicted(step: StepSeconds) -> dict[str, float]:
    """Return the stages of a simulated step by the names of the measured ones."""
    stages = {
        "generate": step.generate_s,
        "reward": step.reward_s,
        "score": step.score_s,
        "train": step.train_s,
        "publish": step.publish_s,
        "other": step.other_s,
    }
    return stages | {"step": step.step_s}
