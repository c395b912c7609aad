"""Reward and length of the answers rise together, record by record.

## What it sees
Over `fire` records both rise almost without a step back, the length by at least `min_growth`. It is
a warning if answers have grown `hack_growth`-fold up to the limit, more than `cut` of them are now
cut, and the reward rose all the same, and not by a few late successes alone.

## Why it matters
Longer thinking may well be what earns more. But if the reward pays for length itself, answers will
grow to the limit without becoming better.

## Likely causes
- reward-hacking: the reward pays for length: answers that are cut earn more than finished ones.
- reward-tracks-length: longer answers earn more, for a good reason or a bad one.

## What to do
Compare short and long completions of equal quality. Watch the held-out reward and the share of cut
completions; a penalty near the limit (algorithm.overlong: shape) keeps growth in bounds.

## Known false alarms
Reasoning models that learn to think longer: the ordinary case, and information only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.signs import Trend, trend
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    fire: int = option(16, "Number of records that are needed.")
    min_growth: float = option(1.5, "Factor by which the length must have grown.")
    hack_growth: float = option(1.8, "The same, up to a limit that cuts most answers.")
    cut: float = option(0.7, "Share of cut answers that speaks for paid length.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward, length = view.series("reward"), view.series("completions/mean_length")
    assert reward is not None, "needs says so"
    assert length is not None, "needs says so"
    reward, length = reward.on(length)
    gain, growth = trend(reward), trend(length)
    if gain is None or growth is None or not gain.rises or not growth.rises:
        return
    paid = _is_no_chance(reward) and _cut_and_paid(view, growth, options)
    together = (
        rank_correlation(reward) > 0.9
        and rank_correlation(length) > 0.9
        and len(reward) >= options.fire
    )
    if not paid and not (together and growth.end > options.min_growth * growth.start):
        return
    causes = [Cause("reward-tracks-length", "both rise in step")]
    if paid:
        causes.insert(0, Cause("reward-hacking", "answers without an end earn more than others"))
    yield Sighting(
        message=f"Reward ({gain.start:.3g} to {gain.end:.3g}) and length ({growth.start:.4g} to "
        f"{growth.end:.4g} tokens) rise together"
        + (", up to the limit that cuts most answers: length itself is paid." if paid else ".")
        + " Compare short and long answers of equal worth.",
        evidence=(f"over steps {length.steps[0]}-{length.steps[-1]}",),
        causes=tuple(causes),
        fixes=(
            Fix(
                "rewards.functions",
                "a reward that does not pay for length",
                "longer answers then earn no more",
            ),
            Fix("algorithm.overlong", "shape", "penalises answers that are too long", Grade.UNSAFE),
        ),
        first_step=int(length.steps[0]),
        last_step=int(length.steps[-1]),
        value=growth.end,
        level=Level.WARN if paid else None,
        confidence=Confidence.INFERRED if paid else None,
    )


def _is_no_chance(reward: Series) -> bool:
    """Return whether the order of the rewards shows the rise, not only a few late successes.

    Means of a reward that is nearly always 0 differ by much between the parts of a run.
    """
    return rank_correlation(reward) * math.sqrt(len(reward)) > 3.0


def _cut_and_paid(view: RunView, growth: Trend, options: Options) -> bool:
    """Most answers are cut by now, few were at first: what earns more cannot be their result."""
    cut = view.series("completions/clipped_ratio")
    if cut is None or len(cut.finite()) < 6 or growth.end < options.hack_growth * growth.start:
        return False
    values = cut.finite().values
    return bool(median(values[:3]) < 0.3 and median(values[-3:]) > options.cut)


RULE = Rule(
    code="RWD008",
    name="reward-tracks-length",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("reward", "completions/mean_length"),
    kinds=(Kind.RL,),
    options=Options,
    explains=("GEN001", "POL012", "RWD001", "RWD005"),
)
