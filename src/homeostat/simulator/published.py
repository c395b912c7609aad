"""Steps and publications that others have published, beside what the simulator gives for them.

Nothing is fitted to these figures. They are of other software: what differs is the machine (rates
of an H200 are scaled by data sheets), their trainer and engine, and what they do not say of their
prompts (published.toml).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from homeostat.simulator.layout import Layout
from homeostat.simulator.machine import load_machine
from homeostat.simulator.publication import publish_seconds
from homeostat.simulator.search import Job, best_candidate
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.workload import Lengths, Workload

FILE = Path(__file__).parent / "published.toml"
_SPREAD = 0.6


@dataclass(frozen=True, slots=True)
class Compared:
    """A published figure and ours."""

    source: str
    what: str
    shape: str
    gpus: int
    theirs_s: float
    ours_s: float

    @property
    def ratio(self) -> float:
        """Return ours over theirs."""
        return self.ours_s / self.theirs_s


@cache
def _figures() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def compare(read_shape: Callable[[str], ModelShape], *, only: str | None = None) -> list[Compared]:
    """Return all published figures, or those of one shape, beside ours."""
    rows = [_step(raw, read_shape(raw["shape"])) for raw in _chosen("step", only)]
    return rows + [_sent(raw, read_shape(raw["shape"])) for raw in _chosen("publication", only)]


def _chosen(kind: str, only: str | None) -> list[dict[str, Any]]:
    return [raw for raw in _figures()[kind] if only in (None, raw["shape"])]


def _step(raw: dict[str, Any], shape: ModelShape) -> Compared:
    workload = Workload(
        prompts=raw["prompts"],
        samples=raw["samples"],
        prompt_tokens=raw["prompt_tokens"],
        lengths=Lengths(raw["mean_tokens"], raw["max_new_tokens"], _SPREAD),
        updates=raw["updates"],
        # Old and reference log-probs, which their step computes, too.
        scored=2,
        holds_reference=True,
        reward_workers=16,
    )
    machine, stale = load_machine(raw["machine"]), raw["max_staleness"]
    job = Job(shape, workload, machine)
    ours = best_candidate(job, raw["gpus"], max_staleness=stale).step.step_s
    how = "one step off-policy" if stale else "on-policy"
    what = f"step, {how}, {raw['machine'].upper()}"
    return Compared(raw["source"], what, shape.name, raw["gpus"], raw["step_s"], ours)


def _sent(raw: dict[str, Any], shape: ModelShape) -> Compared:
    half = raw["gpus"] // 2
    layout = Layout(half, half, colocated=False, tensor_parallel_size=8)
    workload = Workload(1, 2, 1, Lengths(1, 1))
    ours = publish_seconds(shape, workload, layout, load_machine(raw["machine"]))
    what = f"publication, {raw['machine'].upper()}"
    return Compared(raw["source"], what, shape.name, raw["gpus"], raw["seconds"], ours)
