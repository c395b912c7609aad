"""A reward function raises, times out, or returns values that cannot be used.

## What it sees
`rewards/<name>/failed` counts samples without a value in `fire` of the newest `window` records. It
is a warning from a share of `max_share` of a step's samples on, and an error from half of them on.

## Why it matters
A sample on which a reward failed is not trained on, whatever the other rewards gave it, because its
true reward is not known. Failures that depend on the answer (long ones time out, odd ones raise)
still bias what the policy learns, because it learns only from the other answers.

## Likely causes
- dataset-column-missing: the function asks for a column that the rows do not have.
- reward-fn-signature: the function does not accept the arguments that it is given.
- reward-timeout: the function hangs. Call after call reaches rewards.timeout_s, so a higher limit
  would only make each step longer.
- reward-slow: some calls take longer than rewards.timeout_s.
- reward-fn-failing: the function raises, crashes its process, or returns lists of the wrong length
  or type.

## What to do
The events `reward_trouble` hold the traceback and the completion that caused it. Run the function
on that completion.

## Known false alarms
Rare failures on broken completions, which are information.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import samples_per_step
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Event, Kind, RunView, Series
from homeostat.health.words import shortened

# From here on a function that runs out of time is one that hangs.
HANGING_CALLS = 3
HANGING_SHARE = 0.9

# Characters of an error's text that the finding repeats.
_MAX_QUOTE = 160


class Options(RuleOptions):
    max_share: float = option(0.02, "Largest share of a step's samples that may fail.")
    fire: int = option(2, "Number of records that must show it ...")
    window: int = option(4, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for name, failed in view.matching("rewards/", "/failed").items():
        spell = newest_spell(
            failed.values > 0, fire=options.fire, window=options.window, clear=options.window
        )
        if spell is not None and spell.is_open:
            yield _sighting(view, name, failed.since(int(failed.steps[spell.start])), options)


def _sighting(view: RunView, name: str, failed: Series, options: Options) -> Sighting:
    per_record, share = float(failed.values.mean()), _share(view, name, failed)
    causes = tuple(_causes(view, name, share))
    level = Level.WARN if share is None or share > options.max_share else Level.INFO
    said = f"{share:.1%} of the samples" if share is not None else f"{per_record:.4g} a record"
    return Sighting(
        message=f"The reward {name} has failed on {said} since step {failed.steps[0]}; these are "
        "not trained. The event reward_trouble shows why, with the completion.",
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


def _share(view: RunView, name: str, failed: Series) -> float | None:
    """Share of the samples since the failures began; from the sizes where it is not logged."""
    logged = view.series(f"rewards/{name}/failed_share")
    if logged is not None and len(since := logged.since(int(failed.steps[0]))):
        return float(since.values.mean())
    samples = samples_per_step(view)
    return float(failed.values.mean()) / samples if samples else None


def _causes(view: RunView, name: str, share: float | None) -> Iterator[Cause]:
    events = [e for e in view.events_of("reward_trouble") if e.fields.get("reward") == name]
    troubles = [event for event in events if event.fields.get("failure") != "none"]
    messages = dict.fromkeys(str(e.fields.get("message", "")) for e in troubles[-5:])
    said = shortened(" | ".join(messages), _MAX_QUOTE)
    kinds = Counter(str(e.fields.get("failure", "")) for e in troubles)
    if "KeyError" in said or "column" in said:
        yield Cause("dataset-column-missing", f"it said: {said}")
    if "unexpected keyword" in said or "positional argument" in said:
        yield Cause("reward-fn-signature", f"it said: {said}")
    if kinds["timeout"]:
        yield _time_out([e for e in troubles if e.fields.get("failure") == "timeout"], share)
    yield Cause("reward-fn-failing", said or "values are missing")


def _time_out(timeouts: list[Event], share: float | None) -> Cause:
    """Return whether a reward hangs, which more time does not fix, or is only slow at times."""
    in_a_row = max(_number(event.fields.get("calls_in_a_row")) for event in timeouts)
    if in_a_row < HANGING_CALLS and (share is None or share < HANGING_SHARE):
        return Cause("reward-slow", "some of its calls ran out of time")
    stack = [line.strip() for line in str(timeouts[-1].fields.get("traceback", "")).splitlines()]
    place = next((line for line in stack if line.startswith("File ")), "")
    times = f"{in_a_row:.0f} calls in a row" if in_a_row > 1 else "call after call"
    at = f", the last at {shortened(place, _MAX_QUOTE)}" if place else ""
    return Cause("reward-timeout", f"it ran out of time {times}{at}")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _fixes(cause: str) -> tuple[Fix, ...]:
    if cause == "reward-slow":
        return (
            Fix("rewards.timeout_s", "3 times as long", "its time limit is too short", Grade.SAFE),
            Fix("rewards.workers", "more", "groups are scored side by side", Grade.SAFE),
        )
    if cause == "reward-timeout":
        why = "it hangs: the event's traceback shows where. A longer limit only makes steps longer"
        return (Fix("rewards.functions", "a function that comes to an end", why),)
    return (
        Fix(
            "rewards.functions", "a function that accepts every completion", "the present one fails"
        ),
    )


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
