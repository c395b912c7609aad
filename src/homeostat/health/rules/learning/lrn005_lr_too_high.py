"""The learning rate is far above what such runs use, and the run shows it.

## What it sees
A rate of at least `factor` times the top of the usual band together with harm: a loss or gradient
that is not finite; a training loss that falls to exactly 0 from one record to the next (how NaN is
printed by trainers that filter it); or, in RL, a reward that falls while the KL or the gradient
norm is large. A high rate without harm is reported by CFG005, as information only.

## Why it matters
Each step overshoots. The weights are damaged within a few steps, and no later setting repairs them.

## Likely causes
- lr-too-high: the rate itself.
- fp16-overflow: with fp16, weights that grow overflow first.
- kl-runaway: in RL the policy moves far from its reference.

## What to do
Start again from the last good checkpoint with a rate inside the usual band (all weights: 1e-5 to
5e-5 in SFT, about 1e-6 in RL; adapters: 1e-4 to 3e-4 in SFT, 1e-6 to 1e-4 in RL), with warm-up.

## Known false alarms
Very small models and models trained from scratch need higher rates; the rule does not fire unless
the run shows harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import (
    Rates,
    broken,
    ends,
    mean_since,
    peak_rate,
    precision,
    prints_zero,
    rank_correlation,
    usual_rates,
)
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    factor: float = option(4.0, "Factor over the top of the usual band that is too high.")


@dataclass(frozen=True)
class _Harm:
    step: int
    what: str
    level: Level
    causes: tuple[Cause, ...] = ()


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    rate, usual = peak_rate(view), usual_rates(view)
    if rate is None:
        yield Unknown("the learning rate is not known")
        return
    if usual is None or rate < options.factor * usual.high:
        return
    harm = _broken(view) or _zero_loss(view) or _reward_falls(view)
    if harm is None:
        return
    yield Sighting(
        message=f"The learning rate {rate:.2g} is {rate / usual.high:.0f} times the highest that "
        f"{usual.what} is usually trained with ({usual.high:.0e}), and {harm.what}. Start again "
        "from a good checkpoint with a lower rate.",
        evidence=(harm.what,),
        causes=(_cause(rate, usual), *harm.causes),
        fixes=(
            Fix("trainer.lr", f"{usual.high:.0e}", "the top of the usual band", Grade.UNSAFE),
            Fix("trainer.schedule.warmup_share", "0.1", "a gentler start", Grade.UNSAFE),
        ),
        first_step=harm.step,
        last_step=view.last_step,
        value=rate,
        limit=options.factor * usual.high,
        level=harm.level,
    )


def _cause(rate: float, usual: Rates) -> Cause:
    return Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")


def _broken(view: RunView) -> _Harm | None:
    bad = broken(view)
    if bad is None or not bad.values[-2:].all():
        return None
    step = int(bad.steps[np.flatnonzero(bad.values)[0]])
    overflow = Cause("fp16-overflow", "fp16 overflows first when weights grow")
    return _Harm(
        step,
        f"loss or gradient is not finite since step {step}",
        Level.ERROR,
        (overflow,) if precision(view) == "fp16" else (),
    )


def _zero_loss(view: RunView) -> _Harm | None:
    """SFT: a loss that is exactly 0 after ordinary values."""
    loss = view.series("train/loss")
    if view.kind is not Kind.SFT or loss is None or prints_zero(view, "train/loss"):
        return None
    alive = np.flatnonzero(loss.values != 0)
    if not len(alive) or len(loss) - 1 - alive[-1] < 2 or loss.values[alive[-1]] < 0.3:
        return None
    step = int(loss.steps[alive[-1] + 1])
    what = f"the loss is exactly 0 since step {step} (some trainers print NaN as 0), after "
    return _Harm(step, what + f"{loss.values[alive[-1]]:.3g}", Level.ERROR)


def _reward_falls(view: RunView) -> _Harm | None:
    reward = view.series("reward")
    if view.kind is not Kind.RL or reward is None or len(reward.finite()) < 6:
        return None
    reward = reward.finite()
    first, last = ends(reward)
    falls = first - last > 0.1 * max(abs(first), 0.1) and rank_correlation(reward) < -0.6
    far, norm = mean_since(view, "kl", step=0), mean_since(view, "grad_norm", step=0)
    if not falls or not ((far or 0) > 0.1 or (norm or 0) > 5):
        return None
    signs = [f"the reward falls from {first:.3g} to {last:.3g}"]
    signs += [f"KL is {far:.3g}"] if far is not None and far > 0.1 else []
    signs += [f"the gradient norm is {norm:.3g}"] if norm is not None and norm > 5 else []
    runaway = (Cause("kl-runaway", f"KL is {far:.3g}"),) if far is not None and far > 0.1 else ()
    return _Harm(int(reward.steps[0]), ", ".join(signs), Level.WARN, runaway)


RULE = Rule(
    code="LRN005",
    name="lr-too-high",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    options=Options,
    explains=(
        "LRN002",
        "LRN003",
        "LRN009",
        "LRN010",
        "NUM002",
        "NUM004",
        "DAT001",
        "POL004",
        "POL013",
        "RWD006",
    ),
)
