"""Single steps had a loss or gradient that was not finite; the run then continued normally.

## What it sees
One or a few records that are not finite, with finite ones after them; or one evaluation in
`evaluations` or more whose held-out loss is not finite, while those before and after it are. The
latter is a warning.

## Why it matters
If the trainer skipped the update, nothing is lost. If it had applied the update, no later value
would be finite; so it did not, or only the logged value was affected. All evaluations score the
same rows, so a loss that is not finite once comes from the weights of that step: their activations
overflow on a held-out row, and the best checkpoint cannot be chosen among such values.

## Likely causes
- nonfinite-isolated: a broken row, an empty answer, loss scaling in fp16.
- fp16-overflow: activations overflow on a row of the evaluation.

## What to do
Nothing now. If it comes back, look at the rows of those steps. After an evaluation that is not
finite, evaluate that checkpoint again in fp32 or bf16, and leave it out when you choose the best.

## Known false alarms
Evaluations on other rows each time: a row without an answer may be among them once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import broken
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.2, "Share of the records up to which they are isolated.")
    evaluations: int = option(4, "Evaluations from which on one stands out.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    yield from _in_training(view, options)
    yield from _in_evaluation(view, options)


def _in_evaluation(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = view.series("eval/loss")
    if loss is None or len(loss) < options.evaluations:
        return
    at = np.flatnonzero(~np.isfinite(loss.values))
    if len(at) != 1 or at[0] in (0, len(loss) - 1):
        return
    step = int(loss.steps[at[0]])
    yield Sighting(
        message=f"The evaluation at step {step} has no finite loss; the {len(loss) - 1} others do. "
        "Leave that checkpoint out when you choose the best, and look for overflow.",
        causes=(
            Cause("fp16-overflow", "the same rows were finite with other weights"),
            Cause("nonfinite-isolated", "finite before and after"),
        ),
        fixes=(Fix("trainer.precision", "bf16", "its range is that of fp32", Grade.UNSAFE),),
        first_step=step,
        last_step=step,
        value=1.0,
        level=Level.WARN,
    )


def _in_training(view: RunView, options: Options) -> Iterator[Sighting]:
    bad = broken(view)
    if bad is None:
        return
    at = np.flatnonzero(bad.values)
    if not len(at) or bad.values[-2:].any() or len(at) > options.max_share * len(bad):
        return
    noun = "step" if len(at) == 1 else "steps"
    steps = ", ".join(str(step) for step in bad.steps[at][:5])
    yield Sighting(
        message=f"Loss or gradient was not finite at {noun} {steps} and finite again after: "
        "such an update was skipped. Look at the rows if it happens again.",
        causes=(Cause("nonfinite-isolated", "finite before and after"),),
        fixes=(Fix("data.bad_rows", "drop", "leaves broken rows out"),),
        first_step=int(bad.steps[at[0]]),
        last_step=int(bad.steps[at[-1]]),
        value=float(len(at)),
    )


RULE = Rule(
    code="NUM006",
    name="nonfinite-isolated",
    family=Family.NUMERICS,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm|eval/loss",),
    options=Options,
)
