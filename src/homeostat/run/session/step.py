"""A step of a run as the code that called the run sees it: metrics and, in RL, sampled groups.

Every loop is a generator of steps that returns the result of the run. It yields a step once that
is recorded and judged, before its checkpoint is saved: a request to stop that is made meanwhile has
the step saved, and ends the run.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.arrays import IntArray
from homeostat.run.session.result import RunResult


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its completions; all tuples are in the order of the completions.

    A reward is None where a reward function failed or gave no value. `rewards_by_name` holds the
    values of the single functions before their weights. An advantage is the mean over the tokens;
    None if the group was not trained on, because a filter dropped it.
    """

    prompt: str | list[dict[str, Any]]
    columns: Mapping[str, Any]
    completions: tuple[str, ...]
    rewards: tuple[float | None, ...]
    rewards_by_name: tuple[Mapping[str, float | None], ...]
    advantages: tuple[float | None, ...]
    token_ids: tuple[IntArray, ...]
    stop_reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its number, all of its metrics and, in RL, the groups that it sampled."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    groups: tuple[Group, ...] = ()


Running = Generator[Step, None, RunResult]


def run_to_end(running: Running) -> RunResult:
    """Take all steps of a run, and return its result."""
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value
