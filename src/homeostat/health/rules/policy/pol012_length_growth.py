"""Completions grow steadily towards the length limit.

## What it sees
The mean length rises almost without a step back to `growth` times where it began, and more than
`cut` of the completions are cut at the limit by now; the reward does not fall.

## Why it matters
It may be longer reasoning, or padding that the reward pays for. Either way the limit begins to cut
answers off, and those teach nothing.

## Likely causes
- length-growth: longer answers earn more.
- reward-hacking: length itself is rewarded.

## What to do
Read long completions. Worth it: raise the limit. Not worth it: a penalty near the limit.

## Known false alarms
Reasoning models that learn to think longer. It is information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.signs import newest, trend
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    growth: float = option(1.5, "Factor over the first records that the length must grow by.")
    cut: float = option(0.15, "Share of cut completions that it must reach.")
    fire: int = option(10, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    length, reward = view.series("completions/mean_length"), trend(view.series("reward"))
    assert length is not None, "needs says so"
    grown, cut = trend(length), newest(view, "completions/clipped_ratio")
    if len(length) < options.fire or grown is None or cut is None or cut < options.cut:
        return
    steady = grown.end > options.growth * grown.start and rank_correlation(length) > 0.9
    if not steady or (reward is not None and reward.falls):
        return
    causes = [Cause("length-growth", "answers become longer step by step")]
    if reward is not None and reward.rises:
        causes.append(Cause("reward-hacking", "the reward rises along: it may pay for length"))
    yield Sighting(
        message=f"Completions grew from {grown.start:.4g} to {grown.end:.4g} tokens, and {cut:.0%} "
        "are cut at the limit by now. Read a few long ones.",
        evidence=(f"mean length {grown.start:.4g} -> {grown.end:.4g}",),
        causes=tuple(causes),
        fixes=(
            Fix("rollout.max_new_tokens", "larger", "if they are worth it", Grade.UNSAFE),
            Fix("algorithm.overlong", "shape", "if they are not", Grade.UNSAFE),
        ),
        first_step=int(length.steps[0]),
        last_step=int(length.steps[-1]),
        value=grown.end,
    )


RULE = Rule(
    code="POL012",
    name="length-growth",
    family=Family.POLICY,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("completions/mean_length", "completions/clipped_ratio"),
    kinds=(Kind.RL,),
    options=Options,
)
