"""The gradient is exactly 0 at every step although there is something to learn.

## What it sees
`fire` records in a row (and the newest) with a gradient norm of exactly 0, while the loss is above
0 (SFT) or the rewards of a group differ (RL), and the learning rate is not 0.

## Why it matters
Nothing is trained. The run goes on as if it were.

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
from homeostat.health.view import Kind, RunView
from homeostat.health.windows import newest_spell


class Options(RuleOptions):
    fire: int = option(5, "Records in a row that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
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
                    "trl": "gradient_checkpointing_kwargs={'use_reentrant': False}",
                    "axolotl": "gradient_checkpointing_kwargs.use_reentrant",
                },
            ),
        ),
        first_step=first,
        last_step=int(norm.steps[-1]),
        value=0.0,
    )


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
    needs=("grad_norm",),
    options=Options,
    explains=("LRN004", "LRN006"),
)
