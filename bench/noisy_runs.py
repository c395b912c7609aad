"""The doctor on simulated healthy runs: which rules take noise for an illness.

    python bench/noisy_runs.py [--seeds N] [--name NAME]

Each run is a course that a healthy run takes, with noise on top. There are three courses (a loss
that falls, a reward that rises, a reward that has risen to what can be reached), four lengths,
eight kinds of noise and two sizes of it; N seeds of each (4: 768 runs). Noise is independent,
correlated, a running mean, of heavy tails, of single outliers, growing, or alternating; its size is
a share of the course's range. Counted are findings of level warn or error, by rule and by kind.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import common
import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Level
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.log import Log
from homeostat.health.registry import RULES
from homeostat.health.view import Kind, RunView, Series

LENGTHS = (24, 80, 250, 800)
SIZES = (0.10, 0.25)
Draw = Callable[[np.random.Generator, int], FloatArray64]


def _autoregressive(random: np.random.Generator, count: int, keep: float) -> FloatArray64:
    """Return noise of deviation 1 of which each record keeps a share of the one before."""
    steps = random.standard_normal(count) * np.sqrt(1.0 - keep * keep)
    values = np.empty(count)
    last = float(random.standard_normal())
    for at, step in enumerate(steps):
        last = keep * last + float(step)
        values[at] = last
    return values


def _running_mean(random: np.random.Generator, count: int, window: int) -> FloatArray64:
    long = random.standard_normal(count + window - 1)
    return np.convolve(long, np.ones(window), "valid") / np.sqrt(window)


def _outliers(random: np.random.Generator, count: int) -> FloatArray64:
    values = 0.5 * random.standard_normal(count)
    return np.where(random.random(count) < 0.03, values * 8.0, values)


NOISES: dict[str, Draw] = {
    "white": lambda random, count: random.standard_normal(count),
    "correlated 0.5": lambda random, count: _autoregressive(random, count, 0.5),
    "correlated 0.9": lambda random, count: _autoregressive(random, count, 0.9),
    "mean of 20": lambda random, count: _running_mean(random, count, 20),
    "mean of 100": lambda random, count: _running_mean(random, count, 100),
    "heavy tails": lambda random, count: random.standard_t(3, count) / np.sqrt(3.0),
    "outliers": _outliers,
    "alternating": lambda random, count: (
        0.7 * random.standard_normal(count) + 0.7 * (-1.0) ** np.arange(count)
    ),
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """A healthy run, and what was put on top of its course."""

    course: str
    noise: str
    view: RunView


def simulated(seeds: int) -> Iterator[Simulated]:
    """Return all runs."""
    for seed in range(seeds):
        for number, (name, draw) in enumerate(NOISES.items()):
            for length in LENGTHS:
                for at, size in enumerate(SIZES):
                    random = np.random.default_rng([seed, number, length, at])
                    for course, make in COURSES.items():
                        metrics = make(random, draw, length, size)
                        yield Simulated(course, name, _view(course, metrics))


def _loss(
    random: np.random.Generator, draw: Draw, count: int, size: float
) -> dict[str, FloatArray64]:
    """A loss that falls to a third, and gradient norms whose logarithm is noisy."""
    course = 0.9 + 1.8 * np.exp(-4.0 * np.linspace(0.0, 1.0, count))
    return {
        "train/loss": course * np.exp(size * draw(random, count)),
        "grad_norm": np.exp(2.0 * size * draw(random, count)),
        "learning_rate": 1e-4 * np.linspace(1.0, 0.05, count),
    }


def _rising(
    random: np.random.Generator, draw: Draw, count: int, size: float
) -> dict[str, FloatArray64]:
    return _policy(random, draw, np.linspace(20.0, 200.0, count), size)


def _saturated(
    random: np.random.Generator, draw: Draw, count: int, size: float
) -> dict[str, FloatArray64]:
    """A reward that has reached four fifths of its course after a third of the run."""
    course = 200.0 - 180.0 * np.exp(-5.0 * np.linspace(0.0, 1.0, count))
    return _policy(random, draw, course, size)


def _policy(
    random: np.random.Generator, draw: Draw, course: FloatArray64, size: float
) -> dict[str, FloatArray64]:
    """The metrics of a run of RL with a critic, in the names of other trainers' readers."""
    count, share = len(course), np.linspace(0.0, 1.0, len(course))
    small = size / 2.0
    return {
        "reward": course + size * float(np.ptp(course)) * draw(random, count),
        "entropy": (2.0 - share) * np.exp(small * draw(random, count)),
        "policy/update_kl": 0.02 * np.exp(2.0 * size * draw(random, count)),
        "clip_ratio/region_mean": np.clip(0.1 + 0.1 * size * draw(random, count), 0.0, 1.0),
        "critic/loss": (0.1 + share) * 50.0 * np.exp(2.0 * size * draw(random, count)),
        "critic/explained_variance": np.clip(share + small * draw(random, count), -1.0, 1.0),
    }


COURSES = {"loss falls": _loss, "reward rises": _rising, "reward has risen": _saturated}


def _view(course: str, metrics: dict[str, FloatArray64]) -> RunView:
    return RunView(
        metrics={
            name: Series(np.arange(1, len(values) + 1), values) for name, values in metrics.items()
        },
        framework=HOMEOSTAT,
        kind=Kind.SFT if course == "loss falls" else Kind.RL,
        settings={},
        raw_settings={},
        events=(),
        log=Log(()),
        samples=(),
        facts={},
        total_steps=None,
        decimals={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--name", help="write bench/results/NAME.json")
    chosen = parser.parse_args()
    runs, alarmed = 0, 0
    rules: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for run in simulated(chosen.seeds):
        runs += 1
        said = {
            finding.code
            for finding in diagnose(run.view, RULES).findings
            if finding.level is not Level.INFO
        }
        alarmed += bool(said)
        rules.update(said)
        kinds.update([f"{run.course}, {run.noise}"] if said else [])
    print(f"{alarmed} of {runs} healthy runs with an alarm")
    for name, number in (*rules.most_common(), *kinds.most_common()):
        print(f"    {name:40} {number}")
    if chosen.name:
        found = {"runs": runs, "alarmed": alarmed, "rules": dict(rules), "kinds": dict(kinds)}
        common.write_result(chosen.name, {**common.machine(("numpy",)), **found})


if __name__ == "__main__":
    main()
