"""A discrete-event model of the loop: engines, reward workers, trainer and publications.

    batch b is admitted when version b - max_staleness is published (all of it, in order)
    a group is scored when its last completion is there and a reward worker is free
    step k trains on batch k when it is scored and the trainer is free, then publishes version k + 1

With max_staleness 0 this is the synchronous loop. Batches are trained in the order of their
admission, so no slow completion is dropped and none is older than the bound.
"""

from __future__ import annotations

import heapq
import statistics
from dataclasses import asdict, dataclass, field

from homeostat.simulator.engine import Engine, EngineModel
from homeostat.simulator.layout import Layout
from homeostat.simulator.machine import Machine
from homeostat.simulator.memory import cache_room
from homeostat.simulator.publication import publish_seconds
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.training import TrainSeconds, train_seconds
from homeostat.simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a steady step, by stage, and how busy each side is."""

    step_s: float
    # From admission to the last completion; then until the last reward.
    generate_s: float
    reward_s: float
    score_s: float
    train_s: float
    publish_s: float
    other_s: float
    # Share of its train_s in which a rank waits for transfers.
    exposed_s: float
    trainer_busy: float
    engines_busy: float
    reward_busy: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, float]:
        """Return all figures by name."""
        return asdict(self)


@dataclass(slots=True)
class _Batch:
    """Progress of the groups of one step."""

    left: dict[int, int]
    admitted: float = 0.0
    last_completion: float = 0.0
    ready: float = 0.0
    open_groups: int = 0


@dataclass(slots=True)
class Simulation:
    """The state of a simulated run."""

    workload: Workload
    engines: list[Engine]
    # Of one call: the mean group's.
    reward_s: float
    batches: dict[int, _Batch] = field(default_factory=dict)
    workers: list[float] = field(default_factory=list)
    reward_busy: float = 0.0

    def admit(self, batch: int, time: float) -> None:
        """Spread the requests of a batch over the engines, groups together where they can be."""
        rows, samples = self.workload.rows, self.workload.samples
        self.batches[batch] = _Batch({}, admitted=time, open_groups=self.workload.prompts)
        chunk = max(1, min(samples, rows // len(self.engines)))
        drawn = self.workload.drawn(batch)
        loads = [(engine.load, index) for index, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        for group in range(self.workload.prompts):
            self.batches[batch].left[group] = samples
            for start in range(0, samples, chunk):
                load, index = loads[0]
                members = range(start, min(start + chunk, samples))
                for member in members:
                    row = group * samples + member
                    self.engines[index].submit(
                        batch * rows + row,
                        prompt=self.workload.prompt_tokens,
                        new=drawn[row],
                        computes_prompt=member == start,
                    )
                heapq.heapreplace(loads, (load + len(members), index))

    def run(self, *, until: float | None = None, batch: int | None = None) -> None:
        """Let engines decode until a time, or until a batch is scored."""
        ends = [(end, index) for index, engine in self._decoding() if (end := engine.next_end())]
        heapq.heapify(ends)
        while ends and not (batch is not None and not self.batches[batch].open_groups):
            end, index = ends[0]
            if until is not None and end > until:
                break
            engine = self.engines[index]
            for request in engine.advance():
                self._completed(request, engine.now)
            following = engine.next_end()
            if following is None:
                heapq.heappop(ends)
            else:
                heapq.heapreplace(ends, (following, index))
        if until is not None:
            for engine in self.engines:
                engine.advance_to(until)

    def _decoding(self) -> list[tuple[int, Engine]]:
        return [(index, e) for index, e in enumerate(self.engines) if not e.is_idle]

    def _completed(self, request: int, time: float) -> None:
        number, row = divmod(request, self.workload.rows)
        batch, group = self.batches[number], row // self.workload.samples
        batch.left[group] -= 1
        batch.last_completion = max(batch.last_completion, time)
        if batch.left[group]:
            return
        start = max(time, heapq.heappop(self.workers))
        done = start + self.reward_s
        heapq.heappush(self.workers, done)
        self.reward_busy += self.reward_s
        batch.ready = max(batch.ready, done)
        batch.open_groups -= 1


def engine_model(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    machine: Machine,
    *,
    max_concurrency: int = 256,
) -> EngineModel:
    """Return the cost model of one engine of a layout."""
    return EngineModel(
        shape,
        machine.rates,
        dtype_bytes=machine.dtype_bytes,
        tensor_parallel=layout.tensor_parallel_size,
        link_bytes_per_s=machine.link_bytes_per_s
        if layout.tensor_parallel_size <= machine.node_gpus
        else machine.network_bytes_per_s,
        collective_s=machine.collective_s,
        max_batch=max_concurrency,
        max_cached=cache_room(shape, workload, layout, machine),
    )


def start(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    machine: Machine,
    *,
    max_concurrency: int = 256,
) -> Simulation:
    """Return a run in which nothing has happened yet."""
    model = engine_model(shape, workload, layout, machine, max_concurrency=max_concurrency)
    rates = machine.rates
    group_tokens = workload.trained_tokens / workload.prompts
    each = workload.reward_s + rates.reward_call + rates.answer_token * group_tokens
    costs: dict[int, tuple[float, float]] = {}
    engines = [Engine(model, costs=costs) for _ in range(layout.data_parallel_size)]
    return Simulation(workload, engines, each, workers=[0.0] * workload.reward_workers)


def simulate(
    shape: ModelShape,
    workload: Workload,
    layout: Layout,
    machine: Machine,
    *,
    max_concurrency: int = 256,
    sends_weights: bool = False,
    counted: int = 4,
) -> StepSeconds:
    """Simulate some steps, and return a steady one.

    `sends_weights`: to an engine in its own process, where they would be shared otherwise.
    `counted`: steps whose mean is returned; they differ in which completions are long.
    """
    run = start(shape, workload, layout, machine, max_concurrency=max_concurrency)
    learned = train_seconds(shape, workload, layout, machine)
    published = publish_seconds(shape, workload, layout, machine, sends_weights=sends_weights)
    other = machine.rates.step + machine.rates.row * workload.rows
    for batch in range(layout.max_staleness + 1):
        run.admit(batch, 0.0)
    ends: list[float] = []
    free = busy_at = rewarded_at = 0.0
    warm_up = 1 + 2 * layout.max_staleness
    if not layout.max_staleness and not workload.lengths.is_ragged:
        counted = 1
    for step in range(warm_up + counted):
        run.run(batch=step)
        trained = max(free, run.batches[step].ready) + learned.score_s + learned.train_s + other
        run.run(until=trained)
        if step == warm_up - 1:
            busy_at = sum(engine.busy_s for engine in run.engines)
            rewarded_at = run.reward_busy
        free = trained + published
        for engine in run.engines:
            engine.pause(free)
        run.admit(step + 1 + layout.max_staleness, free)
        ends.append(free)
    warm = (busy_at, rewarded_at)
    how = {"warm_up": warm_up, "published": published, "other": other}
    return _steady(run, learned, ends, warm, **how)


def _steady(
    run: Simulation,
    learned: TrainSeconds,
    ends: list[float],
    warm: tuple[float, float],
    *,
    warm_up: int,
    published: float,
    other: float,
) -> StepSeconds:
    counted = range(warm_up, len(ends))
    elapsed = ends[-1] - ends[warm_up - 1]
    step_s = elapsed / len(counted)
    batches = [run.batches[step] for step in counted]
    busy = sum(engine.busy_s for engine in run.engines) - warm[0]
    return StepSeconds(
        step_s=step_s,
        generate_s=statistics.fmean(b.last_completion - b.admitted for b in batches),
        reward_s=statistics.fmean(b.ready - b.last_completion for b in batches),
        score_s=learned.score_s,
        train_s=learned.train_s,
        publish_s=published,
        other_s=other,
        exposed_s=learned.exposed_s,
        trainer_busy=(learned.score_s + learned.train_s + other) / step_s,
        engines_busy=busy / elapsed / len(run.engines),
        reward_busy=(run.reward_busy - warm[1]) / elapsed / len(run.workers),
        tokens_per_s=run.workload.trained_tokens / step_s,
    )
