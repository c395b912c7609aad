"""The penalty for completions near the length limit outweighs what the task pays.

## What it sees
The mean overlong penalty of a step is larger than its mean reward, and since the penalty began to
apply, completions get shorter and the reward falls.

## Why it matters
A right answer that ends near `rollout.max_new_tokens` costs more than it earns, so the policy
learns to stop early and be wrong. The logged reward does not include the penalty: it only falls.

## Likely causes
- length-penalty-too-strong: right answers are about as long as the limit, so that they end where
  the penalty grows (`algorithm.overlong`).

## What to do
Raise `rollout.max_new_tokens` until right answers end before the last fifth of it, or leave cut
completions out of the loss (`algorithm.overlong.type: mask`), or lower the penalty.

## Known false alarms
Completions that were cut at first and learn to end: the reward rises along with it, and the rule
says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, rank_correlation
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(4, "Number of first records over which all of it must be seen.")
    shorter: float = option(0.9, "Share of the first length that is left, at most.")
    kept: float = option(0.5, "Share of the first reward that is left, at most.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    penalty = needed(view, "rollout/overlong_penalty").finite()
    reward = needed(view, "reward").finite()
    length = needed(view, "completions/mean_length").finite()
    if min(len(penalty), len(reward), len(length)) < options.fire:
        return
    begin = slice(options.fire)
    cost, paid = -float(penalty.values[begin].mean()), float(reward.values[begin].mean())
    shorter = length.latest <= options.shorter * length.first
    # Steadily: the reward of one small step may be anything.
    falls = reward.latest <= options.kept * reward.first and rank_correlation(reward) < -0.6
    if not (cost > max(paid, 0.0) and reward.first > 0 and shorter and falls):
        return
    steps = f"over the first {options.fire} records"
    yield Sighting(
        message=f"Completions near the length limit cost {cost:.3g} {steps}, and the reward pays "
        f"{paid:.3g}: since then completions shrank from {length.first:.3g} to {length.latest:.3g} "
        f"tokens and the reward fell from {reward.first:.3g} to {reward.latest:.3g}. Raise the "
        "limit.",
        evidence=(
            f"rollout/overlong_penalty {-cost:.3g}, reward {paid:.3g} {steps}",
            f"completions/mean_length {length.first:.3g} -> {length.latest:.3g}",
        ),
        causes=(Cause("length-penalty-too-strong", "right answers end near the limit"),),
        fixes=(
            Fix("rollout.max_new_tokens", "twice as many", "right answers end before the penalty"),
            Fix("algorithm.overlong.type", "mask", "cut completions are not trained", Grade.UNSAFE),
        ),
        first_step=int(penalty.steps[0]),
        last_step=int(reward.steps[-1]),
        value=cost,
        limit=paid,
    )


RULE = Rule(
    code="POL021",
    name="length-penalty-too-strong",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("rollout/overlong_penalty", "reward", "completions/mean_length"),
    kinds=(Kind.RL,),
    # Wrong answers all earn nothing, so their groups are dropped.
    explains=("POL013", "DAT013", "RWD006", "POL014"),
    options=Options,
)
