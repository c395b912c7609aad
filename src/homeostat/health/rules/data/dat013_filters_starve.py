"""Filters drop so many groups that steps are trained on fewer groups than they should have.

## What it sees
One of two, in `fire` of the newest `window` records: a step lacks more than `max_lacking` of its
groups because all of its sampling rounds were used up; or filters drop more than `max_share` of the
sampled groups. It is only information if most of the dropped groups have right answers only.

## Why it matters
The engine samples groups that nobody trains on, up to as many times as there are rounds, and the
update is then made of few groups: noisy, and biased towards prompts that happen to pass.

## Likely causes
- user-code-failed: a filter of the user raises, hangs or returns nonsense, which drops the group.
- truncation-at-cap: a filter drops groups of completions that were cut off, and most are.
- zero-std-groups: most prompts are solved always or never, so their groups have no spread.
- filters-starve-step: the bounds of the filters leave out most of what the policy samples.

## What to do
See which reason is counted most (filter/<reason>). Repair a filter that fails, raise
`rollout.max_new_tokens` if completions are cut off, draw prompts of the right difficulty
(`rollout.curriculum.difficulty`) if groups have no spread, or widen the filter's bounds. More
rounds take time and do not remove the cause.

## Known false alarms
A policy that has learnt nearly everything has few groups left to learn from: then the run is done.
It is recognised by the reason that is counted most and by the reward of all sampled groups. A group
or two that are lacking now and then change an update no more than chance does.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.reward.rwd001_zero_std_groups import score_alike_because_right
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series

_NO_SPREAD = ("all_same_reward", "all_failed", "too_few_rewards")


class Options(RuleOptions):
    max_share: float = option(0.9, "Share of dropped groups at which sampling is wasted.")
    max_lacking: float = option(0.2, "Share of a step's groups that may be lacking.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(4, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    dropped = _dropped(view)
    lacking = view.series("rollout/groups_lacking")
    series = lacking if lacking is not None else dropped
    assert series is not None, "needs says so"
    limit = _most_lacking(view, options) if lacking is not None else options.max_share
    is_ill = series.values > limit
    spell = newest_spell(is_ill, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    first, last = int(series.steps[spell.start]), int(series.steps[spell.end])
    share = None if dropped is None else median(dropped.since(first).values)
    reason, count = _main_reason(view, first)
    said = "" if share is None else f"filters drop {share:.0%} of the sampled groups"
    if lacking is not None:
        lacks = f"{lacking.values[spell.end]:.0f} groups are lacking at step {last}"
        said = f"{said}, and {lacks}" if said else lacks
    message = f"Since step {first} {said}."
    if reason:
        message += f" Most of the dropped groups were dropped for {reason}."
    yield Sighting(
        message=message,
        evidence=(said, *((f"filter/{reason} {count:.0f}",) if reason else ())),
        causes=tuple(_causes(view, reason)),
        fixes=tuple(_fixes(reason)),
        first_step=first,
        last_step=last,
        # The numbers that were compared; where groups were lacking the share is context.
        value=share if lacking is None else float(lacking.values[spell.end]),
        limit=limit,
        level=Level.INFO if _is_learnt(view, reason, first, share) else None,
    )


def _most_lacking(view: RunView, options: Options) -> float:
    """Return the number of groups that a step may lack; 0 if its number of groups is not known.

    An update of four fifths of the groups has a noise that is an eighth larger: no starved one.
    """
    return options.max_lacking * (view.number("rollout.prompts_per_step") or 0.0)


def _is_learnt(view: RunView, reason: str, first: int, share: float | None) -> bool:
    """Return whether groups are dropped because all of their answers are right."""
    return (
        reason == "all_same_reward"
        and bool(share)
        and score_alike_because_right(view, first, share)
    )


def _dropped(view: RunView) -> Series | None:
    """Return the share of dropped groups over the steps, by whatever was logged."""
    dropped = view.series("rollout/filtered_share")
    if dropped is not None:
        return dropped
    kept = view.series("rollout/filter_pass_share")
    return None if kept is None else Series(kept.steps, 1.0 - kept.values)


def _main_reason(view: RunView, first: int) -> tuple[str, float]:
    """Return the reason for which most groups were dropped since a step, and their number."""
    counts = {
        name: float(series.since(first).values.sum())
        for name, series in view.matching("filter/").items()
    }
    name = max(counts, key=lambda name: counts[name], default="")
    return (name, counts[name]) if name and counts[name] > 0 else ("", 0.0)


def _causes(view: RunView, reason: str) -> Iterator[Cause]:
    """Those that something speaks for, the surest first."""
    if reason == "filter_failed":
        yield Cause("user-code-failed", "a filter function fails on the groups that it sees")
    if reason == "too_long":
        yield Cause("truncation-at-cap", "most groups are dropped because completions are cut off")
    if reason in _NO_SPREAD:
        yield Cause("zero-std-groups", f"most groups are dropped for {reason}")
    yield Cause("filters-starve-step", "few groups pass the filters")


def _fixes(reason: str) -> Iterator[Fix]:
    if reason == "filter_failed":
        yield Fix("", "repair the filter", "`homeostat check` tries it and shows its error")
        return
    if reason == "too_long":
        yield Fix("rollout.max_new_tokens", "higher", "fewer completions are cut", Grade.UNSAFE)
    if reason in _NO_SPREAD:
        yield Fix(
            "rollout.curriculum.difficulty.prefer.type",
            "variance",
            "prompts that are solved now and then are drawn more often",
            Grade.UNSAFE,
        )
    yield Fix(
        "rollout.filters",
        "wider bounds",
        "more groups pass",
        Grade.UNSAFE,
        theirs={
            "slime": "--dynamic-sampling-filter-path",
            "miles": "--dynamic-sampling-filter-path",
            "verl": "algorithm.filter_groups.max_num_gen_batches",
        },
    )


RULE = Rule(
    code="DAT013",
    name="filters-starve-step",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("rollout/groups_lacking|rollout/filtered_share|rollout/filter_pass_share",),
    kinds=(Kind.RL,),
    options=Options,
)
