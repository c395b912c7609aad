"""The critic's error is far larger than any reward explains.

## What it sees
The mean squared error of the critic (or the total loss, if the critic's own is not logged): its
medians over stretches of the run exceed `factor` times the square of the largest reward.

## Why it matters
Values are estimates of what will be earned. With an error of ten times the largest return they
estimate nothing: the values follow their own errors, and every advantage that is computed from them
is noise.

## Likely causes
- critic-diverges: the critic's learning rate is too high, or its targets are its own values.
- loss-divergence: another part of the loss, such as a penalty, has run away.

## What to do
Lower the critic's learning rate, clip its gradient, slow the target network down, or normalise
rewards. Go back to a checkpoint before the error grew.

## Known false alarms
Rewards that are logged as the mean per step while an episode has thousands of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

# Stretches that a run is divided into, and the fewest records of one.
_STRETCHES, _FEWEST = 50, 3


class Options(RuleOptions):
    factor: float = option(100.0, "Error, in squares of the largest reward, that is too much.")
    records: int = option(12, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    for name in ("critic/loss", "train/loss"):
        error = view.series(name)
        if error is None or len(error.finite()) < options.records:
            continue
        yield from _judged(name, error.finite(), reward.finite(), options)
        return


def _judged(name: str, error: Series, reward: Series, options: Options) -> Iterator[Sighting]:
    largest = float(np.abs(reward.values).max(initial=0.0))
    # A product overflows to inf, where a power raises.
    limit = options.factor * max(largest, 1.0) * max(largest, 1.0)
    parts = np.array_split(np.arange(len(error)), min(_STRETCHES, len(error) // _FEWEST))
    levels = np.array([median(np.abs(error.values[part])) for part in parts])
    far = np.flatnonzero(levels > limit)
    start = median(np.abs(error.values[:_FEWEST]))
    # From the first record on it may be another scale.
    if not len(far) or start > limit:
        return
    first, most = int(error.steps[parts[far[0]][0]]), float(levels.max())
    yield Sighting(
        message=f"{name} is {most:.2g} from about step {first} on, though no reward is larger than "
        f"{largest:.3g}: its square is {largest * largest:.2g}. The values do not estimate what is "
        "earned. Lower the critic's learning rate.",
        evidence=(f"{name} {start:.2g} at first, up to {most:.2g}",),
        causes=(
            Cause("critic-diverges", "the error exceeds what any reward can make it"),
            Cause("loss-divergence", "or another part of the loss has run away"),
        ),
        fixes=(
            Fix("critic.lr", "a third", "smaller steps of the critic", Grade.UNSAFE),
            Fix("trainer.max_grad_norm", "0.5", "bounds single updates", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(error.steps[-1]),
        value=most,
        limit=limit,
    )


RULE = Rule(
    code="LRN030",
    name="critic-diverges",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward", "critic/loss|train/loss"),
    kinds=(Kind.RL,),
    options=Options,
)
