"""Completions grow steadily towards the length limit.

## What it sees
One of two, almost without a step back. Either the mean length rises to `growth` times its first
value, and by now more than `cut` of the completions are cut at the limit. Or, since the record with
the smallest share of cut completions, that share rose by `rise` to more than `many`, while
completions became `longer` times as long and the reward began to fall. With a rising reward the
first of the two is only information.

## Why it matters
The growth may be longer reasoning, or padding that the reward pays for. Either way the limit begins
to cut answers off, and answers that are cut teach nothing. If the reward gains nothing, the growth
is not better reasoning.

## Likely causes
- length-growth: longer answers earn more, or lose less.
- reward-hacking: length itself is rewarded.

## What to do
Read long completions. If their length is worth it, raise the limit. If not, add a penalty near the
limit and go back to the checkpoint from before they grew.

## Known false alarms
Reasoning models that learn to think longer: while the reward rises or the task is solved, the
finding is only information.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.signs import (
    newest,
    smooth,
    smoothing_window,
    solved_share,
    trend,
    turned_down,
)
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    growth: float = option(1.5, "Factor over the first records that the length must grow by.")
    cut: float = option(0.15, "Share of cut completions that it must reach.")
    fire: int = option(10, "Number of records that are needed.")
    many: float = option(0.3, "Share of cut completions that is much, where the reward falls.")
    rise: float = option(0.25, "What that share must have risen by since it was lowest.")
    longer: float = option(1.15, "Factor that the length must have grown by since then.")
    since: int = option(6, "Number of records since then that are needed.")


@dataclass(frozen=True, slots=True)
class Growth:
    """Mean length before and after it grew, the step since which it does, and what became of the
    reward meanwhile."""

    start: float
    end: float
    step: int
    pays: bool
    is_fine: bool


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    length, cut = view.series("completions/mean_length"), newest(view, "completions/clipped_ratio")
    assert length is not None, "needs says so"
    if len(length) < options.fire or cut is None or cut < options.cut:
        return
    grown = _from_the_start(view, length, options) or _since_lowest(view, length, options)
    if grown is None:
        return
    causes = [Cause("length-growth", "answers become longer step by step")]
    if grown.pays:
        causes.append(
            Cause("reward-hacking", "the reward rises with the length: it may pay for length")
        )
    yield Sighting(
        message=f"Completions grew from {grown.start:.4g} to {grown.end:.4g} tokens since step "
        f"{grown.step}, and {cut:.0%} are cut at the limit by now"
        + ("" if grown.is_fine else ", while the reward gains nothing")
        + ". Read a few long completions.",
        evidence=(f"mean length {grown.start:.4g} -> {grown.end:.4g}",),
        causes=tuple(causes),
        fixes=(
            Fix(
                "rollout.max_new_tokens", "larger", "if the longer answers earn more", Grade.UNSAFE
            ),
            Fix("algorithm.overlong", "shape", "if the longer answers earn no more", Grade.UNSAFE),
        ),
        first_step=grown.step,
        last_step=int(length.steps[-1]),
        value=grown.end,
        level=Level.INFO if grown.is_fine else None,
    )


def _from_the_start(view: RunView, length: Series, options: Options) -> Growth | None:
    """Return the growth over the whole run, if there is one."""
    grown, reward = trend(length), trend(view.series("reward"))
    cut, solved = trend(view.series("completions/clipped_ratio")), solved_share(view)
    if grown is None or grown.end <= options.growth * grown.start or rank_correlation(length) < 0.9:
        return None
    pays = reward is not None and reward.rises
    more_cut = cut is not None and cut.rises
    # Without a reward nobody can say whether it is worth it.
    is_fine = pays or reward is None or not more_cut or (solved is not None and solved > 0.8)
    return Growth(grown.start, grown.end, int(length.steps[0]), pays, is_fine)


def _since_lowest(view: RunView, length: Series, options: Options) -> Growth | None:
    """Return the growth since completions were cut least, if the reward has turned down in it."""
    cut, reward = view.series("completions/clipped_ratio"), view.series("reward")
    assert cut is not None, "needs says so"
    finite = cut.finite()
    now = median(finite.values[-smoothing_window(len(finite)) :])
    # Most runs end here, and running medians over all of a long run take time.
    if reward is None or not now >= options.many:
        return None
    medians, window = smooth(cut)
    if not len(medians):
        return None
    # If several places are lowest, take the newest, and there the middle of the window.
    lowest = len(medians) - 1 - int(np.argmin(medians.values[::-1]))
    step, least = int(finite.steps[lowest + window // 2]), float(medians.values[lowest])
    part, shares = length.since(step), cut.since(step)
    grown = trend(part)
    if grown is None or len(part) < options.since or len(shares) < options.since:
        return None
    steady = rank_correlation(part) > 0.8 and rank_correlation(shares) > 0.8
    if not steady or now < least + options.rise:
        return None
    best = turned_down(reward)
    if grown.end < options.longer * grown.start or best is None or best < step:
        return None
    return Growth(grown.start, grown.end, step, pays=False, is_fine=False)


RULE = Rule(
    code="POL012",
    name="length-growth",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("completions/mean_length", "completions/clipped_ratio"),
    kinds=(Kind.RL,),
    options=Options,
)
