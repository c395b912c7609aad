"""Engine and trainer agreed before, and no longer do from one step on.

## What it sees
The mean distance of log-probs on tokens that the newest weights sampled rises to more than `factor`
times its own earlier level and above `min_nats`, or to more than ten times it and above
`far_nats`, and stays there: over `fire` records, or one where it is far. Single precision on a CPU
agrees to about 1e-6 nats and bf16 on a GPU to about 0.02: each run is its own measure.

## Why it matters
Engine and trainer compute the same function of the same weights. A difference orders of magnitude
beyond rounding means other weights in the engine, or other sampling settings. All later samples are
trained on as if they were the policy's own.

## Likely causes
- sleep-wake-weights-lost: the engine sleeps between steps, and wakes with other weights.
- engine-weights-differ: weights arrived damaged or mixed up, or the engine serves other ones.
- weight-conversion-wrong: names, layouts or shards are converted wrongly on the way.
- engine-logprob-mismatch: temperature, or what logits go through, is not the trainer's.

## What to do
Publish the weights again and compare (`sync.verify`). If both have the same weights, compare the
temperature of sampling with that of scoring.

## Known false alarms
None known. Samples of older weights, which rightly differ, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import staleness
from homeostat.health.rules.readings import mean_before, mean_since
from homeostat.health.series.windows import held_mean, newest_spell
from homeostat.health.view import Kind, RunView, Series

_ALL = "sampling/sampling_logp_difference/mean"
_FRESH = "sampling/by_age/0/logp_difference"
# Nats that exact implementations differ by at most.
_ROUNDING = 1e-3


class Options(RuleOptions):
    factor: float = option(100.0, "Factor over its earlier level that is another function.")
    min_nats: float = option(5e-3, "Distance below which nothing is said.")
    far_nats: float = option(0.3, "Distance that only other weights have: an error.")
    fire: int = option(2, "Number of consecutive records that must show it, where it is not far.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    gap = _fresh(view)
    if gap is None:
        yield Unknown("there is no number, or samples of older weights are not told apart")
        return
    earlier = _earlier(gap.values)
    far = (gap.values > options.far_nats) & (gap.values > 10.0 * earlier)
    held = far | (gap.values > np.maximum(options.factor * earlier, options.min_nats))
    both = (newest_spell(held, fire=options.fire), newest_spell(far))
    spell = next((one for one in both if one is not None and one.is_open), None)
    if spell is None or gap.values[spell.start - 1] > 0.5 * gap.values[spell.start]:
        # One that grew to it record by record is a drift.
        return
    first, last = int(gap.steps[spell.start]), int(gap.steps[spell.end])
    was, now = float(earlier[spell.start]), held_mean(gap.values, held | far, spell)
    limit = float(max(options.factor * was, options.min_nats))
    # One of the two limits was passed: the lower one was, whichever it is.
    limit = min(limit, max(options.far_nats, 10.0 * was))
    yield Sighting(
        message=f"Engine and trainer agreed to {was:.1g} nats a token and differ by {now:.2g} "
        f"since step {first} (limit {limit:.2g}): the engine has other "
        "weights, or samples by other settings. Publish again, and compare both.",
        evidence=(f"{_ALL} {was:.1g} -> {now:.2g}",),
        causes=tuple(_causes(view, first, far=bool(far[spell.start : spell.end + 1].any()))),
        fixes=(
            Fix("sync.verify", "true", "compares the engine's weights each time", Grade.SAFE),
            Fix(
                "rollout.temperature",
                "the trainer's",
                "engine and trainer then use the same temperature",
                Grade.UNSAFE,
            ),
        ),
        first_step=first,
        last_step=last,
        value=now,
        limit=limit,
        level=Level.ERROR if now > options.far_nats else None,
    )


def _fresh(view: RunView) -> Series | None:
    """The distance on tokens that the newest weights sampled."""
    fresh = view.series(_FRESH)
    series = view.series(_ALL) if staleness(view) <= 0.0 or fresh is None else fresh
    if series is None or (staleness(view) > 0.0 and fresh is None):
        return None
    return series.finite() if len(series.finite()) else None


def _earlier(values: FloatArray64) -> FloatArray64:
    """Before each record, the lowest level that three neighbours had. Until there are three, all
    there are, if no more than rounding: else nothing is known."""
    highest = np.maximum.accumulate(values)[:-1]
    level = np.concatenate([[np.inf], np.where(highest < _ROUNDING, highest, np.inf)])
    if len(values) > 3:
        rows = np.lib.stride_tricks.sliding_window_view(values, 3)
        level[3:] = np.minimum.accumulate(np.max(rows, axis=1))[:-1]
    return level[: len(values)]


def _causes(view: RunView, first: int, *, far: bool) -> Iterator[Cause]:
    was, now = mean_before(view, "reward", step=first), mean_since(view, "reward", step=first)
    fell = was is not None and now is not None and now < 0.7 * was
    weights = Cause("engine-weights-differ", "what it samples is not the trainer's policy")
    settings = Cause(
        "engine-logprob-mismatch", "temperature or logits are not treated in the same way"
    )
    if far and view.setting("engine.sleep") is True:
        yield Cause("sleep-wake-weights-lost", "the engine sleeps between steps (engine.sleep)")
    yield from (weights, settings) if far or fell else (settings, weights)
    yield Cause("weight-conversion-wrong", "tensors may be mixed up on the way")


RULE = Rule(
    code="OFF008",
    name="engine-logprob-mismatch",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=(f"{_ALL}|{_FRESH}",),
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "OFF001", "OFF002", "OFF004", "OFF005", "OFF006", "RWD001", "RWD002", "RWD004", "RWD006",
        "RWD015", "GEN001", "GEN002", "GEN003", "GEN004", "POL001", "POL002", "POL009", "POL010",
        "POL011", "POL012", "POL013", "POL015", "LRN008", "LRN009", "LRN010",
    ),
)  # fmt: skip
