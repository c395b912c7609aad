"""The mean ratio of new to old policy is far from 1.

## What it sees
The mean ratio is above `limit`, or below its inverse, in `fire` of the newest `window` records. Or,
with several updates per rollout: in one record the policy moved `max_kl` nats per token away from
the one that sampled, with ratios above `max_ratio`, and since then the reward is less than half of
what it was.

## Why it matters
Over samples of the old policy, ratios average to 1. A mean of 2 or 10 says that the policy moved
far away from its samples within one rollout: the gradient estimates mean nothing, and some trainers
skip such batches, so that the samples are lost.

## Likely causes
- too-many-updates-per-rollout: many epochs or mini-batches on the same samples.
- lr-too-high: one update moves the policy too far.
- kl-negative-generation-kwargs: the samples were not drawn from the old policy, so the KL is
  negative.
- ppo-ratio-exceeds-threshold: outlier tokens dominate the mean.

## What to do
Lower the learning rate, take fewer updates per rollout, use larger batches. Raising the threshold
only hides the problem. If the KL is negative, check the sampling settings.

## Known false alarms
A few outlier tokens in tiny batches; the mean is normal again in the next records.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import raw_number
from homeostat.health.rules.signs import newest
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(2.0, "Mean ratio that is too far from 1.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(5, "... within a window of this many.")
    max_kl: float = option(0.2, "Nats a token from the policy that sampled, in one step.")
    many: int = option(4, "Updates per rollout from which on their number is to blame first.")
    max_ratio: float = option(10.0, "Largest ratio that goes with it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    ratio = view.series("policy/ratio_mean")
    assert ratio is not None, "needs says so"
    far = (ratio.values > options.limit) | (ratio.values < 1.0 / options.limit)
    spell = newest_spell(far, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        yield from _thrown(view, options)
        return
    value, first = float(ratio.values[spell.end]), int(ratio.steps[spell.start])
    limit = options.limit if value > 1.0 else 1.0 / options.limit
    yield Sighting(
        message=f"The mean ratio of new to old policy is {value:.3g} since step {first} (limit "
        f"{limit:g}). Lower the learning rate or take fewer updates per rollout.",
        evidence=(f"policy/ratio_mean {value:.3g} at step {ratio.steps[spell.end]}",),
        causes=tuple(_causes(view)),
        fixes=_FIXES,
        first_step=first,
        last_step=int(ratio.steps[spell.end]),
        value=value,
        limit=limit,
    )


def _thrown(view: RunView, options: Options) -> Iterator[Sighting]:
    """One step of many updates threw the policy away, and the reward with it."""
    moved, highest = view.series("policy/update_kl"), view.series("policy/ratio_max")
    reward, updates = view.series("reward"), view.number("trainer.updates_per_step")
    if moved is None or highest is None or reward is None or (updates or 1) < 2:
        return
    moved, highest = moved.on(highest)
    at = (moved.values > options.max_kl) & (highest.values > options.max_ratio)
    for place in np.flatnonzero(at):
        step = int(moved.steps[place])
        # The samples of a step are those of the policy before its updates.
        before = reward.before(step + 1).finite().values[-5:]
        after = reward.since(step + 1).finite().values
        if len(before) and len(after) >= 3 and median(after[-5:]) < 0.5 * median(before):
            yield _after_throw(view, step, (before, after), float(moved.values[place]), options)
            return


def _after_throw(
    view: RunView,
    step: int,
    rewards: tuple[FloatArray64, FloatArray64],
    kl: float,
    options: Options,
) -> Sighting:
    was, now = (median(values) for values in rewards)
    updates = view.number("trainer.updates_per_step") or 1
    # A few updates per rollout are usual: then it is their size that carried so far.
    often = Cause("too-many-updates-per-rollout", f"{updates:.0f} updates on the same samples")
    large = Cause("lr-too-high", "each of them carries too far")
    is_often = updates >= options.many
    return Sighting(
        message=f"The {updates:.0f} updates of step {step} carried the policy {kl:.2g} nats a "
        f"token away from the samples (limit {options.max_kl:g}), and the reward fell from "
        f"{was:.2g} to {now:.2g}. Go back to before it, with "
        + ("fewer updates per rollout." if is_often else "a lower learning rate."),
        evidence=(f"policy/update_kl {kl:.2g} at step {step}", f"reward {was:.2g} -> {now:.2g}"),
        causes=(often, large) if is_often else (large, often),
        fixes=_FIXES,
        first_step=step,
        last_step=view.last_step,
        value=kl,
        limit=options.max_kl,
    )


def _causes(view: RunView) -> Iterator[Cause]:
    updates = view.number("trainer.updates_per_step")
    epochs = raw_number(view, "ppo_epochs", "num_iterations", "num_ppo_epochs")
    kl = newest(view, "kl", "kl/sequence")
    yield Cause("ppo-ratio-exceeds-threshold", "the policy left its own samples behind")
    if max(updates or 1, epochs or 1) > 1:
        times = max(updates or 1, epochs or 1)
        yield Cause("too-many-updates-per-rollout", f"{times:.0f} passes over the same samples")
    yield Cause("lr-too-high", "one update carries too far")
    if kl is not None and kl < 0.0:
        yield Cause("kl-negative-generation-kwargs", f"KL is negative, {kl:.3g}")


_FIXES = (
    Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
    Fix("trainer.updates_per_step", "1", "samples stay on-policy", Grade.UNSAFE),
    Fix("rollout.prompts_per_step", "more", "steadier updates", Grade.UNSAFE),
)

RULE = Rule(
    code="POL009",
    name="ppo-ratio-exceeds-threshold",
    family=Family.POLICY,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("policy/ratio_mean",),
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "POL002",
        "POL006",
        "POL007",
        "POL013",
        "RWD001",
        "RWD006",
        "RWD015",
        "GEN001",
    ),
)
