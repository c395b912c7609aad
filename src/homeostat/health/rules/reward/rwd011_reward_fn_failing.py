"""A reward function raises, runs out of time, or gives what cannot be used.

## What it sees
`rewards/<name>/failed` counts samples without a value in `fire` of the newest `window` records. As
a share of a step's samples it is a warning from `max_share` on, an error from half on.

## Why it matters
A sample without a value is trained without that reward. Failures that depend on the answer (long
ones time out, odd ones raise) bend what the policy learns.

## Likely causes
- dataset-column-missing: the function asks for a column that the rows do not have.
- reward-fn-signature: it does not take the arguments that it is given.
- reward-slow: it takes longer than rewards.timeout_s.
- reward-fn-failing: it raises, dies, or returns lists of the wrong length or type.

## What to do
The events `reward_trouble` hold the traceback and the completion that caused it. Run the function
on that one.

## Known false alarms
Rare failures on broken completions, which are information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import samples_per_step
from homeostat.health.view import Kind, RunView, Series
from homeostat.health.windows import newest_spell


class Options(RuleOptions):
    max_share: float = option(0.02, "Share of a step's samples that may fail.")
    fire: int = option(2, "Records that must show it ...")
    window: int = option(4, "... among so many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for name, failed in view.matching("rewards/", "/failed").items():
        spell = newest_spell(
            failed.values > 0, fire=options.fire, window=options.window, clear=options.window
        )
        if spell is not None and spell.is_open:
            yield _sighting(view, name, failed.since(int(failed.steps[spell.start])), options)


def _sighting(view: RunView, name: str, failed: Series, options: Options) -> Sighting:
    per_record, samples = float(failed.values.mean()), samples_per_step(view)
    share = per_record / samples if samples else None
    causes = tuple(_causes(view, name))
    level = Level.WARN if share is None or share > options.max_share else Level.INFO
    said = f"{share:.1%} of the samples" if share is not None else f"{per_record:.4g} a record"
    return Sighting(
        message=f"The reward {name} has failed on {said} since step {failed.steps[0]}. "
        "The event reward_trouble shows why, with the completion.",
        evidence=(f"rewards/{name}/failed {failed.latest:.0f} at step {failed.steps[-1]}",),
        causes=causes,
        fixes=_fixes(causes[0].name),
        first_step=int(failed.steps[0]),
        last_step=int(failed.steps[-1]),
        value=share if share is not None else per_record,
        limit=options.max_share,
        subject=name,
        level=Level.ERROR if share is not None and share > 0.5 else level,
    )


def _causes(view: RunView, name: str) -> Iterator[Cause]:
    troubles = [e for e in view.events_of("reward_trouble") if e.fields.get("reward") == name]
    said = " ".join(str(e.fields.get("message", "")) for e in troubles[-5:])
    kinds = {str(e.fields.get("failure", "")) for e in troubles}
    if "KeyError" in said or "column" in said:
        yield Cause("dataset-column-missing", f"it said: {said[:120]}")
    if "unexpected keyword" in said or "positional argument" in said:
        yield Cause("reward-fn-signature", f"it said: {said[:120]}")
    if "timeout" in kinds:
        yield Cause("reward-slow", "it ran out of time")
    yield Cause("reward-fn-failing", said[:120] or "values are missing")


def _fixes(cause: str) -> tuple[Fix, ...]:
    if cause == "reward-slow":
        return (
            Fix("rewards.timeout_s", "3 times as long", "it is not given enough", Grade.SAFE),
            Fix("rewards.workers", "more", "groups are scored side by side", Grade.SAFE),
        )
    return (Fix("rewards.functions", "a function that takes every completion", "it fails now"),)


RULE = Rule(
    code="RWD011",
    name="reward-fn-failing",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "RWD002", "RWD004"),
)
