"""A chat model is given plain prompts, and its answers are worth nothing.

## What it sees
The settings, the log or printed prompts say that prompts are passed on without the chat template
to a model that was taught chats. The reward stays below `max_reward` over `fire` records, and most
of the first completions did not end by themselves, or were empty.

## Why it matters
Without its template a chat model continues the text; it does not answer, and does not know where to
end. RL then first has to undo this.

## Likely causes
- prompt-not-chat-formatted: prompts are strings where the framework expects messages, or the
  template is switched off.

## What to do
Give prompts as messages, or switch the template on. Print one prompt as the engine gets it.

## Known false alarms
A model whose name contains chat or instruct but that has since been trained for something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.rules.signs import plain_prompts
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    max_reward: float = option(0.1, "Mean reward below which answers are worth nothing.")
    fire: int = option(8, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward = needed(view, "reward").finite()
    plain = plain_prompts(view)
    if not plain or len(reward) < options.fire:
        return
    ends = [median(part.values) for part in (reward.head(5), reward.tail(5))]
    if not 0.0 <= min(ends) <= max(ends) < options.max_reward:
        return
    told = _first_answers(view)
    if not told:
        return
    yield Sighting(
        message=f"The reward stays at {ends[1]:.2g}, {told}, and {plain}: prompts do not have the "
        "form that the model was taught. Give prompts as messages, so that the template is "
        "used.",
        evidence=(plain, told, f"reward {ends[0]:.2g} -> {ends[1]:.2g}"),
        causes=(Cause("prompt-not-chat-formatted", plain),),
        fixes=(Fix("data.train[].chat", "true", "prompts become user turns", Grade.UNSAFE),),
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=ends[1],
        limit=options.max_reward,
    )


def _first_answers(view: RunView) -> str:
    """Return what is odd about the first completions; "" if nothing is."""
    cut, length = _start(view, "completions/clipped_ratio"), _start(view, "completions/mean_length")
    if cut is not None and cut > 0.5:
        return f"{cut:.0%} of the first completions were cut"
    return "the first completions were empty" if length is not None and length <= 1.5 else ""


def _start(view: RunView, name: str) -> float | None:
    series: Series | None = view.series(name)
    values = series.finite().values[:5] if series is not None else ()
    return median(values) if len(values) else None


RULE = Rule(
    code="DAT016",
    name="prompt-not-chat-formatted",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "RWD002", "RWD015"),
    yields_to=("GEN001", "GEN002"),
)
