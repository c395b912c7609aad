"""The loss, and with it the gradient, is multiplied by the number of accumulated micro-batches.

## What it sees
One of these, each with more than one accumulation step as far as the number is known:
- two runs in one log that differ in their accumulation: the one with more has the larger loss,
  by about that number;
- a training loss of `factor` or more times the evaluation loss, at the first evaluation and at the
  median one, the quotient near the number of accumulation steps;
- where the number is not known, a training loss that is the same multiple, `steady` or more, of the
  evaluation loss at three evaluations or more;
- a training loss above that of guessing, which becomes an ordinary loss if divided by the
  accumulation steps.

## Why it matters
The gradient is too large by the same factor: clipping is always active, and the effective rate is
not the one that was set.

## Likely causes
- loss-not-normalised-by-grad-accum: the model's forward ignores the number of tokens of the whole
  update that the trainer passes to it, so each micro-batch is averaged separately and the averages
  are added up.

## What to do
Update the library, or accumulate less with larger micro-batches. homeostat's trainer divides by the
tokens of the whole update.

## Known false alarms
Evaluation on data that is far easier than the training data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, raw_number
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum_steps")
_COUNT = re.compile(r"accum[a-z_]{0,40}+\D{0,4}(\d{1,12})", re.I)
# Frameworks whose trainer has added the losses up, in some versions.
_ACCUMULATING = frozenset(
    {"transformers", "trl", "axolotl", "llama_factory", "ms_swift", "unsloth"}
)
# Guessing among 262,144 tokens costs 12.5 nats.
_MOST = 13.0


class Options(RuleOptions):
    factor: float = option(2.5, "Largest acceptable factor over the evaluation loss.")
    steady: float = option(3.5, "Least factor, at every evaluation, where no count is known.")
    spread: float = option(1.25, "How far such factors may lie apart, as a factor.")
    near: float = option(3.0, "Factor around the accumulation that still counts as near it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss")
    loss = loss.finite()
    count = raw_number(view, *_ACCUMULATION)
    if not len(loss):
        return
    found = (
        _two_runs(view, loss, count, options)
        or _against_eval(view, loss, count, options)
        or _steady_multiple(view, loss, count, options)
        or _against_guessing(loss, count)
    )
    if found is None:
        return
    why, quotient = found
    yield Sighting(
        message=f"{why}: the loss is added up over the accumulated micro-batches, not averaged. "
        "Update the library, or accumulate less with larger micro-batches.",
        evidence=(why,),
        causes=(Cause("loss-not-normalised-by-grad-accum", why),),
        fixes=(
            Fix(
                "trainer.micro_batch_rows",
                "more, with less accumulation",
                "one micro-batch per update needs no sum",
                theirs={
                    "transformers": "gradient_accumulation_steps",
                    "trl": "gradient_accumulation_steps",
                    "axolotl": "gradient_accumulation_steps",
                },
            ),
            Fix("", "update transformers and the trainer", "newer ones divide by all tokens"),
        ),
        first_step=int(loss.steps[0]),
        last_step=int(loss.steps[-1]),
        value=quotient,
    )


def _two_runs(
    view: RunView, loss: Series, count: float | None, options: Options
) -> tuple[str, float] | None:
    """The last run against an earlier one with another accumulation."""
    for run in view.facts.get("runs", ()):
        other = run["metrics"].get("train/loss")
        before = _count_of(run)
        if other is None or not len(other) or before is None or count is None or before == count:
            continue
        num = min(5, len(other), len(loss))
        mine = median(loss.values[:num])
        theirs = median(other.finite().values[:num])
        ratio = (mine / theirs) if count > before else (theirs / mine)
        expected = max(count, before) / min(count, before)
        if ratio > 1.5 and expected / options.near <= ratio <= expected * options.near:
            return (
                f"With {count:g} accumulation steps the loss begins at {mine:.4g}, with "
                f"{before:g} at {theirs:.4g}",
                ratio,
            )
    return None


def _count_of(run: Mapping[str, Any]) -> float | None:
    found = _COUNT.search(str(run.get("label", "")))
    return float(found[1]) if found else None


def _against_eval(
    view: RunView, loss: Series, count: float | None, options: Options
) -> tuple[str, float] | None:
    held = view.series("eval/loss")
    if held is None or count is None or count < 2 or not len(held.finite()):
        return None
    held = held.finite()
    before = loss.before(int(held.steps[0]) + 1)
    near = before.tail(5) if len(before) else loss.head(5)
    mine, theirs = median(near.values), held.first
    # A record is the mean over many steps, in which a loss may fall steeply at the beginning.
    ratio = min(mine / theirs if theirs > 0 else 0.0, _usual_ratio(loss, held))
    if ratio < options.factor or not count / options.near <= ratio <= count * options.near:
        return None
    return (
        f"Training loss is {mine:.4g} where evaluation loss is {theirs:.4g}, {ratio:.1f} times as "
        f"much, with {count:g} accumulation steps",
        ratio,
    )


def _usual_ratio(loss: Series, held: Series) -> float:
    """Return the training loss before an evaluation over its loss: the median of all of them."""
    ratios = [
        before.latest / value
        for step, value in zip(held.steps, held.values, strict=True)
        if value > 0.0 and len(before := loss.before(int(step) + 1))
    ]
    return median(ratios) if len(ratios) > 1 else math.inf


def _steady_multiple(
    view: RunView, loss: Series, count: float | None, options: Options
) -> tuple[str, float] | None:
    """The same multiple at every evaluation, in a log that does not say what is accumulated.

    Augmented or noised training rows make the loss higher as well, but by a factor that changes.
    """
    held = view.series("eval/loss")
    if held is None or count is not None or view.framework.name not in _ACCUMULATING:
        return None
    ratios = [
        median(before.tail(5).values) / value
        for step, value in zip(held.finite().steps, held.finite().values, strict=True)
        if value > 0.0 and len(before := loss.before(int(step) + 1)) >= 5
    ]
    if len(ratios) < 3 or min(ratios) < options.steady or loss.latest < 0.5:
        return None
    if max(ratios) > options.spread * min(ratios):
        return None
    ratio = median(ratios)
    return f"Training loss is {ratio:.1f} times the evaluation loss at each evaluation", ratio


def _against_guessing(loss: Series, count: float | None) -> tuple[str, float] | None:
    start = median(loss.values[:5])
    if count is None or count < 2 or start < _MOST or not 0.3 <= start / count <= 4.0:
        return None
    return (
        f"Training loss begins at {start:.4g}, more than guessing costs, and is "
        f"{start / count:.3g} when divided by the {count:g} accumulation steps",
        count,
    )


RULE = Rule(
    code="LRN012",
    name="loss-not-normalised-by-grad-accum",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss",),
    kinds=(Kind.SFT,),
    options=Options,
    explains=("LRN002", "LRN004", "LRN010", "LRN013"),
)
