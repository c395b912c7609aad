"""Most tool calls fail.

## What it sees
agents/tool_failures above `max_share` on average over the newest records.

## Why it matters
Answers are judged although they rest on a broken tool, so the policy learns to avoid the tool.

## Likely causes
- tool-calls-failing: the tool is down or times out, or the calls have a form that it does not
  accept.

## What to do
Call the tool by hand with one of the calls of the log.

## Known false alarms
A policy that is only starting to learn the format of a call; it improves by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, rank_correlation
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_share: float = option(0.5, "Largest acceptable share of failed calls.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    failed = needed(view, "agents/tool_failures")
    late = failed.tail(5)
    share = float(late.values.mean())
    if len(failed) < 5 or share <= options.max_share or rank_correlation(failed) < -0.5:
        return
    yield Sighting(
        message=f"{share:.0%} of the tool calls fail (limit {options.max_share:.0%}). Call the "
        "tool by hand with one of them.",
        causes=(Cause("tool-calls-failing", f"{share:.0%} of the calls"),),
        fixes=(
            Fix(
                "",
                "call it by hand",
                "shows whether the tool is broken or is called in a wrong form",
            ),
        ),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=share,
        limit=options.max_share,
    )


RULE = Rule(
    code="AGT003",
    name="tool-calls-failing",
    family=Family.AGENTS,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("agents/tool_failures",),
    kinds=(Kind.RL,),
    options=Options,
)
