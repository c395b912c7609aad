"""Single steps have a gradient norm many times that of the others.

## What it sees
A finite gradient norm, before clipping, of at least `factor` times the median and above `min_norm`
(SFT) or `min_norm_rl`, by a far larger factor than norms of this run usually differ by (`unusual`),
while the loss of that step is ordinary. One is information unless it is extreme (`extreme` times
the median); `repeated` are a warning.

## Why it matters
Clipping hides such a step, which follows the direction of one batch at full size. Runs that diverge
often show this first.

## Likely causes
- grad-norm-spikes: rows that differ from the rest, an unstable layer, or a rate that is too high.
- lr-too-high: the spikes come as the rate rises.
- no-gradient-clipping: nothing bounds the gradient norm.

## What to do
Lower the rate, keep clipping at 1.0 or below, look at the rows of those steps. With 8-bit
optimizers or fp16, check whether the spikes go away without these.

## Known false alarms
The first steps of a run, and batches of one long row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, peak_rate, usual_rates
from homeostat.health.series.medians import median
from homeostat.health.series.noise import are_unusual
from homeostat.health.view import Kind, RunView
from homeostat.health.words import steps_have


class Options(RuleOptions):
    factor: float = option(10.0, "Factor over the median that a spike has.")
    extreme: float = option(100.0, "Factor over the median at which a single one is a warning.")
    min_norm: float = option(50.0, "Norm below which nothing is a spike (SFT).")
    min_norm_rl: float = option(10.0, "The same in RL.")
    repeated: int = option(3, "Number of spikes from which on it is a warning.")
    unusual: float = option(4.0, "Factor over the usual deviation of the norm's logarithm.")
    min_records: int = option(8, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    norm = needed(view, "grad_norm")
    norm = norm.finite()
    if len(norm) < options.min_records:
        return
    usual = median(norm.values)
    floor = options.min_norm_rl if view.kind is Kind.RL else options.min_norm
    is_spike = (norm.values > options.factor * usual) & (norm.values > floor)
    is_spike &= are_unusual(norm.values, np.full(len(norm), usual), options.unusual)
    at = np.flatnonzero(is_spike)
    # More than a fifth are no spikes but the run's own size.
    if not len(at) or len(at) > 0.2 * len(norm) or _loss_jumps(view, norm.steps[at]):
        return
    worst = int(at[np.argmax(norm.values[at])])
    ratio = float(norm.values[worst]) / max(usual, 1e-12)
    serious = len(at) >= options.repeated or ratio >= options.extreme
    first = int(norm.steps[at[0]])
    yield Sighting(
        message=f"{steps_have(len(at))} a gradient norm far above the median of {usual:.3g}, the "
        f"largest {norm.values[worst]:.4g} at step {norm.steps[worst]} ({ratio:.0f} times the "
        "median), with an ordinary loss. Lower the learning rate and look at those steps' rows.",
        evidence=tuple(f"step {norm.steps[i]}: grad_norm {norm.values[i]:.4g}" for i in at[:4]),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.lr", "half of it", "smaller steps", Grade.UNSAFE),
            Fix("trainer.max_grad_norm", "0.5", "bounds such a step further", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(norm.steps[at[-1]]),
        value=float(norm.values[worst]),
        limit=options.factor * usual,
        level=Level.WARN if serious else Level.INFO,
    )


def _loss_jumps(view: RunView, steps: np.ndarray) -> bool:
    """A loss that jumps with them is another illness."""
    loss = view.series("train/loss")
    if loss is None or view.kind is Kind.RL:
        return False
    there = np.isin(loss.steps, steps)
    if not there.any() or there.all():
        return False
    rest = float(np.nanmedian(loss.values[~there]))
    return float(np.nanmedian(loss.values[there])) > 2 * rest


def _causes(view: RunView) -> Iterator[Cause]:
    yield Cause("grad-norm-spikes", "the gradient of single batches is far larger than the others")
    rate, usual = peak_rate(view), usual_rates(view)
    if rate is not None and usual is not None and rate > usual.high:
        yield Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")
    if view.settings.get("trainer.max_grad_norm", 1.0) in (None, 0):
        yield Cause("no-gradient-clipping", "nothing bounds the gradient's norm")


RULE = Rule(
    code="LRN009",
    name="grad-norm-spikes",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("grad_norm",),
    options=Options,
)
