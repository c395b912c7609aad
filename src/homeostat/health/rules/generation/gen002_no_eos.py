"""Not one completion ever ends by itself, and something says why.

## What it sees
Every completion is cut in every record since the first, over `fire` records, and one of: prompts
are plain text for a chat model; pad and end token are the same; completions run on into a next
turn; or the limit is so generous (`long` tokens) that answers must fit.

## Why it matters
The answer may be complete, but the model continues because nothing ends it. Time is spent on text
that nobody asked for, and verifiers that read the end find the wrong thing.

## Likely causes
- prompt-not-chat-formatted: the chat template is not applied, so the end of a turn never comes.
- pad-equals-eos: the end token was masked as padding when the model was trained.
- missing-stop-token: the engine does not know the model's end-of-turn token.

## What to do
Give prompts as messages so that the template is applied; set the model's end-of-turn token as a
stop token; use a separate pad token.

## Known false alarms
Base models that were never taught to end: a few examples of SFT teach it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import raw_number
from homeostat.health.rules.signs import newest, plain_prompts, runs_on
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(4, "Number of records that must show it, without an exception.")
    long: int = option(8192, "Tokens that any answer should fit in.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    cut = view.series("completions/clipped_ratio")
    assert cut is not None, "needs says so"
    ended = newest(view, "completions/mean_terminated_length", count=len(cut))
    if len(cut) < options.fire or cut.values.min() < 0.995 or (ended or 0.0) > 0.0:
        return
    causes = tuple(_causes(view, options))
    if not causes:
        return
    length = newest(view, "completions/mean_length")
    yield Sighting(
        message=f"Not one completion has ended by itself in {len(cut)} records"
        + (f" ({length:.0f} tokens each)" if length is not None else "")
        + f": {causes[0].why}.",
        evidence=tuple(cause.why for cause in causes),
        causes=causes,
        fixes=(
            Fix(
                "data.train[].chat",
                "true",
                "the chat template adds the end-of-turn token",
                Grade.UNSAFE,
            ),
            Fix(
                "rollout.stop_token_ids",
                "the end-of-turn token",
                "sampling ends at that token",
                Grade.UNSAFE,
            ),
            Fix(
                "model.pad_token",
                "one of its own",
                "the end of an answer is then not masked as padding",
                Grade.UNSAFE,
            ),
        ),
        first_step=int(cut.steps[0]),
        last_step=int(cut.steps[-1]),
        value=float(cut.values.mean()),
    )


def _causes(view: RunView, options: Options) -> Iterator[Cause]:
    plain = plain_prompts(view)
    if plain:
        yield Cause("prompt-not-chat-formatted", plain)
    pad, end = raw_number(view, "pad_token_id"), raw_number(view, "eos_token_id")
    if pad is not None and pad == end:
        yield Cause("pad-equals-eos", f"pad and end token are both {pad:.0f}")
    if runs_on(sample.text for sample in view.samples):
        yield Cause("missing-stop-token", "completions run on into a next turn")
    cap = view.number("rollout.max_new_tokens") or newest(view, "completions/mean_length")
    if cap is not None and cap >= options.long:
        yield Cause("missing-stop-token", f"nothing ends within {cap:.0f} tokens")


RULE = Rule(
    code="GEN002",
    name="no-eos",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("completions/clipped_ratio",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("GEN001", "RWD001", "RWD002"),
)
