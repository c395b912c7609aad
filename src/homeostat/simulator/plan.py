"""A plan: the fastest split of so many GPUs, what binds it, and what would help next.

What binds first is found by trying: the same split is simulated with twice as much of each
resource, and the one whose doubling shortens a step most is named first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from homeostat.errors import PlanError
from homeostat.simulator.layout import Layout
from homeostat.simulator.machine import Machine
from homeostat.simulator.search import (
    Candidate,
    Job,
    best_candidate,
    rough_candidate,
    rough_step,
)
from homeostat.simulator.workload import Lengths, Workload

# A change below this share of a step is not worth a line.
_LEAST_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class Gain:
    """A change, and the step that it would give."""

    name: str
    step_s: float
    saved: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The best split of `gpus` GPUs."""

    job: Job
    gpus: int
    best: Candidate
    # By the share of a step that twice as much would save, the largest first.
    binds: tuple[Gain, ...]
    # Settings, likewise.
    helps: tuple[Gain, ...]

    @property
    def first(self) -> str:
        """Name of what binds first."""
        if self.best.layout.offload_optimizer:
            return "memory"
        return self.binds[0].name if self.binds else "nothing"

    def as_json(self) -> dict[str, Any]:
        """Return the plan for programs."""
        job, layout, memory = self.job, self.best.layout, self.best.memory
        return {
            "model": job.shape.name,
            "params": job.shape.num_params,
            "active_params": job.shape.active_params,
            "machine": job.machine.name,
            "gpus": self.gpus,
            "sources": dict(job.machine.sources),
            "workload": asdict(job.workload),
            "split": layout.settings(),
            "memory_bytes": {
                **asdict(memory),
                "training": memory.training,
                "sampling": memory.sampling,
                "peak": memory.peak,
                "capacity": job.machine.memory_bytes,
            },
            "step": self.best.step.as_dict(),
            "tokens_per_s_per_gpu": self.best.step.tokens_per_s / self.gpus,
            "binds_first": self.first,
            "binds": [asdict(gain) for gain in self.binds],
            "helps": [asdict(gain) for gain in self.helps],
        }


def make_plan(job: Job, gpus: int, *, max_staleness: int = 0) -> Plan:
    """Search for the best split, and try what would change it. Raises PlanError if none fits."""
    best = best_candidate(job, gpus, max_staleness=max_staleness)
    return Plan(
        job,
        gpus,
        best,
        tuple(_largest(_bindings(job, best.layout))),
        tuple(_largest(_helping(job, gpus, best, max_staleness=max_staleness))),
    )


def _largest(gains: Iterator[Gain]) -> list[Gain]:
    worth = [gain for gain in gains if gain.saved >= _LEAST_GAIN]
    return sorted(worth, key=lambda gain: -gain.saved)


def _faster(*names: str) -> Callable[[Job], Job]:
    """Return the change that halves these rates' seconds."""

    def change(job: Job) -> Job:
        halved = {name: getattr(job.machine.rates, name) / 2 for name in names}
        return _on(job, rates=replace(job.machine.rates, **halved))

    return change


def _on(job: Job, **changes: Any) -> Job:
    machine: Machine = replace(job.machine, **changes)
    return replace(job, machine=machine)


def _more_network(job: Job) -> Job:
    machine = job.machine
    return _on(
        job,
        link_bytes_per_s=2 * machine.link_bytes_per_s,
        network_bytes_per_s=2 * machine.network_bytes_per_s,
        collective_s=machine.collective_s / 2,
    )


def _more_memory(job: Job) -> Job:
    return _on(job, memory_bytes=2 * job.machine.memory_bytes)


def _more_rewards(job: Job) -> Job:
    return replace(
        job, workload=replace(job.workload, reward_workers=2 * job.workload.reward_workers)
    )


def _even(workload: Workload) -> Lengths:
    return replace(workload.lengths, spread=0.0, given=())


# What can bind, and the job with twice as much of it.
RESOURCES: dict[str, Callable[[Job], Job]] = {
    "decode bandwidth": _faster("weight_byte", "cache_byte"),
    "decode arithmetic": _faster("decode_flop", "prefill_flop"),
    "decode launches": _faster("decode_step", "decode_layer", "decode_token", "request"),
    "train compute": _faster(
        "train_flop", "score_flop", "pass_layer", "pass_element", "update_param"
    ),
    "network": _more_network,
    "memory": _more_memory,
    "rewards": _more_rewards,
}


def _bindings(job: Job, layout: Layout) -> Iterator[Gain]:
    now = rough_step(job, layout).step_s
    for name, change in RESOURCES.items():
        step_s = rough_step(change(job), layout).step_s
        yield Gain(name, step_s, 1 - step_s / now)


def _helping(job: Job, gpus: int, best: Candidate, *, max_staleness: int) -> Iterator[Gain]:
    now, workload = rough_step(job, best.layout).step_s, job.workload

    def gain(name: str, other: Job, count: int, staleness: int) -> Iterator[Gain]:
        try:
            step_s = rough_candidate(other, count, max_staleness=staleness).step.step_s
        except PlanError:
            return
        yield Gain(name, step_s, 1 - step_s / now)

    even = replace(job, workload=replace(workload, lengths=_even(workload)))
    step_s = rough_step(even, best.layout).step_s
    yield Gain("completions of equal length", step_s, 1 - step_s / now)
    staler = max_staleness + 1
    yield from gain(f"rollout.max_staleness={staler}", job, gpus, staler)
    yield from gain(f"{2 * gpus} GPUs", job, 2 * gpus, max_staleness)
    rows = -(-workload.rows // best.layout.data_parallel_size)
    if rows > job.max_concurrency:
        most = min(rows, 4 * job.max_concurrency)
        name = f"engine.max_concurrency={most}"
        yield from gain(name, replace(job, max_concurrency=most), gpus, max_staleness)
    if best.step.reward_s > _LEAST_GAIN * best.step.step_s:
        name = f"rewards.workers={2 * workload.reward_workers}"
        yield from gain(name, _more_rewards(job), gpus, max_staleness)
