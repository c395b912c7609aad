"""One reward function gives every answer the same value, while others distinguish the answers.

## What it sees
Over `fire` records, the mean of one of several reward functions is exactly the same and its
deviation (where logged) is 0, while another function's mean changes.

## Why it matters
A constant adds nothing to any advantage. If the function was meant to teach a format, it does not.

## Likely causes
- format-reward-never-matches: the pattern asks for something the model never writes.
- reward-saturated: by now every answer meets its condition.
- reward-function-constant: the function does not look at the completion, or its column is empty.

## What to do
Try the function by hand on printed completions. Loosen its pattern, show the format in the prompt,
or drop the function.

## Known false alarms
None that matter: it is information, because the other functions still distinguish answers.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import moves, reward_functions
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    fire: int = option(8, "Number of records in which it must not move.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    functions = reward_functions(view)
    if len(functions) < 2:
        yield Unknown("fewer than two reward functions are logged")
        return
    moving = {name: moves(series) for name, series in functions.items()}
    if not any(moving.values()):
        return
    for name, series in functions.items():
        spread = view.series(f"rewards/{name}/std")
        if moving[name] or len(series) < options.fire or (spread is not None and _any(spread)):
            continue
        value, first = series.latest, int(series.steps[0])
        cause = _cause(name, value)
        yield Sighting(
            message=f"The reward {name} is {value:.4g} for every answer since step {first}: it "
            "teaches nothing. Try it by hand on a few completions.",
            evidence=(f"rewards/{name}/mean {value:.4g} in {len(series)} records",),
            causes=(cause,),
            fixes=(Fix("rewards.functions", "a pattern that can be met", cause.why),),
            first_step=first,
            last_step=int(series.steps[-1]),
            value=value,
            subject=name,
        )


def _any(series: Series) -> bool:
    return bool((series.finite().values != 0.0).any())


def _cause(name: str, value: float) -> Cause:
    if value == 0.0 and any(word in name.lower() for word in ("format", "tag", "xml", "regex")):
        return Cause(
            "format-reward-never-matches", "no completion has the format that the reward asks for"
        )
    if value == 1.0:
        return Cause("reward-saturated", "every answer earns the full reward")
    return Cause(
        "reward-function-constant", f"the reward is {value:.4g} whatever the completion is"
    )


RULE = Rule(
    code="RWD003",
    name="reward-function-constant",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
