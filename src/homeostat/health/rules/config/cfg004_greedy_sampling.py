"""Sampling is greedy, or nearly so: every answer to a prompt is the same.

## What it sees
RL with a rollout temperature of 0, or of `temperature` or less; or with a cut that leaves a single
token in most places: top-k of 1, top-p of `top_p` or less, min-p of `min_p` or more. Sampling at a
temperature T raises probabilities to the power 1/T: at 0.05, a token that is two thirds as likely
as the best one is drawn 0.0003 times as often.

## Why it matters
All answers of a group are equal, so all advantages are 0. Moreover, the distribution that samples
is not the one that is trained; where it is (the kept tokens are replayed), a token that was the
only one left has probability 1 and no gradient. At a temperature near 0 the few groups that do
differ have a gradient of 1/T times the usual size, which breaks the policy.

## Likely causes
- greedy-sampling: a setting for evaluation, used for training.

## What to do
Set the temperature to 1.0; evaluation may stay at 0. Cut less: top-p of 0.9 or more, top-k of 20 or
more, min-p of 0.1 or less.

## Known false alarms
None for greedy decoding: it is not a policy that sampling can improve. A small top-p may leave
enough tokens where the policy is very uncertain; see sampling/kept_share.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    temperature: float = option(0.05, "Temperature at which sampling is nearly greedy.")
    top_p: float = option(0.2, "Top-p that leaves one token in most places.")
    min_p: float = option(0.9, "Min-p that leaves one token in most places.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    temperature = view.number("rollout.temperature")
    if temperature is None or temperature > options.temperature:
        yield from _cut(view, options)
        return
    if temperature > 0:
        yield _nearly(temperature, options)
        return
    yield Sighting(
        message="rollout temperature is 0: greedy decoding gives the same answer every time, so "
        "there is nothing to compare. Set it to 1.0; evaluation may stay at 0.",
        causes=(Cause("greedy-sampling", "temperature 0"),),
        fixes=(Fix("rollout.temperature", "1.0", "answers that differ", Grade.UNSAFE),),
        value=0.0,
    )


def _nearly(temperature: float, options: Options) -> Sighting:
    return Sighting(
        message=f"rollout temperature is {temperature:g}: sampling is nearly greedy, and the "
        "answers to a prompt hardly differ. Set it to 1.0; evaluation may stay low.",
        causes=(Cause("greedy-sampling", f"temperature {temperature:g}"),),
        fixes=(Fix("rollout.temperature", "1.0", "answers that differ", Grade.UNSAFE),),
        value=temperature,
        limit=options.temperature,
        level=Level.WARN,
    )


def _cut(view: RunView, options: Options) -> Iterator[Sighting]:
    """Yield the first cut that leaves next to nothing to choose from."""
    settings = (
        ("rollout.top_k", 1.0, lambda value: value == 1, "50"),
        ("rollout.top_p", options.top_p, lambda value: 0 < value <= options.top_p, "0.95"),
        ("rollout.min_p", options.min_p, lambda value: value >= options.min_p, "0.05"),
    )
    for name, limit, is_greedy, better in settings:
        value = view.number(name)
        if value is not None and is_greedy(value):
            yield Sighting(
                message=f"{name} is {value:g}: in most places a single token is left to sample, "
                "which has no gradient, and the answers to a prompt hardly differ. Cut less.",
                causes=(Cause("greedy-sampling", f"{name} {value:g}"),),
                fixes=(Fix(name, better, "several tokens to choose from", Grade.UNSAFE),),
                value=value,
                limit=limit,
                level=Level.WARN,
            )
            return


RULE = Rule(
    code="CFG004",
    name="greedy-sampling",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:rollout.temperature",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "RWD006", "POL001", "POL015"),
)
