"""The reference moves along with the policy, so the KL penalty has no effect.

## What it sees
The KL to the reference is 0 (below `max_kl`) in all of the newest `fire` records from step
`from_step` on, while the policy is updated: the KL of a step's own update, or the gradient norm at
a rate above 0, is not 0. This is only information if every KL is exactly 0 and the settings do not
say that there is a penalty: several trainers write 0 for a KL that they do not compute.

## Why it matters
A penalty on the distance from the reference keeps the policy near the model that it started from.
Here the policy is compared with itself: it may drift anywhere, and the metric still looks good.

## Likely causes
- reference-follows-policy: the reference is the same object as the policy, was loaded from its
  newest weights, or is refreshed at every step; with an adapter, the adapter is not switched off
  when the reference is scored.

## What to do
Let the reference be a copy of the weights that the run starts from, or switch the adapter off for
it. If it is meant to be refreshed, do so every hundred steps or more.

## Known false alarms
The rule does not judge a KL that is printed with few decimals, nor a run whose settings refresh the
reference or have a penalty of 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_climbing, needed, prints_zero
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_kl: float = option(1e-10, "KL per token that is rounding.")
    fire: int = option(8, "Number of newest records that must show it.")
    from_step: int = option(3, "Before this step a policy is near its reference by right.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    kl = needed(view, "kl").finite().since(options.from_step)
    newest = kl.tail(options.fire)
    if len(newest) < options.fire or prints_zero(view, "kl"):
        return
    most = float(np.abs(newest.values).max())
    if most > options.max_kl or not _is_updated(view, options):
        return
    # In a warm-up from almost 0 a policy hardly moves.
    if view.number("reference.refresh_steps") is not None or is_climbing(view):
        return
    penalty = view.number("algorithm.kl.coefficient")
    if penalty == 0.0:
        return
    is_uncomputed = penalty is None and not kl.values.any()
    bad = np.abs(kl.values) > options.max_kl
    first = int(kl.steps[len(bad) - int(bad[::-1].argmax()) if bad.any() else 0])
    yield Sighting(
        message=f"KL to the reference is 0 since step {first}, although the policy is updated: "
        + ("no KL is computed, as without a penalty, or " if is_uncomputed else "")
        + "the reference moves along with it, and the penalty has no effect. Let the reference be "
        "a copy of the weights that the run starts from.",
        evidence=(
            f"kl at most {float(np.abs(newest.values).max()):.1g} over {len(newest)} records",
        ),
        causes=(
            Cause("reference-follows-policy", "KL stays 0 while the policy moves"),
            Cause("kl-wrong-reference", "the reference is not the model that the run starts from"),
        ),
        fixes=(Fix("reference.type", "initial", "a copy of the first weights", Grade.UNSAFE),),
        first_step=first,
        last_step=int(newest.steps[-1]),
        value=most,
        limit=options.max_kl,
        level=Level.INFO if is_uncomputed else None,
    )


def _is_updated(view: RunView, options: Options) -> bool:
    """Return whether something says that the policy moves."""
    moved = view.series("policy/update_kl")
    if moved is not None and float(np.nanmax(moved.values)) > 10 * options.max_kl:
        return True
    norm, rate = view.series("grad_norm"), view.series("learning_rate")
    if norm is None or rate is None:
        return False
    return bool(median(norm.tail(options.fire).values) > 1e-6) and rate.latest > 1e-9


RULE = Rule(
    code="POL022",
    name="reference-follows-policy",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("kl",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("VIT005",),
)
