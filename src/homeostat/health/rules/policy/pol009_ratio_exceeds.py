"""The mean ratio of new to old policy is far from 1.

## What it sees
The mean ratio above `limit`, or below its inverse, in `fire` of the newest `window` records.

## Why it matters
Ratios average to 1 over samples of the old policy. A mean of 2 or 10 says that the policy moved out
of reach of its samples within one rollout: estimates mean nothing, and some trainers skip such
batches, so that the samples are lost.

## Likely causes
- too-many-updates-per-rollout: many epochs or mini-batches on the same samples.
- lr-too-high: one update carries too far.
- kl-negative-generation-kwargs: samples were not drawn from the old policy; its KL is negative.
- ppo-ratio-exceeds-threshold: outlier tokens dominate the mean.

## What to do
Lower the learning rate, fewer updates per rollout, larger batches. Raising the threshold only hides
it. Check the sampling settings where KL is negative.

## Known false alarms
A few outlier tokens in tiny batches: the mean recovers at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import newest, raw_number
from homeostat.health.view import Kind, RunView
from homeostat.health.windows import newest_spell


class Options(RuleOptions):
    limit: float = option(2.0, "Mean ratio that is too far from 1.")
    fire: int = option(3, "Records that must show it ...")
    window: int = option(5, "... among so many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    ratio = view.series("policy/ratio_mean")
    assert ratio is not None, "needs says so"
    far = (ratio.values > options.limit) | (ratio.values < 1.0 / options.limit)
    spell = newest_spell(far, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    value, first = float(ratio.values[spell.end]), int(ratio.steps[spell.start])
    yield Sighting(
        message=f"The mean ratio of new to old policy is {value:.3g} since step {first} (limit "
        f"{options.limit:g}). Lower the learning rate or take fewer updates per rollout.",
        evidence=(f"policy/ratio_mean {value:.3g} at step {ratio.steps[spell.end]}",),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            Fix("trainer.updates_per_step", "1", "samples stay on-policy", Grade.UNSAFE),
            Fix("rollout.prompts_per_step", "more", "steadier updates", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(ratio.steps[spell.end]),
        value=value,
        limit=options.limit,
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
    explains=("POL006", "POL007"),
)
