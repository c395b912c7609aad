"""The clip range is outside the usual range of the algorithm.

## What it sees
Token-level ratios (GRPO, DAPO ...) with a range below `min_token` or above `max_token`;
sequence-level ones (GSPO), which lie thousands of times closer to 1, above `max_sequence`; the
bound of a weight (CISPO), which should only stop outliers, below `min_weight`.

## Why it matters
If it is too narrow, every token is clipped after the first update and nothing is learned. If it is
too wide, nothing is ever clipped and a single batch may move the policy anywhere.

## Likely causes
- clip-range-odd: a range that belongs to the other kind of ratio.

## What to do
0.2 (0.28 above for DAPO) for tokens; 3e-4 and 4e-4 for sequences; about 4 (a weight of 5) for
CISPO.

## Known false alarms
One update per step on fresh samples is never clipped, whatever the range.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_true, raw
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_token: float = option(0.02, "Narrowest range for tokens.")
    max_token: float = option(1.0, "Widest range for tokens.")
    max_sequence: float = option(0.05, "Widest range for whole completions.")
    min_weight: float = option(1.0, "Narrowest range for a weight that is clipped (CISPO).")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    high, kind = view.number("algorithm.clip_high"), str(view.setting("algorithm.type")).lower()
    level = str(raw(view, "importance_sampling_level", "loss_mode")).lower()
    truth = raw(view, "sequence_level_importance_ratios")
    sequence = kind == "gspo" or level in ("sequence", "gspo") or is_true(truth)
    if high is not None and kind == "cispo" and view.framework.name == "homeostat":
        yield from _narrow_weight(high, options)
    if high is None or kind == "cispo" or (not sequence and kind == "none"):
        return
    low_end, top = (
        (0.0, options.max_sequence) if sequence else (options.min_token, options.max_token)
    )
    if low_end <= high <= top:
        return
    usual = "3e-4 to 4e-4 for whole completions" if sequence else "0.2 to 0.3 for tokens"
    yield Sighting(
        message=f"The clip range is {high:g}; usual is {usual}. It belongs to the other kind of "
        "ratio.",
        causes=(Cause("clip-range-odd", f"{high:g} against {usual}"),),
        fixes=(Fix("algorithm.clip_high", "4e-4" if sequence else "0.28", usual, Grade.UNSAFE),),
        value=high,
        limit=top,
    )


def _narrow_weight(high: float, options: Options) -> Iterator[Sighting]:
    """Other frameworks count the bound from 0 or from 1, so that only ours is judged."""
    if high >= options.min_weight:
        return
    yield Sighting(
        message=f"CISPO clips a token's weight above {1 + high:g}; usual is about 5 "
        "(algorithm.clip_high=4). A range for ratios makes it a REINFORCE that ignores how likely "
        "a token became.",
        causes=(Cause("clip-range-odd", f"{high:g} against about 4"),),
        fixes=(Fix("algorithm.clip_high", "4.0", "the usual value", Grade.UNSAFE),),
        value=high,
        limit=options.min_weight,
    )


RULE = Rule(
    code="CFG008",
    name="clip-range-odd",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("setting:algorithm.clip_high",),
    kinds=(Kind.RL,),
    options=Options,
)
