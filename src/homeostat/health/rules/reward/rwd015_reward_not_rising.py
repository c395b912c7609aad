"""The reward stays low and flat over many steps.

## What it sees
After `steps` steps the mean reward is still below `low` of the most that can be earned, without a
rise that is more than noise. Where the most is not known, a warning if it has not risen in `long`
steps.

## Why it matters
Most runs that will learn show it by then. It costs little to look, and much to wait.

## Likely causes
- truncation-at-cap: most answers are cut before they give a result.
- lr-too-low: the policy does not move (KL stays next to nothing).
- task-too-hard: too few answers are right to learn from.

## What to do
Read completions; check the share of groups with a difference; try easier prompts, more samples per
prompt, or a larger learning rate.

## Known false alarms
Hard tasks on which reward rises after hundreds of steps: up to `long` steps it is information. A
run that starts at the most that can be earned, if nothing tells how much that is.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import newest, solved_share, trend
from homeostat.health.view import Kind, RunView

# Records of the reward from which a long run is judged.
_MIN_RECORDS = 100
# Rates of RL below this one rarely move a policy within a run.
_LOW_RATE = 5e-7
_FIXES = (
    Fix("rollout.samples_per_prompt", "16", "more groups with a success", Grade.UNSAFE),
    Fix("trainer.lr", "2 to 5 times as large", "if KL stays near 0", Grade.UNSAFE),
)


class Options(RuleOptions):
    steps: int = option(20, "Steps after which a rise should show.")
    low: float = option(0.15, "Share of the maximum that counts as low.")
    long: int = option(1_000, "Steps without a rise that are a warning if no maximum is known.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward, reached = view.series("reward"), solved_share(view)
    assert reward is not None, "needs says so"
    moved = trend(reward)
    span = int(reward.steps[-1] - reward.steps[0]) + 1
    if span < options.steps or moved is None or moved.is_real:
        return
    if reached is None:
        if span < options.long or len(reward) < _MIN_RECORDS:
            return
        message = f"In {span:,} steps the reward has not risen beyond its noise."
        level, value, limit = Level.WARN, float(span), float(options.long)
    elif 0.0 < reached < options.low:
        message = f"After {span} steps the reward is {reached:.1%} of the maximum and flat "
        message += f"(expected above {options.low:.0%} by now)."
        level, value, limit = Level.INFO, reached, options.low
    else:
        return
    yield Sighting(
        message=f"{message} Read a few completions.",
        evidence=(f"reward {moved.start:.4g} at first, {moved.end:.4g} now",),
        causes=tuple(_causes(view)),
        fixes=_FIXES,
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=value,
        limit=limit,
        level=level,
    )


def _causes(view: RunView) -> Iterator[Cause]:
    cut, kl = newest(view, "completions/clipped_ratio"), newest(view, "kl")
    if cut is not None and cut > 0.5:
        yield Cause("truncation-at-cap", f"{cut:.0%} of the completions are cut")
    if kl is not None and 0.0 <= kl < 1e-4:
        yield Cause("lr-too-low", f"KL is {kl:.2g}: the policy hardly moves")
    rates = view.series("learning_rate")
    highest = max(rates.finite().values.tolist(), default=0.0) if rates is not None else 0.0
    if kl is None and 0.0 < highest < _LOW_RATE:
        yield Cause("lr-too-low", f"the rate is at most {highest:.2g}")
    yield Cause("task-too-hard", "few answers are right")


RULE = Rule(
    code="RWD015",
    name="reward-not-rising",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
