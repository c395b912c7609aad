"""One engine as a server with continuous batching: sequences come, decode together, and leave.

Its clock counts decoding steps. Between two arrivals or departures the batch is constant and every
context grows by one token a step, so the seconds of n steps are n * (a + b * cached) + b * B *
n * (n - 1) / 2: no step is simulated on its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from homeostat.simulator.rates import Rates, Work, added
from homeostat.simulator.shape import ModelShape


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The cost of decoding on one engine of `tensor_parallel` GPUs."""

    shape: ModelShape
    rates: Rates
    dtype_bytes: int = 2
    tensor_parallel: int = 1
    # Of one GPU's link to the others of its engine.
    link_bytes_per_s: float = float("inf")
    collective_s: float = 0.0
    max_batch: int = 256
    # Cached tokens that fit; no limit on a device that is never full.
    max_cached: float = float("inf")

    def step_work(self, batch: int, cached: float, steps: float = 1.0) -> Work:
        """Return the work of `steps` decoding steps, beginning with so many cached tokens."""
        shape, share = self.shape, 1.0 / self.tensor_parallel
        tokens = steps * cached + batch * steps * (steps - 1) / 2
        flops = 2.0 * shape.active_params * batch * steps + shape.attention_flops(tokens)
        return {
            "decode_step": steps,
            "decode_layer": shape.layers * steps,
            "weight_byte": shape.read_params(batch) * self.dtype_bytes * share * steps,
            "cache_byte": shape.kv_elements * self.dtype_bytes * tokens * share,
            "decode_flop": flops * share,
            "decode_token": batch * steps,
        }

    def step_cost(self, batch: int) -> tuple[float, float]:
        """Return the seconds of a step without a cache, and of one cached token."""
        rates, sums = self.rates, 0.0
        if self.tensor_parallel > 1:
            sent = 2.0 * batch * self.shape.hidden * self.dtype_bytes / self.link_bytes_per_s
            sums = 2 * self.shape.layers * (self.collective_s + sent)
        empty = rates.seconds(self.step_work(batch, 0.0, 1.0))
        return empty + sums, rates.seconds(self.step_work(batch, 1.0, 1.0)) - empty

    def prefill_work(self, prompts: int, tokens: int, requests: int) -> Work:
        """Return the work of so many prompts, shared by so many requests."""
        pairs = prompts * tokens * (tokens + 1) / 2
        flops = 2.0 * self.shape.body_params * prompts * tokens + self.shape.attention_flops(pairs)
        return {"prefill_flop": flops / self.tensor_parallel, "request": float(requests)}


@dataclass(slots=True)
class Engine:
    """The state of one engine. Times are seconds since the run began."""

    model: EngineModel
    now: float = 0.0
    steps: float = 0.0
    cached: float = 0.0
    reserved: float = 0.0
    busy_s: float = 0.0
    _running: list[tuple[float, int, float]] = field(default_factory=list)
    _waiting: deque[tuple[int, int, int, bool]] = field(default_factory=deque)
    # What a step costs by the size of its batch; engines of one model share it.
    costs: dict[int, tuple[float, float]] = field(default_factory=dict)
    # Work by the names of rates, if it is wanted: to fit them.
    work: dict[str, float] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def load(self) -> int:
        """Number of requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def submit(self, request: int, *, prompt: int, new: int, computes_prompt: bool) -> None:
        """Queue a request. One of a group computes the prompt; the others share it."""
        self._waiting.append((request, prompt, new, computes_prompt))

    def pause(self, until: float) -> None:
        """Decode nothing until a time that has not come yet."""
        self.now = max(self.now, until)

    def next_end(self) -> float | None:
        """Return when the next request ends if nothing else happens; None if none runs."""
        self._admit()
        if not self._running:
            return None
        steps = self._running[0][0] - self.steps
        return self.now + self._seconds(steps)

    def advance(self) -> list[int]:
        """Decode until the next request ends, and return those that end together."""
        self._admit()
        self._decode(self._running[0][0] - self.steps)
        ended = []
        while self._running and self._running[0][0] <= self.steps + 1e-6:
            _, request, whole = heapq.heappop(self._running)
            self.cached -= whole
            self.reserved -= whole
            ended.append(request)
        return ended

    def advance_to(self, time: float) -> None:
        """Decode until a time before the next end, in whole and broken steps."""
        if not self._running:
            self.now = max(self.now, time)
            return
        left = time - self.now
        if left <= 0:
            return
        steps = min(left / self._seconds(1.0), self._running[0][0] - self.steps)
        # Contexts grow meanwhile: one correction is enough for the few steps between two events.
        guess = self._seconds(max(steps, 1e-9))
        self._decode(steps * min(1.0, left / guess))
        self.now = time

    def _seconds(self, steps: float) -> float:
        """Return the seconds of so many steps with the requests that run now."""
        batch = len(self._running)
        cost = self.costs.get(batch)
        if cost is None:
            cost = self.costs[batch] = self.model.step_cost(batch)
        tokens = steps * self.cached + batch * steps * (steps - 1) / 2
        return cost[0] * steps + cost[1] * tokens

    def _decode(self, steps: float) -> None:
        batch = len(self._running)
        seconds = self._seconds(steps)
        if self.work is not None:
            self.work = added(self.work, self.model.step_work(batch, self.cached, steps))
        self.now += seconds
        self.busy_s += seconds
        self.steps += steps
        self.cached += batch * steps

    def _admit(self) -> None:
        if not self._waiting:
            return
        prompts = tokens = requests = 0
        while self._waiting and len(self._running) < self.model.max_batch:
            request, prompt, new, computes = self._waiting[0]
            if self._running and self.reserved + prompt + new > self.model.max_cached:
                break
            self._waiting.popleft()
            heapq.heappush(self._running, (self.steps + new, request, float(prompt + new)))
            self.reserved += prompt + new
            self.cached += prompt
            requests += 1
            prompts += computes
            tokens = prompt
        if requests:
            work = self.model.prefill_work(prompts, tokens, requests)
            seconds = self.model.rates.seconds(work)
            if self.work is not None:
                self.work = added(self.work, work)
            self.now += seconds
            self.busy_s += seconds
