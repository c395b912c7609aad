"""What a step asks for: prompts, completions of ragged lengths, rewards, updates."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of completions: log-normal, truncated at `maximum`; all equal if `spread` is 0.

    `spread` is the standard deviation of the logarithm: 0.42 for GSM8K's answers, more for chains
    of thought. `given` are the quantiles of another distribution, in rising order.
    """

    mean: float
    maximum: int
    spread: float = 0.0
    given: tuple[int, ...] = ()
    # Lengths are rounded to this part of the maximum: completions that end together are one event.
    resolution: int = 256

    @property
    def is_ragged(self) -> bool:
        """Return whether completions differ in length."""
        return bool(self.given) or (self.spread > 0 and self.mean < self.maximum)

    def draw(self, count: int, *, step: int = 0) -> tuple[int, ...]:
        """Return `count` lengths: evenly spaced quantiles, in an order that the step decides."""
        quantiles = _quantiles(self, count)
        return tuple(quantiles[index] for index in shuffled(count, step))


@lru_cache(maxsize=64)
def _quantiles(lengths: Lengths, count: int) -> tuple[int, ...]:
    if lengths.given:
        last = len(lengths.given) - 1
        return tuple(lengths.given[round(last * (i + 0.5) / count)] for i in range(count))
    if not lengths.is_ragged:
        return (max(1, min(round(lengths.mean), lengths.maximum)),) * count
    median, normal = _median_for(lengths), NormalDist(0.0, lengths.spread)
    quantum = max(1, lengths.maximum // lengths.resolution)
    found = [median * math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    return tuple(
        max(quantum, min(round(value / quantum) * quantum, lengths.maximum)) for value in found
    )


def _median_for(lengths: Lengths) -> float:
    """Return the median at which the mean after truncation is the one asked for."""
    grid = [NormalDist(0.0, lengths.spread).inv_cdf((i + 0.5) / 200) for i in range(200)]
    low, high = lengths.mean / 20, float(lengths.maximum) * 20
    for _ in range(60):
        middle = math.sqrt(low * high)
        mean = sum(min(middle * math.exp(z), lengths.maximum) for z in grid) / len(grid)
        low, high = (middle, high) if mean < lengths.mean else (low, middle)
    return math.sqrt(low * high)


@lru_cache(maxsize=64)
def shuffled(count: int, step: int) -> tuple[int, ...]:
    """Return the numbers below `count` in an order that is random and always the same."""
    order = list(range(count))
    random.Random(f"{count}/{step}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step of RL."""

    prompts: int
    samples: int
    prompt_tokens: int
    lengths: Lengths
    # Optimizer updates of a step, and passes over its rows.
    updates: int = 1
    epochs: int = 1
    max_tokens: int = 16384
    # Forward passes over the rows before training: old log-probs, which the rows of a step's first
    # update do not need, and those of a reference.
    scored: float = 0.0
    # Whether the reference is a model of its own, whose weights are held.
    holds_reference: bool = False
    # Seconds of one call, which scores a group, and calls at the same time.
    reward_s: float = 0.0
    reward_workers: int = 1
    # Share of its forward pass that the backward pass computes again.
    recomputed: float = 0.0
    # Whether a group's prompt is computed once in training.
    shares_prompts: bool = True
    # Trained parameters, if only an adapter is trained.
    adapter_params: int | None = None

    @property
    def rows(self) -> int:
        """Number of completions of a step."""
        return self.prompts * self.samples

    def drawn(self, step: int = 0) -> tuple[int, ...]:
        """Return the lengths of all completions of a step, group by group."""
        return self.lengths.draw(self.rows, step=step)

    @property
    def longest(self) -> int:
        """Tokens of the longest possible row."""
        return self.prompt_tokens + self.lengths.maximum

    @property
    def trained_tokens(self) -> int:
        """Tokens of all completions of a step."""
        return _sums(self)[0]

    @property
    def tokens(self) -> int:
        """Tokens that one pass of training computes: completions and their prompts."""
        prompts = self.prompts if self.shares_prompts else self.rows
        return self.trained_tokens + prompts * self.prompt_tokens

    @property
    def pairs(self) -> float:
        """Pairs of tokens that attend to each other in one pass over the rows."""
        prompt = self.prompt_tokens
        prompts = self.prompts if self.shares_prompts else self.rows
        return _sums(self)[1] + prompts * prompt * (prompt + 1) / 2

    @property
    def longest_drawn(self) -> int:
        """Tokens of the longest row of a step."""
        return self.prompt_tokens + _sums(self)[2]


@lru_cache(maxsize=64)
def _sums(workload: Workload) -> tuple[int, float, int]:
    """Return tokens, pairs of tokens, and the longest, of all completions of a step."""
    drawn, prompt = workload.drawn(), workload.prompt_tokens
    pairs = sum(length * (prompt + (length + 1) / 2) for length in drawn)
    return sum(drawn), pairs, max(drawn)
