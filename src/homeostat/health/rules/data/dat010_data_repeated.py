"""The run makes many passes over the data.

## What it sees
More than `max_epochs` passes over the rows, done or asked for. It is a warning if the model knows
them by heart and nothing tells what it does with others: in a log of a known framework without an
evaluation, over `many` passes the loss fell from more than `new` nats to less than `learned`, and
to less than `share` of what it was.

## Why it matters
After a few passes a model repeats its rows; in RL, prompts that were solved long ago fill the
batches.

## Likely causes
- data-repeated: little data for many steps.

## What to do
Stop earlier, or find more data. Watch the evaluation. Rows whose answers follow a simple pattern
bring the loss to 0 as well: a few rows that were never trained on tell the two apart.

## Known false alarms
Tiny tasks that are learned by heart on purpose, and runs that are evaluated elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_epochs: float = option(5.0, "Passes over the rows that are usual.")
    many: float = option(8.0, "Passes after which rows can be known by heart.")
    new: float = option(0.7, "Loss, in nats, of rows that are new to the model.")
    learned: float = option(0.05, "Loss, in nats, of rows that are known by heart.")
    share: float = option(0.05, "Share of the first loss that is left of it then.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    epochs = needed(view, "epoch")
    done = max(epochs.latest, view.number("trainer.epochs") or 0.0)
    if done <= options.max_epochs:
        return
    by_heart = _by_heart(view, epochs.latest, options)
    if by_heart is not None:
        yield by_heart
        return
    yield Sighting(
        message=f"The rows are passed over {done:.3g} times (usual: up to "
        f"{options.max_epochs:g}): the model will know them by heart. Watch the evaluation.",
        causes=(Cause("data-repeated", f"{done:.3g} passes over the same rows"),),
        fixes=(Fix("trainer.epochs", "3", "fewer passes", Grade.UNSAFE),),
        first_step=int(epochs.steps[0]),
        last_step=int(epochs.steps[-1]),
        value=done,
        limit=options.max_epochs,
    )


def _by_heart(view: RunView, passes: float, options: Options) -> Sighting | None:
    """Return the warning for rows that are known by heart in a run that evaluates nothing."""
    loss = view.series("train/loss")
    is_evaluated = any(name.startswith("eval") for name in view.metrics)
    if loss is None or is_evaluated or view.framework.name == "unknown" or passes < options.many:
        return None
    loss = loss.finite()
    if len(loss) < 6:
        return None
    first = float(np.median(loss.head(3).values))
    last = float(np.median(loss.tail(max(3, len(loss) // 10)).values))
    if first < options.new or not 0.0 < last < min(options.learned, options.share * first):
        return None
    below = loss.steps[loss.values < options.learned]
    return Sighting(
        message=f"Training loss fell from {first:.3g} to {last:.2g} over {passes:.3g} passes, and "
        "nothing was evaluated: the model knows these rows by heart, and the log does not tell "
        "what it does with others. Score rows that were held out; only if they are as easy, the "
        "answers follow a simple pattern instead.",
        evidence=(
            f"train/loss {first:.3g} -> {last:.2g}, below {options.learned:g} since step "
            f"{int(below[0])}",
            f"{passes:.3g} passes over the same rows, no evaluation",
        ),
        causes=(
            Cause("data-repeated", f"{passes:.3g} passes over the same rows"),
            Cause("overfitting", "if held-out rows are far harder than the trained ones"),
            Cause("trained-share-tiny", "if the labels cover only tokens that never change"),
        ),
        fixes=(
            Fix("data.validation_share", "0.02", "holds rows out", Grade.UNSAFE),
            Fix("trainer.epochs", "3", "fewer passes", Grade.UNSAFE),
        ),
        first_step=int(below[0]),
        last_step=int(loss.steps[-1]),
        value=last,
        limit=options.learned,
        level=Level.WARN,
        confidence=Confidence.INFERRED,
    )


RULE = Rule(
    code="DAT010",
    name="data-repeated",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("epoch",),
    kinds=(Kind.SFT, Kind.PREFERENCE, Kind.REWARD_MODEL),
    options=Options,
)
