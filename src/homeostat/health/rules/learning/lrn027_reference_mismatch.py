"""Before the first update the policy already differs from the reference of preference training.

## What it sees
At the first step, whose rewards are measured before anything was updated, the implicit rewards are
not 0: the log-ratio of policy to reference, rewards / beta, is more than `min_nats` and more than
`min_share` of the answers' log-prob. Where the algorithm is not known, or the first record is of a
later step up to `max_first_step`: the log-ratio is more than `far_nats` in the first record and
stays about there in the next two, while the loss is not below log 2, so that no learning explains
it. Rewards that are a fixed multiple of the log-probs have no reference and are not judged.

## Why it matters
The rewards are log-ratios to the reference. If the reference is not the policy that the run starts
from, the loss begins with a bias that has nothing to do with the pairs, and part of the training
only undoes this bias.

## Likely causes
- reference-mismatch: the reference is another checkpoint, another precision or another template
  than the policy starts with; or its log-probs were computed for other rows.

## What to do
Let the reference be the policy that the run starts from (the default), or start the policy from the
checkpoint of the reference. Delete log-probs that were precomputed for other data. The log-probs of
one row, under the policy before the first update and under the reference, decide: they must agree.

## Known false alarms
A reference that is meant to be another model: allow the finding (health.allow). Frameworks that
average the first record over several updates show values that are no longer 0; there only a
distance that learning does not explain is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

# Algorithms whose rewards are log-ratios to a reference.
WITH_REFERENCE = ("dpo", "ipo", "kto")
# Loss of pairs of which nothing was learned: log 2, less its noise.
_NOTHING_LEARNED = 0.65


class Options(RuleOptions):
    min_nats: float = option(0.2, "Mean log-ratio of a completion that is no rounding error.")
    min_share: float = option(0.02, "Share of the answers' log-prob that it must be, too.")
    beta: float = option(0.1, "The beta of runs whose settings do not tell it.")
    max_first_step: int = option(10, "Latest step of a first record that is judged.")
    far_nats: float = option(10.0, "Log-ratio that a few updates do not make without learning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    algorithm = str(view.settings.get("algorithm.type", "")).lower()
    if algorithm and algorithm not in WITH_REFERENCE:
        return
    sides = [needed(view, f"preference/{side}_reward") for side in ("chosen", "rejected")]
    if any(not len(side) for side in sides):
        return
    if not algorithm or any(int(side.steps[0]) > 1 for side in sides):
        yield from _far_from_start(view, sides, options)
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


def _far_from_start(view: RunView, sides: Sequence[Series], options: Options) -> Iterator[Sighting]:
    """Report rewards that are far from 0 in the first record and stay there without learning."""
    loss = view.series("train/loss")
    starts = [side.finite().head(3) for side in sides]
    if loss is None or any(len(start) < 3 for start in starts):
        return
    if int(starts[0].steps[0]) > options.max_first_step or _has_no_reference(view, sides):
        return
    beta = view.settings.get("preference.beta")
    beta = float(beta) if isinstance(beta, int | float) and beta > 0 else options.beta
    worst = max(starts, key=lambda start: abs(float(start.values[0])))
    nats = float(worst.values[0]) / beta
    stays = np.abs(worst.values[1:] - worst.values[0]).max() < 0.5 * abs(worst.values[0])
    early = median(loss.finite().head(3).values)
    if abs(nats) <= options.far_nats or not stays or early < _NOTHING_LEARNED:
        return
    yield Sighting(
        message=f"In the first record, of step {int(worst.steps[0])}, the log-ratio of policy to "
        f"reference is already {nats:.3g} nats, and it stays about there while the loss is "
        f"{early:.3g} (guessing: 0.693): it was there before the run. The reference is another "
        "model than the policy starts from, or its log-probs are of other rows or another "
        "template. Score one row with both before the first update to see which.",
        evidence=tuple(
            f"preference/{name}_reward {', '.join(f'{v:.3g}' for v in start.values)} at the start "
            f"(beta {beta:g})"
            for name, start in zip(("chosen", "rejected"), starts, strict=True)
        ),
        causes=(
            Cause("reference-mismatch", "the distance neither grows nor separates the pairs"),
            Cause("lr-too-high", "if the rate is so high that a few updates destroy the policy"),
        ),
        fixes=(
            Fix("reference.type", "initial", "the policy that the run starts from", Grade.UNSAFE),
        ),
        first_step=int(worst.steps[0]),
        last_step=int(worst.steps[-1]),
        value=abs(nats),
        limit=options.far_nats,
        confidence=Confidence.INFERRED,
    )


def _has_no_reference(view: RunView, sides: Sequence[Series]) -> bool:
    """Return whether rewards are a fixed multiple of the log-probs, as in ORPO, CPO and SimPO.

    Without log-probs it is not known, and the run is taken for one of them.
    """
    logp = view.series("preference/chosen_logp")
    if logp is None:
        return True
    common, at, other = np.intersect1d(sides[0].steps, logp.steps, return_indices=True)
    if len(common) < 3:
        return True
    ratios = sides[0].values[at] / np.where(logp.values[other] == 0.0, np.nan, logp.values[other])
    return bool(np.nanstd(ratios) <= 0.05 * abs(np.nanmean(ratios)))


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
    ),
    kinds=(Kind.PREFERENCE,),
    options=Options,
)
