"""Loss or gradient is not finite, record after record.

## What it sees
Loss or gradient norm is NaN or infinite in the newest record and in `fire` of the last `window`; or
the newest evaluation loss is. If only the gradient norm is not finite, for fewer than `lasting`
records, and every loss since is finite, it is a warning: the weights are not lost yet. Where more
is known (fp16, a rate far too high, a kernel, a micro-batch larger than its update, a policy that
is lost already, labels that are all masked), another rule reports it in place of this one.

## Why it matters
If such updates are skipped, nothing is learned; if they are applied, the weights are lost.

## Likely causes
- nan-loss: the source is not known yet.
- grad-norm-explosion: the gradient grew by orders of magnitude before.
- attention-kernel-nan: the log says that eager attention gives finite numbers.
- nan-update-poisoned-weights: the loss was finite, and since one step it is not finite for any
  batch.
- bad-batch: finite and non-finite steps alternate, so it depends on the rows.
- fp8-zero-scale: FP8 training divides by the scale of a block, which is 0 for zeros.

## What to do
Our own runs name the module and direction (event step_skipped) and keep the rows. Elsewhere: repeat
the step with anomaly detection, with another attention implementation, and in fp32. Replacing NaN
by 0 in logits, or switching the check off, only hides the problem.

## Known false alarms
A metric that is undefined at some steps (a deviation of one value) is not loss or gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import trained_format
from homeostat.health.rules.readings import broken, labels_masked
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView

# What is written where the same step was tried with eager attention.
_EAGER_WORKS = (
    "eager && works",
    "eager && finite",
    "eager && no nan",
    "eager && is fine",
    "eager: loss",
    "eager && loss is normal",
    "eager && ok",
)

_SAYS_FP8 = (
    "Float8DynamicActivation",
    "convert_to_float8_training",
    "Swapped to Float8Linear",
    "fp8_autocast",
    "float8 training",
    "FP8 training enabled",
)


class Options(RuleOptions):
    fire: int = option(2, "Number of records that must show it ...")
    window: int = option(4, "... within a window of this many.")
    lasting: int = option(10, "Number of records from which on a gradient norm alone is an error.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    bad = broken(view)
    assert bad is not None, "needs says so"
    held_out = view.series("eval/loss")
    if held_out is not None and not np.isfinite(held_out.latest):
        yield _poisoned(int(held_out.steps[-1]))
        return
    if labels_masked(view):
        return
    held = bad.values > 0
    spell = newest_spell(held, fire=options.fire, window=options.window, clear=2)
    if spell is None or not spell.is_open:
        return
    first = int(bad.steps[spell.start])
    share = float(held[spell.start :].mean())
    what = _what(view, first)
    yield Sighting(
        message=f"{what} not finite since step {first} ({share:.0%} of the records). Find the "
        "module and the rows that cause it; do not replace NaN by 0.",
        evidence=(f"{int(held.sum())} of {len(held)} records are not finite",),
        causes=tuple(_causes(view, what, first, share)),
        fixes=(
            Fix(
                "trainer.on_nonfinite",
                "skip",
                "updates that are not finite are then not applied",
                Grade.SAFE,
            ),
            Fix(
                "trainer.precision",
                "fp32",
                "if NaN disappears, rounding was the cause; else look for a broken row",
            ),
            Fix("model.attention", "eager", "if NaN disappears, an attention kernel was the cause"),
        ),
        first_step=first,
        last_step=int(bad.steps[-1]),
        value=share,
        level=Level.WARN
        if len(held) - spell.start < options.lasting and _is_loss_fine(view, first)
        else None,
    )


def _is_loss_fine(view: RunView, first: int) -> bool:
    """Return whether all losses since a step are finite, and none is a NaN that prints as 0."""
    loss = view.series("train/loss", "train/policy_loss")
    if loss is None or not len(loss.since(first)) or _prints_zero(view, first):
        return False
    return bool(np.isfinite(loss.since(first).values).all())


def _poisoned(step: int) -> Sighting:
    return Sighting(
        message=f"The evaluation loss is not finite at step {step}: the weights hold NaN. "
        "Go back to the checkpoint before.",
        evidence=(f"eval/loss is not finite at step {step}",),
        causes=(Cause("nan-update-poisoned-weights", "no update takes part in an evaluation"),),
        fixes=(Fix("checkpoint.load_step", f"before {step}", "weights that are finite"),),
        first_step=step,
        last_step=step,
    )


def _what(view: RunView, first: int) -> str:
    loss, norm = (
        series is not None and not np.all(np.isfinite(series.since(first).values))
        for series in (view.series("train/loss", "train/policy_loss"), view.series("grad_norm"))
    )
    if norm and not loss and _prints_zero(view, first):
        return "The gradient norm is (and the loss, which this trainer prints as 0 then, may be)"
    if loss and norm:
        return "Loss and gradient norm are"
    return "The loss is" if loss else "The gradient norm is"


def _prints_zero(view: RunView, first: int) -> bool:
    """Return whether the loss is 0 in a trainer that prints NaN as 0: it says nothing then."""
    loss = view.series("train/loss")
    known = bool(view.facts.get("nan_prints_as_zero")) and loss is not None
    return known and loss is not None and bool(np.any(loss.since(first).values == 0))


def _causes(view: RunView, what: str, first: int, share: float) -> Iterator[Cause]:
    norm = view.series("grad_norm")
    before = norm.before(first).finite().values if norm is not None else np.zeros(0)
    if len(before) >= 4 and before[-1] > 20 * max(median(before[:-1]), 1e-12):
        yield Cause("grad-norm-explosion", f"the gradient norm was {before[-1]:.3g} before it")
    if _is_fp8(view):
        yield Cause("fp8-zero-scale", "FP8 training: a block of zeros has scale 0")
    eager = view.log.first(*_EAGER_WORKS)
    if eager is not None:
        why = f"line {eager.number} says that eager attention is finite"
        yield Cause("attention-kernel-nan", why)
    if share < 0.7:
        yield Cause("bad-batch", "finite and non-finite steps alternate")
    if what == "The gradient norm is":
        yield Cause("grad-nan", "the loss is finite: it comes up in the backward pass")
    if _stays_lost(view, first):
        why = "finite before, but no row gives a finite loss now: the weights are not finite"
        yield Cause("nan-update-poisoned-weights", why)
    yield Cause("nan-loss", "not finite, step after step")


def _is_fp8(view: RunView) -> bool:
    """Return whether training is in FP8, elsewhere: our own scales are never 0."""
    if view.framework.name == "homeostat":
        return False
    if "fp8" in str(view.setting("trainer.precision", default="")):
        return True
    return trained_format(view) == "fp8" or view.log.has(*_SAYS_FP8)


def _stays_lost(view: RunView, first: int) -> bool:
    """Return whether the loss was finite, but no longer after the first non-finite update."""
    loss = view.series("train/loss", "train/policy_loss")
    if loss is None:
        return False
    before, since = loss.before(first).values, loss.since(first).values[1:]
    lost = ~np.isfinite(since)
    if view.facts.get("nan_prints_as_zero"):
        lost |= since == 0
        before = before[before != 0]
    return np.isfinite(before).sum() >= 3 and len(since) >= 3 and bool(lost.all())


RULE = Rule(
    code="NUM002",
    name="nan-loss",
    family=Family.NUMERICS,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm",),
    options=Options,
    explains=("DAT001", "LRN008", "RWD002", "RWD006", "GEN001", "POL013"),
)
