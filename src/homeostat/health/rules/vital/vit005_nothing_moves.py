"""A vital metric is exactly 0 from the first step on, or exactly the same number for many steps.

## What it sees
Loss, token accuracy or gradient norm that is 0 in every record (in RL only the gradient norm: the
loss of GRPO prints as 0 by construction); a loss of fine-tuning that falls from ordinary values to
exactly 0 and stays there for 5 records; or a training loss that is the same number in the newest 10
records, an evaluation loss in 4, although the learning rate is not 0. If a rule knows why, that
finding is shown instead.

## Why it matters
No optimizer gives the same number twice. The run looks as if it trained, but it does not.

## Likely causes
- all-labels-masked: the loss and the accuracy have no token to be computed over.
- nan-loss: trainers print a loss that is not finite as 0.
- no-gradient-flow: no trained weight takes part in the computation.
- trained-weights-unmoved: gradients arrive, and the weights stay as they are.

## What to do
Look at one row with its labels. Count the parameters that require gradients. Compare a weight
before and after an update.

## Known false alarms
A metric that was printed with few decimals, or with two digits, is not judged, nor one at a
learning rate of 0 (LRN007), nor one that is repeated in each row until its next value is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vital_signs.metrics import frozen, zero, zero_since


def check(view: RunView, _: object) -> Iterator[Sighting]:
    zeros = list(zero(view))
    if zeros:
        yield _all_zero(view, zeros)
        return
    since = zero_since(view)
    if since is not None:
        yield _gone(view, since)
        return
    for name in frozen(view):
        yield _frozen(view, name)
        return


def _all_zero(view: RunView, names: Sequence[str]) -> Sighting:
    series = view.metrics[names[0]]
    both = " and ".join(names)
    is_loss = any(name.endswith(("loss", "accuracy")) for name in names)
    why = f"{both} exactly 0 in all {len(series)} records"
    masked = Cause("all-labels-masked", why)
    cut = Cause("no-gradient-flow", why)
    return Sighting(
        message=f"{both} {'is' if len(names) == 1 else 'are'} exactly 0 from step "
        f"{int(series.steps[0])} on: nothing is trained. Look at one row with its labels, and "
        "count the parameters that require gradients.",
        evidence=tuple(f"{name} is 0 in {len(view.metrics[name])} records" for name in names),
        causes=(masked, cut) if is_loss else (cut,),
        fixes=(Fix("model.chat_template", "the model's own", "answers are found by its markers"),)
        if is_loss
        else (),
        first_step=int(series.steps[0]),
        last_step=int(series.steps[-1]),
        value=0.0,
        level=Level.ERROR if is_loss else None,
        family=Family.DATA if is_loss else None,
    )


def _gone(view: RunView, since: int) -> Sighting:
    loss = view.metrics["train/loss"]
    before = loss.before(since).latest
    why = f"the loss was {before:.3g}, and is exactly 0 since step {since}"
    return Sighting(
        message=f"The loss is exactly 0 since step {since}, after {before:.3g}: some trainers "
        "print a loss that is not finite as 0. Go back to the checkpoint before, and find the "
        "batch.",
        evidence=(why,),
        causes=(Cause("nan-loss", why), Cause("nan-update-poisoned-weights", "and it stays so")),
        fixes=(Fix("checkpoint.load_step", f"before {since}", "weights that are finite"),),
        first_step=since,
        last_step=int(loss.steps[-1]),
        value=0.0,
        level=Level.ERROR,
        family=Family.NUMERICS,
    )


def _frozen(view: RunView, name: str) -> Sighting:
    series = view.metrics[name]
    same = series.values == series.latest
    start = len(series) - int(same[::-1].argmin() if not same.all() else len(series))
    first = int(series.steps[start])
    why = f"{name} is exactly {series.latest:.6g} in the newest {len(series) - start} records"
    return Sighting(
        message=f"{name} has been exactly {series.latest:.6g} since step {first}: nothing is "
        "trained. Compare a weight before and after an update, and count the parameters that "
        "require gradients.",
        evidence=(why,),
        causes=(Cause("trained-weights-unmoved", why), Cause("no-gradient-flow", why)),
        first_step=first,
        last_step=int(series.steps[-1]),
        value=series.latest,
    )


RULE = Rule(
    code="VIT005",
    name="vital-sign-frozen",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm|train/token_accuracy|eval/loss",),
    yields_to=("NUM", "DAT", "LRN", "RWD", "POL", "VIT004", "GEN", "QNT", "CFG"),
)
