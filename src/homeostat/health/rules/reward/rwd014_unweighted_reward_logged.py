"""The logged reward is the plain sum of the reward functions, although they have weights.

## What it sees
The weights are not all 1, and over `fire` records the logged reward equals the unweighted sum of
the functions' means, not the weighted one.

## Why it matters
Only the display is wrong: advantages use the weights. But anyone who reads the curve compares wrong
numbers.

## Likely causes
- benign-unweighted-reward-logged: some versions of a trainer log the sum before weighting.

## What to do
Nothing for the training. Compute the weighted sum from the functions' means, or upgrade.

## Known false alarms
None: nothing needs to be cured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import reward_functions
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(3, "Number of records that must agree.")
    tolerance: float = option(0.01, "Distance of two rewards that count as equal.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    reward, functions = view.series("reward"), reward_functions(view)
    assert reward is not None, "needs says so"
    weights = view.once_of_settings(_weights)
    if weights is None or len(weights) != len(functions):
        yield Unknown("the weights of the rewards are not known")
        return
    means = np.array([s.finite().values.mean() for s in functions.values()])
    logged = float(reward.finite().values.mean()) if len(reward.finite()) else float("nan")
    plain, weighted = float(means.sum()), float(means @ np.array(weights))
    is_plain = abs(logged - plain) < options.tolerance
    if len(reward) < options.fire or not is_plain or abs(weighted - plain) < options.tolerance:
        return
    yield Sighting(
        message=f"The logged reward {logged:.4g} is the sum without weights; with them it is "
        f"{weighted:.4g}. Training uses the weights: only the curve is off.",
        evidence=(f"weights {weights}", f"means {means.round(4).tolist()}"),
        causes=(Cause("benign-unweighted-reward-logged", "the sum is logged before weighting"),),
        fixes=(Fix("", "", "compute the weighted sum yourself, or upgrade the trainer"),),
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=logged,
        limit=weighted,
    )


def _weights(settings: Mapping[str, Any], raw_settings: Mapping[str, Any]) -> list[float] | None:
    for key, value in [*raw_settings.items(), *settings.items()]:
        if str(key).rsplit(".", 1)[-1].lower() == "reward_weights" and isinstance(value, list):
            if all(isinstance(w, int | float) for w in value):
                return [float(w) for w in value]
    return None


RULE = Rule(
    code="RWD014",
    name="benign-unweighted-reward-logged",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
