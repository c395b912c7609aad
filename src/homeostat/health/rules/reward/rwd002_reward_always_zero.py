"""No answer has ever earned anything.

## What it sees
The mean reward is exactly 0 in every record since the first one, over `fire` records and `steps`
steps at least.

## Why it matters
Nothing can be learned from answers that are all equally wrong: advantages and gradient are 0. Often
the answers are fine, but the reward function does not recognise them.

## Likely causes
- reward-fn-failing: the reward function raises or times out.
- dataset-column-missing: the function asks for a column that the rows do not have.
- reward-fn-returns-none: the function returns None for every answer.
- empty-completions: there is nothing to score.
- truncation-at-cap: answers are cut before they give a result.
- engine-logprob-mismatch: the engine serves other weights than the trainer's.
- verifier-format-mismatch: the verifier looks for a marker that the model never writes.
- task-too-hard: the model cannot solve any of the prompts yet.

## What to do
Call the reward function by hand on a completion that you know to be right. Then read a few
completions: do they end, and do they contain the marker that the verifier looks for?

## Known false alarms
A sparse reward may stay 0 for many steps before the first success; such a run learns nothing in
that time either.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import is_other_policy
from homeostat.health.rules.signs import is_nonfinite, is_zero, moves, newest, reward_functions
from homeostat.health.view import Kind, RunView
from homeostat.health.words import shortened

_MARKS = ("\\boxed", "<answer>", "####", "</think>", "final answer")


class Options(RuleOptions):
    fire: int = option(4, "Number of records that must show it, without an exception.")
    steps: int = option(6, "Steps that they must span.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    lowest = newest(view, "reward/min", count=len(reward))
    span = int(reward.steps[-1] - reward.steps[0]) + 1
    if len(reward) < options.fire or span < options.steps:
        return
    highest = view.series("reward/max")
    zero = bool(is_zero(view, "reward", reward.values).all())
    varies = any(moves(series) for series in reward_functions(view).values())
    paid = highest is not None and bool((highest.finite().values > 0.0).any())
    # A mean of exactly 0 with rewards of both signs is centred, not absent.
    if not zero or varies or paid or (lowest is not None and lowest < 0.0):
        return
    first = int(reward.steps[0])
    causes = tuple(_causes(view))
    yield Sighting(
        message=f"The reward is exactly 0 in all {len(reward)} records since step {first}: nothing "
        "can be learned. Score a completion that you know to be right by hand.",
        evidence=tuple(_evidence(view)),
        causes=causes,
        fixes=_fixes(causes[0].name),
        first_step=first,
        last_step=int(reward.steps[-1]),
        value=0.0,
        confidence=Confidence.INFERRED if len(reward) < 10 else None,
    )


def _evidence(view: RunView) -> Iterator[str]:
    for name in ("completions/mean_length", "completions/clipped_ratio", "entropy", "grad_norm"):
        value = newest(view, name)
        if value is not None:
            yield f"{name} {value:.4g}"


def _causes(view: RunView) -> Iterator[Cause]:
    """Those that something speaks for, the surest first."""
    yield from _failing(view)
    length, cut = newest(view, "completions/mean_length"), newest(view, "completions/clipped_ratio")
    texts = [sample.text for sample in view.samples]
    if (length is not None and length <= 1.0) or (texts and not any(t.strip() for t in texts)):
        yield Cause("empty-completions", "the completions are empty")
    if cut is not None and cut > 0.5:
        yield Cause("truncation-at-cap", f"{cut:.0%} of the completions are cut at the limit")
    if is_other_policy(view):
        yield Cause("engine-logprob-mismatch", "the engine seems to serve other weights")
    marked = [any(mark in text.lower() for mark in _MARKS) for text in texts]
    if texts and not any(marked):
        why = f"none of {len(texts)} completions holds a marker for the answer"
    else:
        why = "completions end by themselves, yet none is right: check what the verifier expects"
    yield Cause("verifier-format-mismatch", why)
    if is_nonfinite(view, "train/loss", "grad_norm"):
        yield Cause("nan-update-poisoned-weights", "loss or gradient is not finite")
    yield Cause("task-too-hard", "the model may not be able to solve any prompt")


def _failing(view: RunView) -> Iterator[Cause]:
    failed = {
        name: s.finite().values.sum() for name, s in view.matching("rewards/", "/failed").items()
    }
    troubles = [e for e in view.events_of("reward_trouble") if e.fields.get("failure") != "none"]
    said = " ".join(str(event.fields.get("message", "")) for event in troubles)
    if "KeyError" in said or "missing" in said or "column" in said:
        yield Cause("dataset-column-missing", f"the reward failed with: {shortened(said, 120)}")
    if troubles or any(count > 0 for count in failed.values()):
        names = ", ".join(name for name, count in failed.items() if count > 0) or "a reward"
        yield Cause("reward-fn-failing", f"{names} failed to give values")
    none = [name for name, s in view.matching("rewards/", "/none").items() if s.latest > 0]
    if none:
        yield Cause("reward-fn-returns-none", f"{', '.join(none)} gives None")


def _fixes(cause: str) -> tuple[Fix, ...]:
    if cause == "truncation-at-cap":
        return (Fix("rollout.max_new_tokens", "twice as many", "answers need to be finished"),)
    if cause in ("reward-fn-failing", "dataset-column-missing", "reward-fn-returns-none"):
        return (Fix("rewards.functions", "a function that works on these rows", "it fails"),)
    return (
        Fix(
            "rewards.functions",
            "a verifier that fits what the model writes",
            "no completion is recognised as right",
            theirs={"slime": "--rm-type", "miles": "--rm-type"},
        ),
        Fix("data.train", "easier prompts at first", "some must be solved now and then"),
    )


RULE = Rule(
    code="RWD002",
    name="reward-always-zero",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001",),
)
