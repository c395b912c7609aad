"""Completions grow step by step to the length limit while the reward falls.

## What it sees
The mean length grows to `growth` times its first value, over several records and not in one, and
the reward falls below `kept` of what it was. In addition, one of these holds: the share of cut
completions rises above `cut`; the length grows to `huge` times its first value; the log counts more
and more gibberish.

## Why it matters
The policy slides into long gibberish. Long bad answers are punished less per token than short ones,
so the effect reinforces itself.

## Likely causes
- length-explosion-gibberish: the loss is averaged per completion, and nothing anchors the policy.
- too-many-updates-per-rollout: several updates on the same samples push it off-policy.
- entropy-explosion: probability leaks to tokens that make no sense.

## What to do
Go back to a checkpoint before the growth. Normalise the loss over tokens or by a fixed length
(dr_grpo), add a KL penalty, take fewer updates per rollout, mask or penalise cut completions.

## Known false alarms
Reasoning that becomes longer and better; the reward then rises, and nothing is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import is_other_policy
from homeostat.health.rules.readings import raw_number
from homeostat.health.rules.signs import newest, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series

_COUNTED = re.compile(r"gibberish\w{0,20}\W{1,3}(\d{1,9})\b", re.IGNORECASE)


class Options(RuleOptions):
    growth: float = option(1.8, "Factor over the first records that the length must grow by.")
    cut: float = option(0.3, "Share of cut completions that it must reach.")
    huge: float = option(4.0, "Factor that is enough where nothing is known to be cut.")
    kept: float = option(0.7, "Share of the early reward that must be lost below.")
    gradual: int = option(3, "Number of records on the way up that tell a slide from a jump.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    length, reward = view.series("completions/mean_length"), view.series("reward")
    assert length is not None, "needs says so"
    assert reward is not None, "needs says so"
    lengths, early = length.finite(), trend(reward)
    cut, now = newest(view, "completions/clipped_ratio", count=3), newest(view, "reward", count=3)
    if len(lengths) < 8 or early is None or now is None:
        return
    base = median(lengths.values[: max(3, len(lengths) // 6)])
    end = median(lengths.values[-3:])
    on_the_way = (lengths.values > base + 0.15 * (end - base)) & (
        lengths.values < base + 0.85 * (end - base)
    )
    grew = end > options.growth * base and int(on_the_way.sum()) >= options.gradual
    if not grew or now > options.kept * early.start or early.start <= 0:
        return
    if _has_fallen_back(lengths, base, end):
        return
    gibberish = _gibberish(view)
    if (cut or 0.0) < options.cut and end < options.huge * base and not gibberish:
        return
    if is_other_policy(view):
        yield Unknown("the engine does not sample from the trainer's weights")
        return
    first = _began(lengths, base, end)
    yield Sighting(
        message=f"Completions grew from {base:.4g} to {end:.4g} tokens since step {first}, "
        + (f"{cut:.0%} are cut now, " if cut else "")
        + f"and the reward fell from {early.start:.3g} to {now:.3g}.",
        evidence=(
            f"mean length {base:.4g} -> {end:.4g}",
            f"reward {early.start:.3g} -> {now:.3g}",
            *gibberish,
        ),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("algorithm.normalise", "fixed", "long answers count in full", Grade.UNSAFE),
            Fix(
                "algorithm.kl.coefficient",
                "0.001 or more",
                "holds the policy near the reference",
                Grade.UNSAFE,
            ),
            Fix("trainer.updates_per_step", "1", "samples stay on-policy", Grade.UNSAFE),
            Fix(
                "algorithm.overlong",
                "mask",
                "samples that were cut teach the wrong thing",
                Grade.UNSAFE,
                theirs={"trl": "mask_truncated_completions=true"},
            ),
        ),
        first_step=first,
        last_step=int(lengths.steps[-1]),
        value=end,
        limit=options.growth * base,
    )


def _has_fallen_back(lengths: Series, base: float, end: float) -> bool:
    """Return whether earlier lengths were as high and came down: with few answers per step, three
    long ones in a row are chance.
    """
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(lengths.values, 3), axis=1)
    high = smooth > base + 0.85 * (end - base)
    after_first = smooth[int(high.argmax()) :]
    return bool((after_first < base + 0.3 * (end - base)).any())


def _gibberish(view: RunView) -> tuple[str, ...]:
    """Return what orchestrators count as gibberish, if the count has grown."""
    found = [_COUNTED.search(line.text) for line in view.log.find("gibberish")]
    counts = [int(one[1]) for one in found if one]
    if len(counts) < 4 or counts[-1] < max(5, 3 * counts[0]):
        return ()
    return (f"the log counts {counts[-1]} completions of gibberish, {counts[0]} at first",)


def _began(lengths: Series, base: float, end: float) -> int:
    grown = lengths.values > base + 0.1 * (end - base)
    spell = newest_spell(grown, fire=2, clear=2)
    return int(lengths.steps[spell.start if spell is not None else int(grown.argmax())])


def _causes(view: RunView) -> Iterator[Cause]:
    entropy = trend(view.series("entropy"))
    passes = max(
        view.number("trainer.updates_per_step") or 1,
        raw_number(view, "num_iterations", "ppo_epochs") or 1,
    )
    yield Cause("length-explosion-gibberish", "longer and worse at the same time")
    if passes > 1:
        yield Cause("too-many-updates-per-rollout", f"{passes:.0f} passes over the same samples")
    if entropy is not None and entropy.rises and entropy.end > 2 * entropy.start:
        yield Cause("entropy-explosion", f"entropy {entropy.start:.3g} -> {entropy.end:.3g}")


RULE = Rule(
    code="POL011",
    name="length-explosion-gibberish",
    family=Family.POLICY,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("completions/mean_length", "reward"),
    kinds=(Kind.RL,),
    options=Options,
    explains=("GEN001", "GEN004", "POL002", "POL004", "POL012", "RWD001", "RWD006"),
)
