"""The gradient is exactly 0 at every step although there is something to learn.

## What it sees
`fire` records in a row (and the newest) with a gradient norm of exactly 0, while the loss is above
0 (SFT) or the rewards of a group differ (RL), and the learning rate is not 0. Of preference runs
also: implicit rewards of chosen and rejected answers that are exactly 0 for as many records, a
loss of ln 2, and a rate above 0: the policy is still its reference.

## Why it matters
Nothing is trained, although the run continues as if it were.

## Likely causes
- no-gradient-flow: the trained weights are not part of the computation: all parameters frozen, an
  adapter that is not attached, inputs that need no gradient under re-entrant checkpointing, or a
  loss that was detached.
- micro-batch-exceeds-mini-batch: with more rows per micro-batch than the update has, some trainers
  accumulate nothing.

## What to do
Count the parameters that train, and see that the adapter's are among them. With an adapter and
gradient checkpointing use the non-re-entrant kind, or let the inputs require gradients.

## Known false alarms
Steps whose answers all score alike have no gradient, and some trainers skip them: single zeros are
ordinary and not counted. A norm printed with few decimals is not an exact 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import has_adapter, is_true, needed, prints_zero, raw
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(5, "Number of consecutive records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    if view.kind is Kind.PREFERENCE and view.series("preference/margin") is not None:
        yield from _still_the_reference(view, options)
        return
    if view.series("grad_norm") is None:
        return
    norm = needed(view, "grad_norm")
    if prints_zero(view, "grad_norm") or not np.any(norm.values == 0):
        return
    spell = newest_spell(norm.values == 0, fire=options.fire)
    if spell is None or not spell.is_open:
        return
    first = int(norm.steps[spell.start])
    reason = _something_to_learn(view, first)
    rates = view.series("learning_rate")
    if reason is None or (rates is not None and not np.any(rates.since(first).values)):
        return
    yield Sighting(
        message=f"The gradient norm is exactly 0 since step {first} although {reason}: no trained "
        "weight takes part in the computation. Count the parameters that require gradients.",
        evidence=(f"grad_norm 0 over {len(spell)} records", reason),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("lora.targets", "names of the model's layers", "an adapter that is attached"),
            Fix(
                "trainer.gradient_checkpointing",
                "false",
                "re-entrant checkpointing cuts the gradient of an adapter",
                theirs={
                    "trl": 'gradient_checkpointing_kwargs={"use_reentrant": false}',
                    "axolotl": 'gradient_checkpointing_kwargs={"use_reentrant": false}',
                },
            ),
        ),
        first_step=first,
        last_step=int(norm.steps[-1]),
        value=0.0,
    )


def _still_the_reference(view: RunView, options: Options) -> Iterator[Sighting]:
    """Log-probs of policy and reference that are the same to the last bit, record after record."""
    margin, loss = needed(view, "preference/margin"), view.series("train/loss")
    sides = [view.series("preference/chosen_reward"), view.series("preference/rejected_reward")]
    names = ("preference/margin", "preference/chosen_reward", "preference/rejected_reward")
    if loss is None or any(prints_zero(view, name) for name in names):
        return
    spell = newest_spell(margin.values == 0, fire=options.fire)
    if spell is None or not spell.is_open:
        return
    first = int(margin.steps[spell.start])
    norm = view.series("grad_norm")
    moved = [one is not None and bool(np.any(one.since(first).values)) for one in (*sides, norm)]
    even = bool(np.all(np.abs(loss.since(first).values - np.log(2.0)) < 1e-3))
    if any(moved) or not even or not _is_trained(view, first, options.fire):
        return
    yield Sighting(
        message="The implicit rewards of chosen and rejected answers are exactly 0 since step "
        f"{first}, and the loss stays at ln 2 = 0.6931: the policy is still its reference. See "
        "that the adapter is loaded for training, and count the parameters that train.",
        evidence=(f"preference/margin 0 over {len(spell)} records", f"loss {loss.latest:.4f}"),
        causes=(
            *_causes(view),
            Cause("update-below-resolution", "updates may be too small for the weights' precision"),
        ),
        fixes=(
            Fix(
                "lora.targets",
                "names of the model's layers",
                "an adapter that is attached, and loaded for training",
            ),
        ),
        first_step=first,
        last_step=int(margin.steps[-1]),
        value=0.0,
    )


def _is_trained(view: RunView, first: int, fire: int) -> bool:
    """Return whether the rate was above 0 in enough of the records since a step."""
    rates = view.series("learning_rate")
    if rates is None:
        return (view.number("trainer.lr") or 0.0) > 0.0
    return int((rates.since(first).finite().values > 0).sum()) >= fire


def _something_to_learn(view: RunView, first: int) -> str | None:
    if view.kind is Kind.RL:
        spread = view.series("reward_std", "advantages/std")
        late = spread.since(first).finite() if spread is not None else None
        if late is None or not len(late) or float(np.mean(late.values > 1e-6)) < 0.8:
            return None
        return f"the rewards of a group differ (deviation {float(late.values.mean()):.3g})"
    loss = view.series("train/loss")
    late = loss.since(first).finite() if loss is not None else None
    if late is None or not len(late) or float(late.values.min()) < 0.05:
        return None
    return f"the loss is {float(late.values.mean()):.4g}"


def _causes(view: RunView) -> Iterator[Cause]:
    yield Cause("no-gradient-flow", "exactly 0 is not small: nothing is connected to the loss")
    reentrant = raw(view, "use_reentrant", "gradient_checkpointing_kwargs.use_reentrant")
    if is_true(reentrant) and has_adapter(view):
        yield Cause("checkpointing-mode-mismatch", "re-entrant checkpointing with an adapter")


RULE = Rule(
    code="LRN008",
    name="no-gradient-flow",
    family=Family.LEARNING,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("grad_norm|preference/margin",),
    options=Options,
    explains=("LRN004", "LRN006"),
)
