"""Completions are cut at the length limit.

## What it sees
The share of cut completions above `limit` in `fire_some` of the newest records, or above `most` in
`fire` of them, and neither falling nor justified by a rising reward. A share that jumped up from
one record to the next is left to the rules about policy and weights.

## Why it matters
An answer that is cut has no result to be scored. It earns nothing, however good it was, and teaches
the policy to be short rather than right.

## Likely causes
- truncation-at-cap: the limit is below the natural length of answers.
- no-eos: the model never writes its end token (chat template not applied, stop token not set).
- length-growth: answers have grown up to the limit.

## What to do
Raise rollout.max_new_tokens above the natural length. If nothing ever ends, look at the end of a
few completions: does the answer stand in the middle, with text running on after it?

## Known false alarms
The first steps of a model that learns to end its answers: the share falls, or reward rises. (A
reward that rose only in the first third of the run does not count, and no reward counts while more
than `all_cut` stay cut.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import is_other_policy
from homeostat.health.rules.readings import mean_since
from homeostat.health.rules.signs import gains, plain_prompts, runs_on, solved_share, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import Spell, held_mean, newest_spell
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    limit: float = option(0.3, "Share of cut completions that is much.")
    most: float = option(0.8, "Share that leaves little to learn from.")
    all_cut: float = option(0.95, "Share that no reward makes up for.")
    fire: int = option(5, "Number of consecutive records above `most` that are enough.")
    fire_some: int = option(10, "Number of records among 12 above `limit` that are enough.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    cut = view.series("completions/clipped_ratio")
    assert cut is not None, "needs says so"
    most = newest_spell(cut.values > options.most, fire=options.fire, clear=3)
    spell = most or newest_spell(
        cut.values > options.limit, fire=options.fire_some, window=12, clear=4
    )
    if spell is None or not spell.is_open:
        return
    if _jumped(cut, spell):
        step = cut.steps[spell.start]
        yield Unknown(f"the share jumped at step {step}: policy or weights changed, not the limit")
        return
    if is_other_policy(view):
        yield Unknown("the engine does not sample from the trainer's weights")
        return
    limit = options.most if most is not None else options.limit
    first, value = int(cut.steps[spell.start]), held_mean(cut.values, cut.values > limit, spell)
    yield Sighting(
        message=f"{value:.0%} of the completions are cut at the length limit since step {first} "
        f"(limit {limit:.0%}). Raise rollout.max_new_tokens, or find out why they do not end.",
        evidence=tuple(_evidence(view, first, value)),
        causes=tuple(_causes(view, first, value)),
        fixes=_fixes(view),
        first_step=first,
        last_step=int(cut.steps[spell.end]),
        value=value,
        limit=limit,
        level=Level.INFO if _is_fine(view, cut, options) else None,
        confidence=Confidence.INFERRED if most is not None else None,
    )


def _jumped(cut: Series, spell: Spell) -> bool:
    """Up from next to nothing within one record, after something else than the very first one."""
    # The episode may begin some records after the jump.
    low = np.flatnonzero(cut.values[: spell.start] < 0.5)
    if not len(low):
        return False
    start = int(low[-1]) + 1
    before, after = cut.values[:start], cut.values[start : start + 3]
    return bool(before[-3:].max() < 0.2 and after.min() > 0.5)


def _is_fine(view: RunView, cut: Series, options: Options) -> bool:
    """The share falls, the reward rises, or the task is solved all the same. Where next to nothing
    ever ends, what is learned is not to end."""
    share, reward, reached = trend(cut), trend(view.series("reward")), solved_share(view)
    falls = share is not None and share.falls and share.end < 0.85 * share.start
    if len(cut) >= options.fire_some and median(cut.values) > options.all_cut:
        return falls
    rises = reward is not None and gains(view.series("reward")) and reward.end > 1.1 * reward.start
    return falls or rises or (reached is not None and reached > 0.8)


def _evidence(view: RunView, first: int, value: float) -> Iterator[str]:
    yield f"completions/clipped_ratio {value:.2f} since step {first}"
    for name in ("completions/mean_length", "completions/max_length", "reward"):
        mean = mean_since(view, name, step=first)
        if mean is not None:
            yield f"{name} {mean:.4g}"


def _causes(view: RunView, first: int, value: float) -> Iterator[Cause]:
    cap = view.number("rollout.max_new_tokens")
    ended = mean_since(view, "completions/mean_terminated_length", step=first)
    grown = trend(view.series("completions/mean_length"))
    why = f"the limit is {cap:.0f} tokens" if cap else "the limit is below the answers' length"
    if grown is not None and grown.rises and grown.end > 1.5 * grown.start:
        yield Cause("length-growth", f"answers grew from {grown.start:.4g} to {grown.end:.4g}")
    plain = plain_prompts(view) if value > 0.5 else ""
    if plain:
        yield Cause("prompt-not-chat-formatted", plain)
    if runs_on(sample.text for sample in view.samples):
        yield Cause("no-eos", "completions run on into a next turn")
    reward = mean_since(view, "reward", step=first)
    if value > 0.95 and reward is not None and (solved_share(view) or 0.0) > 0.2:
        yield Cause("no-eos", f"answers that are cut earn {reward:.2g}: they are done, and go on")
    yield Cause("truncation-at-cap", why)
    if value > 0.995 and (ended is None or ended == 0.0):
        yield Cause("no-eos", "not one completion ends by itself")


def _fixes(view: RunView) -> tuple[Fix, ...]:
    cap = view.number("rollout.max_new_tokens")
    more = f"{2 * cap:.0f} or more" if cap else "at least twice as many"
    return (
        Fix("rollout.max_new_tokens", more, "answers need to be finished", Grade.UNSAFE),
        Fix(
            "rollout.stop_token_ids",
            "the end-of-turn token",
            "if no completion ends by itself",
            Grade.UNSAFE,
        ),
        Fix(
            "algorithm.overlong",
            "mask",
            "do not learn from cut answers",
            Grade.UNSAFE,
            theirs={"trl": "mask_truncated_completions=true"},
        ),
    )


RULE = Rule(
    code="GEN001",
    name="truncation-at-cap",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("completions/clipped_ratio",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "RWD002", "RWD015"),
)
