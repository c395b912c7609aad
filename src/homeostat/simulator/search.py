"""Find the split of so many GPUs with the shortest step, among those that fit in memory.

The trainer's split is chosen first, for each number of its GPUs: its seconds follow from arithmetic
alone. Engines are then simulated for each size of tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from homeostat.errors import ConfigError, DoesNotFitError, PlanError
from homeostat.simulator.layout import Layout
from homeostat.simulator.loop import StepSeconds, simulate
from homeostat.simulator.machine import Machine
from homeostat.simulator.memory import (
    RESERVED_BYTES,
    GpuMemory,
    cache_room,
    layout_memory,
    trainer_memory,
)
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.training import train_seconds
from homeostat.simulator.workload import Workload

# Shares of the GPUs that engines get where they have their own.
_ENGINE_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
_SIZES = (1, 2, 4, 8)
# (context, sequence): Ulysses first, because its exchanges stay in a node.
_ROW_SPLITS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
_LARGEST_CLUSTER = 65536
# Of splits that take at most this many times as long as the fastest, the simplest is taken.
_AS_FAST = 1.02
# Steps that are counted, and a grid of lengths that is good enough to compare splits.
_COUNTED_STEPS, _ROUGH_RESOLUTION = 4, 32


@dataclass(frozen=True)
class Job:
    """What is to be planned: a model, the work of a step, a machine, and the engines' limit."""

    shape: ModelShape
    workload: Workload
    machine: Machine
    max_concurrency: int = 256

    def simulate(self, layout: Layout, *, counted: int = _COUNTED_STEPS) -> StepSeconds:
        """Simulate the loop with this split."""
        return simulate(
            self.shape,
            self.workload,
            layout,
            self.machine,
            max_concurrency=self.max_concurrency,
            counted=counted,
        )

    @cached_property
    def rough(self) -> Job:
        """The same with lengths on a coarser grid: fewer events, to compare splits."""
        lengths = replace(self.workload.lengths, resolution=_ROUGH_RESOLUTION)
        return replace(self, workload=replace(self.workload, lengths=lengths))

    def memory(self, layout: Layout) -> GpuMemory:
        """Return the bytes of the fullest GPU."""
        return layout_memory(
            self.shape,
            self.workload,
            layout,
            self.machine,
            max_concurrency=self.max_concurrency,
        )

    @cached_property
    def heads_splits(self) -> list[int]:
        """Sizes of tensor parallelism that divide the heads and fit a node."""
        most = self.machine.node_gpus
        return [size for size in _SIZES if size <= most and self.shape.heads % size == 0]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A split that fits, and its simulated step."""

    layout: Layout
    memory: GpuMemory
    step: StepSeconds


def best_candidate(job: Job, gpus: int, *, max_staleness: int = 0) -> Candidate:
    """Return the fastest split that fits. Raises DoesNotFitError, with the sums, if none does."""
    best = rough_candidate(job, gpus, max_staleness=max_staleness)
    return replace(best, step=job.simulate(best.layout))


def rough_candidate(job: Job, gpus: int, *, max_staleness: int = 0) -> Candidate:
    """Return the fastest split, with a step that was simulated on a coarser grid of lengths."""
    best: Candidate | None = None
    for layout in layouts(job, gpus, max_staleness=max_staleness):
        if best is not None and _seconds(job, layout) >= best.step.step_s:
            continue
        step = rough_step(job, layout)
        if best is None or step.step_s < best.step.step_s:
            best = Candidate(layout, job.memory(layout), step)
    if best is None:
        raise DoesNotFitError(why_not(job, gpus))
    return best


def rough_step(job: Job, layout: Layout) -> StepSeconds:
    """Return a step that is good enough to be compared with others of its kind."""
    return job.rough.simulate(layout, counted=2 if layout.max_staleness else 1)


def layouts(job: Job, gpus: int, *, max_staleness: int = 0) -> Iterator[Layout]:
    """Yield every split that fits: trainer and engines on the same GPUs, or on their own."""
    if not max_staleness:
        yield from _with_engines(job, gpus, gpus, colocated=True, max_staleness=0)
    unit = job.machine.node_gpus if gpus >= 2 * job.machine.node_gpus else 1
    tried: set[int] = set()
    for share in _ENGINE_SHARES:
        engines = max(unit, round(gpus * share / unit) * unit)
        if engines < gpus and engines not in tried:
            tried.add(engines)
            how = {"colocated": False, "max_staleness": max_staleness}
            yield from _with_engines(job, gpus - engines, engines, **how)


def _with_engines(
    job: Job, trainers: int, engines: int, *, colocated: bool, max_staleness: int
) -> Iterator[Layout]:
    base = Layout(trainers, engines, colocated=colocated, max_staleness=max_staleness)
    trainer = best_trainer(job, base)
    if trainer is None:
        return
    for size in job.heads_splits:
        layout = replace(trainer, tensor_parallel_size=size)
        if engines % size == 0 and fits(job, layout):
            yield layout


def best_trainer(job: Job, base: Layout) -> Layout | None:
    """Return the fastest split of the trainer's GPUs that fits, whatever the engines do."""
    for moments, weights in ((False, False), (True, False), (True, True)):
        away = replace(base, offload_optimizer=moments, offload_params=weights)
        fitting = [layout for layout in _trainers(job, away) if fits_training(job, layout)]
        if fitting:
            seconds = {layout: _seconds(job, layout) for layout in fitting}
            limit = _AS_FAST * min(seconds.values())
            return min((one for one in fitting if seconds[one] <= limit), key=_parts)
    return None


