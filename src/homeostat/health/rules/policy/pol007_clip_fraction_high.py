"""The clip range holds back a large share of the tokens.

## What it sees
The share of clipped tokens is above `limit` in `fire` of the newest `window` records, in a run with
token-level ratios. Sequence-level ratios (GSPO) are left to POL008. While the reward rises it is
only information, unless the share is above `lost` and an update's KL above `far`.

## Why it matters
Clipped tokens give no gradient. If a third of them is clipped, the policy moves so far within one
rollout that most of the later updates are lost, or worse: only unclipped directions are followed.

## Likely causes
- too-many-updates-per-rollout: at the late updates, the policy is far from the one that sampled.
- lr-too-high: one update moves the policy too far.
- engine-logprob-mismatch: the old log-probs are those of the engine, which differ from the
  trainer's from the start.
- clip-fraction-high: the range is narrow for this policy.

## What to do
Fewer updates per rollout or a lower learning rate. Widen the range only if learning stalls.

## Known false alarms
If the algorithm is not known, these may be sequence-level ratios; the finding is then only
information.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import is_sequence_level, newest, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    limit: float = option(0.3, "Largest acceptable share of clipped tokens.")
    fire: int = option(4, "Number of records that must show it ...")
    window: int = option(6, "... within a window of this many.")
    lost: float = option(0.7, "Clipped share that warns even while the reward rises.")
    far: float = option(0.3, "KL of an update, in nats, that `lost` needs beside it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    clipped = view.series("clip_ratio/region_mean")
    assert clipped is not None, "needs says so"
    spell = newest_spell(
        clipped.values > options.limit, fire=options.fire, window=options.window, clear=3
    )
    if spell is None or not spell.is_open or is_sequence_level(view):
        return
    first = int(clipped.steps[spell.start])
    value = float(np.mean(clipped.values[spell.start : spell.end + 1]))
    reward = trend(view.series("reward"))
    gains = reward is not None and reward.rises and not _is_lost(view, clipped, options)
    yield Sighting(
        message=f"{value:.0%} of the tokens are clipped since step {first} (limit "
        f"{options.limit:.0%}). Take fewer updates per rollout or a lower learning rate.",
        evidence=(f"clip_ratio/region_mean {value:.3g}",),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.updates_per_step", "a half", "less drift per rollout", Grade.UNSAFE),
            Fix("trainer.lr", "a half", "smaller steps", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(clipped.steps[spell.end]),
        value=value,
        limit=options.limit,
        level=None if _per_token(view) and not gains else Level.INFO,
    )


def _is_lost(view: RunView, clipped: Series, options: Options) -> bool:
    """Return whether updates meet quite another policy than the one that sampled."""
    moved = view.series("policy/update_kl")
    if moved is None or len(moved.finite()) < options.window:
        return False
    is_far = median(moved.finite().tail(options.window).values) >= options.far
    return is_far and median(clipped.tail(options.window).values) >= options.lost


def _per_token(view: RunView) -> bool:
    """Something says that the ratios are of tokens."""
    clip = view.number("algorithm.clip_high", "algorithm.clip_low")
    ratio, kl = newest(view, "policy/ratio_mean"), newest(view, "policy/update_kl")
    moved = ratio is not None and abs(ratio - 1.0) > 0.1
    return (clip is not None and clip >= 0.05) or moved or (kl is not None and abs(kl) > 0.02)


def _causes(view: RunView) -> Iterator[Cause]:
    updates = view.number("trainer.updates_per_step")
    gap = newest(view, "sampling/sampling_logp_difference/mean")
    if gap is not None and gap > 0.1:
        yield Cause("engine-logprob-mismatch", f"trainer and engine differ by {gap:.3g} nats")
    if updates is not None and updates > 1:
        yield Cause("too-many-updates-per-rollout", f"{updates:.0f} updates on the same samples")
    yield Cause("lr-too-high", "one update moves many ratios out of the range")
    yield Cause("clip-fraction-high", "the range may be narrow for this policy")


RULE = Rule(
    code="POL007",
    name="clip-fraction-high",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("clip_ratio/region_mean",),
    kinds=(Kind.RL,),
    options=Options,
)
