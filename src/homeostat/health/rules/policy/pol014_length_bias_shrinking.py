"""Completions shrink steadily, and the reward gains nothing from it.

## What it sees
The mean length falls almost without a step back to less than `kept` of its first value, while the
reward does not rise.

## Why it matters
If the loss is averaged per completion, each token of a short answer gets a larger gradient than a
token of a long one. Short right answers are reinforced faster than long ones, whatever the task
needs; reasoning is lost first.

## Likely causes
- length-bias-shrinking: the loss is averaged per completion.
- length-penalty-too-strong: a reward for being short outweighs the others.
- entropy-collapse: the policy settles on one short answer.

## What to do
Normalise over tokens or by a fixed length (dr_grpo, dapo). Give a length penalty less weight.

## Known false alarms
Answers that were cut at the limit at first and learn to end, and answers that become more concise:
the reward then rises, and the finding is only information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.signs import reward_functions, text_of_settings, trend
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    kept: float = option(0.5, "Share of the first length that is left, at most.")
    fire: int = option(10, "Number of records that are needed.")
    min_length: float = option(16.0, "Tokens below which answers are short anyway.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    length = view.series("completions/mean_length")
    assert length is not None, "needs says so"
    shrunk, reward = trend(length), trend(view.series("reward"))
    if len(length) < options.fire or shrunk is None or shrunk.start < options.min_length:
        return
    if shrunk.end > options.kept * shrunk.start or rank_correlation(length) > -0.9:
        return
    cut = trend(view.series("completions/clipped_ratio"))
    fine = (reward is not None and reward.rises) or (cut is not None and cut.start > 0.4)
    yield Sighting(
        message=f"Completions shrank from {shrunk.start:.4g} to {shrunk.end:.4g} tokens"
        + (
            f" while the reward went from {reward.start:.3g} to {reward.end:.3g}."
            if reward is not None
            else "."
        )
        + ("" if fine else " Normalise the loss over tokens or by a fixed length."),
        evidence=(f"mean length {length.first:.4g} -> {length.latest:.4g}",),
        causes=tuple(_causes(view)),
        fixes=(
            Fix(
                "algorithm.normalise",
                "fixed",
                "the length of an answer then no longer changes its weight",
                Grade.UNSAFE,
            ),
            Fix("algorithm.type", "dr_grpo", "this algorithm does not have the bias", Grade.UNSAFE),
        ),
        first_step=int(length.steps[0]),
        last_step=int(length.steps[-1]),
        value=shrunk.end,
        limit=options.kept * shrunk.start,
        level=Level.INFO if fine else None,
    )


def _causes(view: RunView) -> Iterator[Cause]:
    penalties = [name for name in reward_functions(view) if "len" in name.lower()]
    normalise = text_of_settings(view, "normalise", "loss_agg_mode", "loss_type").lower()
    averaged = "sequence" in normalise or "seq-mean" in normalise or "grpo" in normalise.split()
    why = "the loss is averaged per completion" if averaged else "short answers move tokens more"
    bias = Cause("length-bias-shrinking", why)
    paid = [Cause("length-penalty-too-strong", f"{name} may pay for it") for name in penalties[:1]]
    yield from (bias, *paid) if averaged else (*paid, bias)
    entropy = trend(view.series("entropy"))
    if entropy is not None and entropy.falls and entropy.end < 0.2 * entropy.start:
        yield Cause("entropy-collapse", f"entropy fell to {entropy.end:.3g}")


RULE = Rule(
    code="POL014",
    name="length-bias-shrinking",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("completions/mean_length",),
    kinds=(Kind.RL,),
    options=Options,
)
