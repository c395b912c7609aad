"""The tokens that are trained are not the ones that were sampled.

## What it sees
Either the probe of the token round trip finds rows whose tokens changed. Or, in a run with several
turns or tools: trainer and engine differ by more than rounding, or KL and gradient shoot up by
`growth` together while the reward falls.

## Why it matters
A conversation that is turned into text and tokenised again rarely gives the same tokens. The
trainer then raises the probability of tokens that nobody sampled, and of tool outputs that the
policy never wrote: KL and gradient explode after some time.

## Likely causes
- multi-turn-token-mismatch: messages are tokenised again between turns.
- chat-template-rewrites-history: the template changes earlier turns (for example drops thoughts).
- tool outputs are not masked.

## What to do
Keep the sampled token ids through all turns (token in, token out), mask what tools wrote, and use a
template that leaves earlier turns alone.

## Known false alarms
None known for the probe. Without it, a wild learning rate can look alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import gap_of, staleness
from homeostat.health.rules.signs import is_multi_turn, trend
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    growth: float = option(20.0, "Factor by which KL and gradient must both shoot up.")
    fire: int = option(2, "Number of records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    bad = view.series("probe/round_trip_bad")
    if bad is not None and int((bad.values > 0).sum()) >= options.fire:
        first = int(bad.steps[int((bad.values > 0).argmax())])
        said = f"{bad.values.max():.0f} rows changed their tokens in a step"
        yield _sighting(view, said, first, Confidence.MEASURED)
        return
    if not is_multi_turn(view):
        if bad is None:
            yield Unknown("no round trip of tokens was probed, and the run has no turns")
        return
    gap = gap_of(view)
    if gap is not None and staleness(view) == 0.0 and gap.level > gap.limit:
        said = f"{gap.name} is {gap.level:.3g} in a run with several turns"
        yield _sighting(view, said, int(gap.series.steps[0]), Confidence.INFERRED)
        return
    found = _explodes(view, options)
    if found is not None:
        step, said = found
        yield _sighting(view, said, step, Confidence.HEURISTIC)


def _explodes(view: RunView, options: Options) -> tuple[int, str] | None:
    kl, grads, reward = view.series("kl"), view.series("grad_norm"), trend(view.series("reward"))
    if kl is None or grads is None or reward is None or not reward.falls:
        return None
    ratios = []
    for series in (kl, grads):
        usual, most, step = _rise(series.finite())
        if usual <= 0.0 or most < options.growth * usual:
            return None
        ratios.append((usual, most, step))
    (k0, k1, step), (g0, g1, _) = ratios
    return step, f"KL rose from {k0:.3g} to {k1:.3g} and the gradient from {g0:.3g} to {g1:.3g}"


def _rise(series: Series) -> tuple[float, float, int]:
    """Usual value, largest value, and the step where it left the usual for good."""
    if len(series) < 6:
        return 0.0, 0.0, 0
    usual = median(series.values[: len(series) // 2])
    far = np.flatnonzero(series.values <= 3.0 * usual)
    at = min(int(far[-1]) + 1 if len(far) else 0, len(series) - 1)
    return usual, float(series.values.max()), int(series.steps[at])


def _sighting(view: RunView, said: str, first: int, confidence: Confidence) -> Sighting:
    return Sighting(
        message=f"{said[0].upper()}{said[1:]}: the tokens that are trained are not those that were "
        "sampled. Keep token ids through all turns and mask tool output.",
        evidence=(said,),
        causes=(
            Cause("multi-turn-token-mismatch", "turns are tokenised again between the two"),
            Cause("chat-template-rewrites-history", "the template may change earlier turns"),
        ),
        fixes=(
            Fix("", "", "hand token ids, not text, from turn to turn; mask what tools wrote"),
            Fix(
                "algorithm.correction.weight.type",
                "token",
                "bounds the damage",
                Grade.UNSAFE,
                theirs={"verl": "algorithm.rollout_correction"},
            ),
        ),
        first_step=first,
        last_step=view.last_step,
        confidence=confidence,
    )


RULE = Rule(
    code="OFF007",
    name="multi-turn-token-mismatch",
    family=Family.OFFPOLICY,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=("OFF001", "OFF002", "POL004", "RWD006"),
)
