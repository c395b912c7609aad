"""Before the first update the policy already differs from the reference of preference training.

## What it sees
At the first step, whose rewards are measured before anything was updated, the implicit rewards are
not 0: the log-ratio of policy to reference, rewards / beta, is more than `min_nats` and more than
`min_share` of the answers' log-prob.

## Why it matters
The rewards are log-ratios to the reference. If the reference is not the policy that the run starts
from, the loss begins with a bias that has nothing to do with the pairs, and part of the training
only undoes this bias.

## Likely causes
- reference-mismatch: the reference is another checkpoint, another precision or another template
  than the policy starts with; or its log-probs were computed for other rows.

## What to do
Let the reference be the policy that the run starts from (the default), or start the policy from the
checkpoint of the reference. Delete log-probs that were precomputed for other data.

## Known false alarms
A reference that is meant to be another model: allow the finding (health.allow). Frameworks that
average the first record over several updates show values that are no longer 0; only a record of
step 1 or before is judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView

# Algorithms whose rewards are log-ratios to a reference.
WITH_REFERENCE = ("dpo", "ipo", "kto")


class Options(RuleOptions):
    min_nats: float = option(0.2, "Mean log-ratio of a completion that is no rounding error.")
    min_share: float = option(0.02, "Share of the answers' log-prob that it must be, too.")
    beta: float = option(0.1, "The beta of runs whose settings do not tell it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    if str(view.settings.get("algorithm.type", "")).lower() not in WITH_REFERENCE:
        return
    sides = [needed(view, f"preference/{side}_reward") for side in ("chosen", "rejected")]
    if any(not len(side) or int(side.steps[0]) > 1 for side in sides):
        return
    beta = view.settings.get("preference.beta")
    beta = float(beta) if isinstance(beta, int | float) and beta > 0 else options.beta
    ratios = [float(side.values[0]) / beta for side in sides]
    worst = max(ratios, key=abs)
    logp = view.series("preference/chosen_logp")
    scale = abs(float(logp.values[0])) if logp is not None and len(logp) else 0.0
    limit = max(options.min_nats, options.min_share * scale)
    if not abs(worst) > limit:
        return
    path = view.settings.get("reference.path")
    why = f"reference.path={path}" if path else "at step 1 the policy is not its reference"
    yield Sighting(
        message="At step 1, before any update, the log-ratio of policy to reference is "
        f"{worst:.3g} nats (limit {limit:.2g}): the reference is not the policy that the run "
        "starts from.",
        evidence=tuple(
            f"preference/{name}_reward {float(side.values[0]):.3g} (beta {beta:g})"
            for name, side in zip(("chosen", "rejected"), sides, strict=True)
        ),
        causes=(Cause("reference-mismatch", why),),
        fixes=(
            Fix("reference.type", "initial", "the policy that the run starts from", Grade.UNSAFE),
        ),
        first_step=int(sides[0].steps[0]),
        last_step=int(sides[0].steps[0]),
        value=abs(worst),
        limit=limit,
    )


RULE = Rule(
    code="LRN027",
    name="reference-mismatch",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=(
        "preference/chosen_reward",
        "preference/rejected_reward",
        "setting:algorithm.type",
    ),
    kinds=(Kind.PREFERENCE,),
    options=Options,
)
