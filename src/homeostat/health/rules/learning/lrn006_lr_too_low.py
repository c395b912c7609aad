"""The learning rate is too small to move anything.

## What it sees
A rate below the usual band by `factor` (for adapters the band is 10 to 100 times that of all
weights), no longer in warm-up, and a run that stands still over at least `min_records` records: in
RL the KL stays below `max_kl` and the reward does not leave its noise, in SFT the loss does not; at
a rate below the band by `far` it is enough that a high loss hardly falls. In homeostat's own runs
the updates are measured: the rule fires if they are smaller than a millionth of the weights' size,
or, if loss or reward stand still, smaller than ten millionths.

## Why it matters
The run looks healthy, and costs as much as one that learns.

## Likely causes
- lr-too-low: most often a rate that was meant for all weights, used with an adapter.

## What to do
Raise the rate: adapters take 1e-4 to 3e-4 in SFT and 1e-5 to 1e-4 in RL, all weights 1e-5 to 5e-5
in SFT and about 1e-6 in RL. More samples per prompt make the signal of a step larger.

## Known false alarms
A run that has learned everything: its reward is at its maximum, and the rule does not judge it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import (
    ends,
    has_adapter,
    is_climbing,
    is_flat,
    peak_rate,
    prints_zero,
    usual_rates,
)
from homeostat.health.view import Kind, RunView

# Share of the weights' size below which an update is nothing: at the lowest rates in use it is ten
# times that.
_NOTHING = 1e-6
# And below which it is too little, if nothing comes of it.
_LITTLE = 1e-5
# Loss of a model that has much to learn, and the share of it that is hardly a fall.
_HIGH_LOSS, _HARDLY = 2.0, 0.05


class Options(RuleOptions):
    factor: float = option(2.0, "Factor below the usual range that is too low.")
    far: float = option(10.0, "Factor below the usual range that is far too low.")
    max_kl: float = option(1e-3, "KL below which a policy has not moved.")
    min_records: int = option(10, "Number of records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    measured = _unmoved(view, options)
    if measured is not None:
        yield measured
        return
    rate, usual = peak_rate(view), usual_rates(view)
    if rate is None or usual is None:
        yield Unknown("the learning rate is not known")
        return
    if rate == 0 or rate * options.factor > usual.low or is_climbing(view):
        return
    signs = _stands_still(view, options)
    if not signs and rate * options.far < usual.low:
        signs = _hardly_falls(view, options)
    if not signs:
        return
    adapter = has_adapter(view)
    steps = [int(series.steps[0]) for series in view.metrics.values() if len(series)]
    yield Sighting(
        message=f"The learning rate {rate:.2g} is below what {usual.what} needs (from "
        f"{usual.low:.0e}), and nothing moves: {'; '.join(signs)}. Raise it.",
        evidence=tuple(signs),
        causes=(
            Cause(
                "lr-too-low",
                f"rate {rate:.2g}; {usual.what}: from {usual.low:.2g}"
                + (" (adapters need 10 to 100 times the rate of all weights)" if adapter else ""),
            ),
        ),
        fixes=(Fix("trainer.lr", f"{usual.high:.0e}", "inside the usual band", Grade.UNSAFE),),
        first_step=min(steps),
        last_step=view.last_step,
        value=rate,
        limit=usual.low / options.factor,
    )


def _unmoved(view: RunView, options: Options) -> Sighting | None:
    """Our own runs measure how far an update moves the weights."""
    still = _stands_still(view, options, is_measured=True)
    limit = _LITTLE if still else _NOTHING
    groups = view.matching("update/weight_ratio/")
    late = [series.tail(3) for series in groups.values() if len(series) >= 4]
    most = max((float(series.values.max()) for series in late), default=1.0)
    if not 0 < most < limit or is_climbing(view):
        return None
    return Sighting(
        message=f"An update moves no group of layers by more than {most:.1e} of its size (usual: "
        "1e-5 to 1e-2): nothing is learned. Raise the learning rate.",
        evidence=(f"update/weight_ratio at most {most:.1e}", *still),
        causes=(Cause("lr-too-low", f"updates of {most:.1e} of the weights' size"),),
        fixes=(
            Fix(
                "trainer.lr",
                "100 times it",
                "updates become large enough to change the weights",
                Grade.UNSAFE,
            ),
        ),
        first_step=min(int(series.steps[0]) for series in groups.values()),
        last_step=max(int(series.steps[-1]) for series in late),
        value=most,
        limit=limit,
        confidence=Confidence.MEASURED,
    )


def _stands_still(view: RunView, options: Options, *, is_measured: bool = False) -> list[str]:
    """Return the evidence that nothing is learned; [] if something is, or too little is known.

    A run of RL without KL is judged only where the size of updates `is_measured`.
    """
    if view.kind is Kind.RL:
        reward, far = view.series("reward"), view.series("kl")
        if reward is None or len(reward) < options.min_records or not is_flat(reward):
            return []
        if float(np.mean(reward.values)) >= 0.97 * (view.latest("reward/max") or np.inf):
            return []
        said = f"the reward stays at {float(np.mean(reward.values)):.3g}"
        if far is None and is_measured:
            return [said]
        if far is None or float(np.nanmax(far.values)) > options.max_kl:
            return []
        if prints_zero(view, "kl"):
            return []
        return [f"KL is at most {float(np.nanmax(far.values)):.1e}", said]
    loss = view.series("train/loss")
    if loss is None or len(loss) < options.min_records:
        return []
    first, last = ends(loss.finite())
    still = is_flat(loss) and abs(last - first) < 0.02 * abs(first)
    return [f"the loss stays at {last:.4g}"] if still and last > 0.3 else []


def _hardly_falls(view: RunView, options: Options) -> list[str]:
    """Return the evidence that a high loss falls by next to nothing; [] if it does more.

    Where the size of updates is measured, that tells more.
    """
    loss, is_measured = view.series("train/loss"), bool(view.matching("update/weight_ratio/"))
    if is_measured or view.kind is Kind.RL or loss is None or len(loss) < 2 * options.min_records:
        return []
    first, last = ends(loss.finite())
    is_little = last > _HIGH_LOSS and abs(first - last) < _HARDLY * first
    return [f"the loss went from {first:.4g} to {last:.4g}"] if is_little else []


RULE = Rule(
    code="LRN006",
    name="lr-too-low",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss|reward",),
    options=Options,
    explains=("LRN004", "LRN019", "RWD015", "POL016"),
)