def _parts(layout: Layout) -> tuple[int, ...]:
    """Order splits from simple to involved: by rows, then experts, then shards."""
    rows = layout.context_parallel_size * layout.sequence_parallel_size
    recomputes = int(layout.gradient_checkpointing)
    return (rows, layout.expert_parallel_size, recomputes, -layout.replicas)


def _seconds(job: Job, layout: Layout) -> float:
    seconds = train_seconds(job.shape, job.workload, layout, job.machine)
    return seconds.score_s + seconds.train_s


def _trainers(job: Job, base: Layout) -> Iterator[Layout]:
    node, world = job.machine.node_gpus, base.trainer_gpus
    for recomputes in (False, True):
        for cp, sp in _ROW_SPLITS:
            for shards in _shard_counts(world, node):
                for ep in _expert_splits(job.shape):
                    layout = replace(
                        base,
                        replicas=world // shards,
                        context_parallel_size=cp,
                        sequence_parallel_size=sp,
                        expert_parallel_size=ep,
                        gradient_checkpointing=recomputes,
                    )
                    if _is_whole(job, layout):
                        yield layout


def _shard_counts(world: int, node: int) -> list[int]:
    """Ranks of a replica: one node, two, four ... up to all, where they divide the world."""
    counts = {world} | {node * 2**power for power in range(12)}
    return sorted(count for count in counts if count <= world and world % count == 0)


def _expert_splits(shape: ModelShape) -> list[int]:
    if not shape.experts:
        return [1]
    return [size for size in (1, 8, 16, 32, 64) if shape.experts % size == 0]


def _is_whole(job: Job, layout: Layout) -> bool:
    try:
        layout.check(job.shape, node_gpus=job.machine.node_gpus)
    except (PlanError, ConfigError):
        return False
    return True


def fits_training(job: Job, layout: Layout) -> bool:
    """Return whether a trainer rank fits in its GPU, and what it offloads in 80 % of its host."""
    size = job.machine.dtype_bytes
    held = trainer_memory(job.shape, job.workload, layout, dtype_bytes=size)
    on_node = held.host * min(layout.trainer_gpus, job.machine.node_gpus)
    fits_device = held.training + RESERVED_BYTES <= job.machine.memory_bytes
    return fits_device and on_node <= 0.8 * job.machine.host_bytes


def fits(job: Job, layout: Layout) -> bool:
    """Return whether the fullest GPU fits, with a cache for at least one longest completion."""
    room = cache_room(job.shape, job.workload, layout, job.machine)
    fits_device = job.memory(layout).peak <= job.machine.memory_bytes
    return fits_device and room >= job.workload.longest


def why_not(job: Job, gpus: int) -> str:
    """Return the sums that show that nothing fits, and the least number of GPUs that would."""
    shape, machine, workload = job.shape, job.machine, job.workload
    whole = trainer_memory(shape, workload, Layout(gpus, gpus), dtype_bytes=machine.dtype_bytes)
    each = whole.weights + whole.gradients + whole.optimizer + whole.reference
    least = least_gpus(job)
    limit = f"It fits from {least} GPUs on." if least else "No number of GPUs is enough."
    longest = f"{workload.longest:,} tokens"
    return (
        f"{shape.name} does not fit on {gpus} x {machine.name}. Training holds weights, gradients, "
        f"masters and moments: {each * gpus / 1e9:,.0f} GB over {gpus} GPUs are "
        f"{each / 1e9:,.1f} GB each, of {machine.memory_bytes / 1e9:,.0f}, and with all of it in "
        f"host memory {each * min(gpus, machine.node_gpus) / 1e9:,.0f} GB a node, of "
        f"{machine.host_bytes / 1e9:,.0f}; the activations of a row of up to {longest} and the "
        f"engine's {shape.num_params * 2 / 1e9:,.0f} GB of weights come on top. {limit} Or train "
        "an adapter (lora.rank=16), or make rows shorter (rollout.max_new_tokens)."
    )


def least_gpus(job: Job) -> int | None:
    """Return the smallest number of GPUs, in whole nodes or parts of one, on which it fits."""
    node = job.machine.node_gpus
    sizes = [size for size in _SIZES if size < node]
    sizes += [node * 2**power for power in range(int(math.log2(_LARGEST_CLUSTER / node)))]
    for gpus in sizes:
        trainer = best_trainer(job, Layout(gpus, gpus))
        layouts = (
            [replace(trainer, tensor_parallel_size=s) for s in job.heads_splits] if trainer else []
        )
        if any(gpus % one.tensor_parallel_size == 0 and fits(job, one) for one in layouts):
            return gpus
    return None
