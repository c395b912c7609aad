"""The KL estimate is astronomically large on a few tokens, while the loss looks ordinary.

## What it sees
The mean KL per token is above `max_mean`, or the largest KL of a single token is above `max_token`,
in `fire` of the newest `window` records whose KL is finite.

## Why it matters
The estimator exp(x) - 1 - x grows without bound in the log-ratio x: a handful of tokens on which
policy and reference disagree by 15 nats or more make up the whole number. A tiny coefficient hides
the effect at first; then one update wrecks the model.

## Likely causes
- kl-estimator-overflow: log-ratios are not bounded before the exponential.
- engine-logprob-mismatch: the compared log-probs belong to other tokens (padding, truncation,
  shifted by one, another tokenizer).
- kl-runaway: the policy really has gone that far.

## What to do
Bound the log-ratio in the KL term, or use the estimator k1 or k2 with bounds. Then find the tokens
with the largest ratio: padding, special tokens and the first or last of a row are the usual ones.

## Known false alarms
None known: no working policy is 1000 nats per token away from its reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import newest
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_mean: float = option(1000.0, "Mean KL per token that no policy has.")
    max_token: float = option(1e6, "KL of one token that comes from the estimator.")
    fire: int = option(2, "Number of records that must show it ...")
    window: int = option(10, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for name, limit in (("kl", options.max_mean), ("kl/max", options.max_token)):
        kl = view.series(name)
        if kl is None:
            continue
        held = np.isfinite(kl.values) & (kl.values > limit)
        spell = newest_spell(held, fire=options.fire, window=options.window, clear=6)
        if spell is None or not spell.is_open:
            continue
        value, first = float(kl.values[spell.end]), int(kl.steps[spell.start])
        loss = newest(view, "train/loss")
        beside = f" The loss, {loss:.3g}, hides it." if loss is not None else ""
        yield Sighting(
            message=f"{name} is {value:.3g} since step {first} (limit {limit:.3g}): the estimator "
            f"overflows on a few tokens.{beside} Bound the log-ratio.",
            evidence=(f"{name} {value:.3g} at step {kl.steps[spell.end]}",),
            causes=(
                Cause("kl-estimator-overflow", "the exponential of an unbounded log-ratio"),
                Cause("engine-logprob-mismatch", "the compared log-probs may be of other tokens"),
            ),
            fixes=(
                Fix("algorithm.kl.estimator", "k2", "grows with the square", Grade.UNSAFE),
                Fix("", "", "compare the tokens with the largest ratio: padding, special tokens"),
            ),
            first_step=first,
            last_step=int(kl.steps[spell.end]),
            value=value,
            limit=limit,
        )
        return


RULE = Rule(
    code="POL005",
    name="kl-estimator-overflow",
    family=Family.NUMERICS,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("kl|kl/max",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("POL004",),
)
