"""Completions are empty.

## What it sees
The mean length stays at `max_length` token or less in `fire` records, or all printed completions
are empty, while rewards are not at their maximum.

## Why it matters
There is nothing to score and nothing to learn from.

## Likely causes
- empty-completions: the first token ends the answer: the prompt already ends the turn, or a stop
  text matches at once.
- policy-collapse: saying nothing has been reinforced.

## What to do
Print a prompt as the engine gets it, with special tokens. Is there an end token at its end, is the
generation prompt missing? Check stop texts.

## Known false alarms
Tasks whose answers are one token, where the reward tells that they are right.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import solved_share, trend
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_length: float = option(1.05, "Mean tokens of completions that hold nothing.")
    fire: int = option(3, "Number of consecutive records that must show it.")
    samples: int = option(3, "Empty samples that are enough, if all are.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    length, samples = view.series("completions/mean_length"), view.samples
    if length is None and not samples:
        yield Unknown("neither lengths nor completions are known")
        return
    newest = [s for s in samples if s.step == samples[-1].step]
    empty = len(newest) >= options.samples and not any(s.text.strip() for s in newest)
    spell = (
        newest_spell(length.values <= options.max_length, fire=options.fire, clear=2)
        if length is not None
        else None
    )
    short = spell is not None and spell.is_open
    if not empty and not short:
        return
    reached, reward = solved_share(view), trend(view.series("reward"))
    rises = reward is not None and reward.rises
    if not empty and (rises or (reached is not None and reached > 0.3)):
        return
    first = newest[0].step if newest else None
    shrank = False
    if length is not None and spell is not None and short:
        first, shrank = int(length.steps[spell.start]), spell.start > 2
    cause = _cause(view, shrank=shrank, paid=rises)
    mean = length.values[spell.end] if length is not None and spell is not None and short else 0.0
    said = f"mean length {mean:.3g}" if short else f"{len(newest)} of {len(newest)} are"
    yield Sighting(
        message=f"Completions are empty ({said}). Print a prompt as the engine gets it: does it "
        "end the turn already, is the generation prompt missing?",
        evidence=(said,),
        causes=(cause, Cause("empty-completions", "there is nothing to score")),
        fixes=(
            Fix("data.train[].chat", "true", "adds the generation prompt"),
            Fix(
                "rollout.stop",
                "no text that a completion begins with",
                "such a text may match at once",
            ),
        ),
        first_step=first,
        last_step=view.last_step,
        value=float(mean),
        limit=options.max_length,
    )


def _cause(view: RunView, *, shrank: bool, paid: bool) -> Cause:
    length, reward = trend(view.series("completions/mean_length")), trend(view.series("reward"))
    if paid and length is not None and reward is not None and length.falls:
        return Cause(
            "length-penalty-too-strong",
            f"the reward rose from {reward.start:.3g} to {reward.end:.3g} as they shrank",
        )
    if shrank:
        return Cause("policy-collapse", "answers shrank to nothing in the course of the run")
    return Cause("empty-completions", "the first token ends the answer")


RULE = Rule(
    code="GEN003",
    name="empty-completions",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=("POL001", "POL014", "POL015", "RWD001", "RWD002", "RWD004", "RWD006"),
)
