"""Some experts have far more work than others.

## What it sees
The busiest expert's load above `max_violation` times the mean over the newest records; or, where
loads are not logged, a model with experts whose update takes `growth` times as long as at the start
while lengths, generation time and memory are the same.

## Why it matters
With expert parallelism everyone waits for the busiest expert's device, and what it has no room for
is dropped. Experts that are never chosen learn nothing.

## Likely causes
- expert-load-imbalance: no balancing loss, or RL that has drifted away from a balanced router.
- straggler-rank: a slow device looks the same where loads are not logged.

## What to do
Log the loads. A small balancing loss (0.001 to 0.01 in SFT; in RL as small as possible, since it
moves the policy), or a capacity factor.

## Known false alarms
Longer answers make updates slower; they are taken into account.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, is_moe, rank_correlation, raw_number
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_violation: float = option(3.0, "Largest acceptable factor over the mean load.")
    growth: float = option(1.6, "Factor by which an update takes longer.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    load = view.series("moe/max_violation")
    if load is not None:
        late = load.tail(5)
        size = 1 + float(np.median(late.values))
        if len(load) >= 3 and size > options.max_violation:
            first = int(load.steps[np.flatnonzero(1 + load.values > options.max_violation)[0]])
            yield _sighting(
                view, f"the busiest expert has {size:.2g} times the mean load", first, size
            )
        return
    took = view.series("time/train")
    if not is_moe(view) or took is None or len(took) < 8:
        yield Unknown("no loads of experts were logged")
        return
    first_s, last_s = ends(took)
    ratio = last_s / max(first_s, 1e-9)
    if ratio < options.growth or rank_correlation(took) < 0.7 or _explained(view, ratio):
        return
    late = took.values > 0.5 * (first_s + first_s * options.growth)
    first = int(took.steps[int(np.argmax(late))])
    why = f"an update takes {last_s:.3g} s, {first_s:.3g} s at the start, with the same lengths"
    yield _sighting(view, why, first, ratio)


def _explained(view: RunView, ratio: float) -> bool:
    """Return whether more tokens, or a slower machine, explain longer updates."""
    for name in ("completions/mean_length", "sequences/tokens_per_rank/mean", "time/generate"):
        series = view.series(name)
        if series is not None and len(series) >= 4:
            before, after = ends(series)
            if after / max(before, 1e-9) > 1 + 0.4 * (ratio - 1):
                return True
    return False


def _sighting(view: RunView, why: str, first: int, value: float) -> Sighting:
    coefficient = raw_number(view, "moe_aux_loss_coeff", "aux_loss_coef", "router_aux_loss_coef")
    off = ", and no balancing loss is on" if coefficient == 0 else ""
    return Sighting(
        message=f"Experts are loaded unevenly: {why}{off}. Log the loads; a small balancing loss "
        "evens them out.",
        evidence=(why,),
        causes=(Cause("expert-load-imbalance", why),),
        fixes=(
            Fix(
                "",
                "0.001",
                "evens the loads out; in RL as small as possible",
                Grade.UNSAFE,
                theirs={
                    "miles": "--moe-aux-loss-coeff",
                    "verl": "actor_rollout_ref.actor.megatron.override_transformer_config."
                    "moe_aux_loss_coeff",
                    "slime": "--moe-aux-loss-coeff",
                },
            ),
        ),
        first_step=first,
        last_step=view.last_step,
        value=value,
    )


RULE = Rule(
    code="MOE002",
    name="expert-load-imbalance",
    family=Family.MOE,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    options=Options,
    explains=("PRF005", "PRF006"),
)
