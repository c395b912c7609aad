"""Steps wait for reward functions.

## What it sees
Scoring takes more than `max_share` of a step, in `fire` of the newest `window` records, and more
than `min_s` seconds; or more than `min_grown_s` seconds if it became `growth` times as slow.
Scoring that is fast enough for one run stalls another, so a run is also compared with its own
beginning.

## Why it matters
Accelerators stand idle while a few processes compute rewards.

## Likely causes
- reward-slow: too few reward workers, or a function that calls a slow service.

## What to do
Use more workers, make the function faster, or limit the time of a call.

## Known false alarms
Rewards from a large judge model may be worth their time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.medians import median
from homeostat.health.series.windows import Spell, jumped, newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_share: float = option(0.4, "Largest acceptable share of a step's time.")
    min_s: float = option(1.0, "Seconds below which it does not matter, if it was always so.")
    min_grown_s: float = option(0.1, "Seconds below which it does not matter at all.")
    growth: float = option(5.0, "Factor over what it took before that is a change.")
    fire: int = option(4, "Number of records that must show it ...")
    window: int = option(6, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward, whole = view.series("time/reward"), view.series("time/step")
    assert reward is not None, "needs says so"
    assert whole is not None, "needs says so"
    reward, whole = reward.on(whole)
    shares = reward.values / np.maximum(whole.values, 1e-9)
    spell = _spell(reward.values, shares, options)
    if spell is None:
        return
    part = slice(spell.start, spell.end + 1)
    share, seconds = float(shares[part].mean()), float(reward.values[part].mean())
    first = int(reward.steps[spell.start])
    before = reward.values[: spell.start]
    was = f", {median(before):.3g} s before that step" if len(before) else ""
    yield Sighting(
        message=f"Rewards take {seconds:.3g} s, {share:.0%} of a step, since step {first}{was} "
        f"(limit {options.max_share:.0%}). More reward workers would shorten this time.",
        evidence=(f"time/reward {seconds:.3g} s, time/step {whole.values[part].mean():.3g} s",),
        causes=(Cause("reward-slow", f"{seconds:.3g} s a step"),),
        fixes=(
            Fix("rewards.workers", "more", "groups are scored side by side", Grade.SAFE),
            Fix("rewards.timeout_s", "shorter", "bounds a call that hangs", Grade.ADVICE),
        ),
        first_step=first,
        last_step=int(reward.steps[spell.end]),
        value=share,
        limit=options.max_share,
    )


def _spell(seconds: FloatArray64, shares: FloatArray64, options: Options) -> Spell | None:
    """The slow stretch that is open: slow for anyone, or for this run."""
    for least, must_jump in ((options.min_s, False), (options.min_grown_s, True)):
        held = (shares > options.max_share) & (seconds > least)
        spell = newest_spell(held, fire=options.fire, window=options.window, clear=3)
        if spell is None or not spell.is_open:
            continue
        if not must_jump or jumped(seconds, spell.start, factor=options.growth):
            return spell
    return None


RULE = Rule(
    code="RWD013",
    name="reward-slow",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("time/reward", "time/step"),
    kinds=(Kind.RL,),
    options=Options,
)
