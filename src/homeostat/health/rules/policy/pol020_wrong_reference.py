"""KL to the reference is far from 0 before the policy could have moved.

## What it sees
The first record of the run, at step `max_first_step` or earlier, has a KL per token of more than
`limit` nats, and the next records are not much larger: the distance was there from the start. The
engine agrees with the trainer, and the updates of the step moved the policy by much less.

## Why it matters
The penalty is meant to hold the policy at the model that it starts from. With another reference the
penalty pulls the policy away from its start, towards a model that nobody chose, at the cost of
reward.

## Likely causes
- kl-wrong-reference: the reference is another checkpoint than the policy's, or the same one with
  another adapter, precision, temperature or chat template.

## What to do
Let the reference be the policy that the run starts from. In a homeostat run that is the default:
remove `reference`. Where an SFT checkpoint or an adapter was loaded as the policy, load it as the
reference, too. If another checkpoint is what you want, expect the reward to fall first, and give
`algorithm.kl.target` a value above the KL at the start.

## Known false alarms
A reference that was chosen on purpose (`reference.path`, or the model without its adapter): that is
reported as information only, and so is a KL that falls by itself while the reward rises. Records
that average many steps: KL may have grown within the first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import gap_of
from homeostat.health.rules.readings import needed
from homeostat.health.rules.signs import trend
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.05, "KL per token, in nats, that neither rounding nor a step explains.")
    max_first_step: int = option(10, "The first record must be of this step or an earlier one.")
    growth: float = option(2.0, "Above so many times the first KL, the policy has moved away.")
    moved_share: float = option(0.3, "Part of the KL that the step's own updates may explain.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    kl = needed(view, "kl").finite()
    if not len(kl) or int(kl.steps[0]) > options.max_first_step:
        return
    first, step = abs(kl.first), int(kl.steps[0])
    later = np.abs(kl.values[1:4])
    # One record may be a mean over steps in which KL grew; those after it tell.
    if first <= options.limit or len(later) < 2:
        return
    if median(later) > options.growth * first or _moved(view, first, step, options):
        return
    gap = gap_of(view)
    if gap is not None and abs(gap.series.finite().first) > gap.limit:
        # The engine samples from other weights: what the trainer says of its tokens means little.
        return
    yield _sighting(view, first, step, options)


def _moved(view: RunView, first: float, step: int, options: Options) -> bool:
    """Return whether the updates of the first record's steps explain its KL."""
    moved = view.series("policy/update_kl")
    if moved is None or int(moved.steps[0]) != step:
        return False
    return abs(moved.first) > options.moved_share * first


def _sighting(view: RunView, first: float, step: int, options: Options) -> Sighting:
    chosen = _chosen(view)
    start = f"KL to the reference is {first:.3g} nats per token at step {step}, before the policy "
    if chosen:
        message = (
            f"{start}could move: {chosen}. If that is meant, the penalty pulls towards that model: "
            "expect the reward to fall first, and give KL a target above this value."
        )
    else:
        message = (
            f"{start}could move (limit {options.limit:g}): the reference is not the model that the "
            "run starts from. Compare the checkpoint, adapter, precision and chat template of both."
        )
    return Sighting(
        message=message,
        evidence=(f"kl {first:.3g} at step {step}, and no growth in the records after it",),
        causes=(Cause("kl-wrong-reference", chosen or "policy and reference differ at the start"),),
        fixes=_fixes(is_chosen=bool(chosen)),
        first_step=step,
        last_step=step,
        value=first,
        limit=options.limit,
        level=Level.INFO if chosen or _does_no_harm(view) else None,
    )


def _does_no_harm(view: RunView) -> bool:
    """Return whether the policy came nearer to the reference and earns more than before."""
    kl, reward = trend(view.series("kl")), trend(view.series("reward"))
    if kl is None or reward is None or not kl.falls:
        return False
    return kl.end < 0.7 * kl.start and reward.is_real and reward.change > 0.0


def _chosen(view: RunView) -> str:
    """Return how the settings choose another reference; empty if they do not."""
    path, model = view.setting("reference.path"), view.setting("model.path")
    if path is not None and path != model:
        return f"the reference is another checkpoint than the policy's ({path})"
    if view.setting("reference.type") == "adapter_off" and view.setting("lora.path") is not None:
        return "the reference is the model without the adapter that the policy starts with"
    return ""


def _fixes(*, is_chosen: bool) -> tuple[Fix, ...]:
    if is_chosen:
        return (Fix("algorithm.kl.target", "above the KL at the start", "adapts the penalty"),)
    same = "the checkpoint that the policy starts from"
    return (Fix("reference.path", same, "KL starts at 0", Grade.UNSAFE),)


RULE = Rule(
    code="POL020",
    name="kl-wrong-reference",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("kl",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("POL004",),
)
