"""Chooses by measurement how a run uses the cores of a CPU, and records why.

    way = threads of one operation x lanes (parts of a micro-batch at one time, train/lanes.py)

On some machines a second thread in an operation makes small matrices slower; on a busy machine it
makes any matrix slower, because the threads wait for each other at the end of every operation.
Lanes wait once per micro-batch. Which is faster can only be measured: all candidates do the same
small work a few times, in turns. The default (one thread, one lane) is kept unless another is
clearly faster, and lanes are preferred to threads unless threads are far faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from homeostat.observe.environment import num_usable_cpus
from homeostat.train.lanes import Lanes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from homeostat.config.trainer import TrainerConfig

# Each lane holds its own gradients: more lanes cost memory, and rarely save time.
MAX_LANES = 8
_LAPS = 7
_MAX_SECONDS = 0.5
_CLEARLY = 0.9
# Threads are preferred to lanes if they take less than this share of the time of lanes.
_FAR_FASTER = 0.7
_SIZE = 256


@dataclass(frozen=True, slots=True, order=True)
class Way:
    lanes: int
    threads: int

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return threads if self.lanes == 1 else f"{self.lanes} lanes of {threads}"


@dataclass(frozen=True, slots=True)
class Cores:
    """A use of the cores, and the reason for choosing it."""

    way: Way
    why: str

    def __str__(self) -> str:
        return f"{self.way} ({self.why})"


PLAIN = Way(lanes=1, threads=1)


def available_cores(num_ranks: int = 1) -> int:
    """Return the number of threads that torch started with, or fewer if the process may not use as
    many.
    """
    return max(1, min(torch.get_num_threads(), num_usable_cpus() // num_ranks))


def choose_cores(config: TrainerConfig, *, most: int, may_split: bool) -> Cores:
    """`most`: cores to use. `may_split`: lanes can be had (CPU, one rank)."""
    if config.lanes is not None:
        return Cores(Way(config.lanes, config.threads or 1), "trainer.lanes")
    if config.threads is not None:
        return Cores(Way(1, config.threads), "trainer.threads")
    if most == 1:
        return Cores(PLAIN, "one core to use")
    # Threads come last: they keep spinning for a while and slow down lanes that come next.
    ways = [PLAIN, *[Way(min(most, MAX_LANES), 1)] * may_split, Way(1, most)]
    seconds = measure(ways)
    found = ", ".join(f"{way} {1e3 * spent:.1f} ms" for way, spent in seconds.items())
    return Cores(fastest(seconds), f"measured: {found}")


def fastest(seconds: dict[Way, float]) -> Way:
    """Return the default use, unless another takes clearly less time. Lanes are preferred to
    threads that take about as long, because lanes do not wait for each other when the machine is
    busy.
    """
    able = [way for way in seconds if seconds[way] < _CLEARLY * seconds[PLAIN]]
    best = min(able, key=lambda way: (seconds[way], way), default=PLAIN)
    lanes = [way for way in able if way.lanes > 1]
    return lanes[0] if lanes and seconds[best] > _FAR_FASTER * seconds[lanes[0]] else best


def measure(ways: Sequence[Way]) -> dict[Way, float]:
    """Return the seconds that each use of the cores takes for the same work: medians of alternating
    laps.
    """
    units = 4 * max(way.lanes * way.threads for way in ways)
    laps: dict[Way, list[float]] = {way: [] for way in ways}
    with _threads_restored():
        for _ in range(_LAPS):
            for way, spent in laps.items():
                if sum(spent) < _MAX_SECONDS:
                    spent.append(_lap(way, units))
    # The first lap of each use wakes its threads.
    return {way: statistics.median(spent[1:] or spent) for way, spent in laps.items()}


def slowdown_of_bf16() -> float:
    """Time of a matrix product in bf16 on this CPU, as a multiple of the time in fp32."""
    spent = []
    with _threads_restored():
        torch.set_num_threads(1)
        for dtype in (torch.float32, torch.bfloat16):
            left = torch.ones(64, _SIZE, dtype=dtype)
            right = torch.ones(_SIZE, _SIZE, dtype=dtype)
            torch.mm(left, right)
            started = time.perf_counter()
            torch.mm(left, right)
            spent.append(time.perf_counter() - started)
    return spent[1] / spent[0]


def _lap(way: Way, units: int) -> float:
    torch.set_num_threads(way.threads)
    if way.lanes == 1:
        started = time.perf_counter()
        _work(units)
        return time.perf_counter() - started
    lanes = Lanes(way.lanes, threads=way.threads)
    shares = [units // way.lanes] * way.lanes
    # Threads are started by their first work.
    lanes.map(_work, [0] * way.lanes)
    started = time.perf_counter()
    lanes.map(_work, shares)
    spent = time.perf_counter() - started
    lanes.close()
    return spent


def _work(units: int) -> None:
    """Products and passes over memory as a layer has them, in their order."""
    x, weight = torch.ones(_SIZE, _SIZE), torch.full((_SIZE, _SIZE), 1 / _SIZE)
    for _ in range(4 * units):
        x = functional.silu(x @ weight) * x + x


@contextmanager
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
