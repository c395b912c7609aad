"""Some experts have far more work than others.

## What it sees
The busiest expert's load above `max_violation` times the mean over the newest records; or, where
loads are not logged, a balancing loss that has risen to `aux_growth` times its lowest level over
the run, by far more than its noise (it is lowest where all experts have the same load), or a model
with experts whose update takes `growth` times as long as at the start while lengths, generation
time and memory are the same. In RL, loads that were as uneven in the first records are the model's
own on these prompts, and are only mentioned; so are loads of updates that have less than `few_rows`
of the rows of the first ones because most answers are right, and those of a run that has not ended
and has fewer than `min_records` records.

## Why it matters
With expert parallelism everyone waits for the busiest expert's device, and what it has no room for
is dropped. Experts that are never chosen learn nothing.

## Likely causes
- expert-load-imbalance: no balancing loss, or RL that has drifted away from a balanced router.
- straggler-rank: a slow device looks the same where loads are not logged.

## What to do
Look at the loads of each layer. A small balancing loss (0.001 to 0.01 in SFT; in RL as small as
possible, since it moves the policy). If the loads were even before, look for what moved the router:
its learning rate, a new kind of data.

## Known false alarms
Longer answers make updates slower; they are taken into account. Prompts that are all alike reach
few experts. Loads are counted over the rows of an update, and RL leaves out groups whose answers
all earn the same: when a task is nearly solved, the few prompts that are left reach few experts
while the router is as it was. A fresh router is uneven in its first updates and evens out, so a run
gets no warning before it has `min_records` records.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import few_records, few_rows, first_over, newest
from homeostat.health.rules.readings import ends, is_moe, rank_correlation, raw_number
from homeostat.health.series.medians import median, running_medians
from homeostat.health.series.noise import noise_of
from homeostat.health.view import Kind, RunView, Series

# Records of a balancing loss that are needed.
_MIN_AUX = 20


class Options(RuleOptions):
    max_violation: float = option(3.0, "Largest acceptable factor over the mean load.")
    growth: float = option(1.6, "Factor by which an update takes longer.")
    aux_growth: float = option(1.5, "Factor over its lowest level to which a balancing loss rose.")
    rise: float = option(1.3, "Factor over its first records from which on a load has risen.")
    few_rows: float = option(0.5, "Share of the first updates' rows that is too few to compare.")
    min_records: int = option(
        12, "Number of records before which a run that has not ended gets no warning."
    )


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    load = view.series("moe/max_violation")
    if load is not None:
        yield from _uneven(view, load.finite(), options)
        return
    aux = view.series("moe/aux_loss")
    if aux is not None and len(aux.finite()) >= _MIN_AUX:
        yield from _grown(view, aux.finite(), options)
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
    yield _sighting(view, why, first, ratio, Level.WARN)


def _uneven(view: RunView, load: Series, options: Options) -> Iterator[Sighting]:
    late = newest(view, "moe/max_violation")
    if late is None:
        return
    size = 1 + median(late.values)
    if size <= options.max_violation:
        return
    before = 1 + median(load.head(3).values)
    has_risen = size > options.rise * before
    why = f"the busiest expert has {size:.2g} times the mean load"
    why += f", {before:.2g} times at the start" if has_risen else ""
    few = few_rows(view, int(late.steps[0]), share=options.few_rows)
    early = few_records(view, load, least=options.min_records)
    is_changed = has_risen and not few
    why += few + early
    is_ill = (is_changed or view.kind is not Kind.RL) and not early
    level = Level.WARN if is_ill else Level.INFO
    yield _sighting(view, why, first_over(load, options.max_violation - 1), size, level)


def _grown(view: RunView, aux: Series, options: Options) -> Iterator[Sighting]:
    """Report a balancing loss that rises. Its scale differs between trainers; its growth does not.

    A fresh router begins above its later level, so the lowest level is compared, not the first one.
    """
    levels = running_medians(aux.values, 5)
    at = int(np.argmin(levels))
    low, late = float(levels[at]), aux.tail(5)
    rise = median(late.values) - low
    is_clear = rise > 5.0 * noise_of(aux.values).deviation
    if not 0.0 < (options.aux_growth - 1.0) * low < rise or not is_clear:
        return
    limit = low + 0.5 * rise
    if late.values.min() < limit:
        return
    factor = median(late.values) / low
    why = f"the balancing loss is {median(late.values):.3g}, {factor:.2g} times its level of "
    why += f"{low:.3g} at step {int(aux.steps[at + 2])}"
    few = few_rows(view, int(late.steps[0]), share=options.few_rows)
    level = Level.INFO if few else Level.WARN
    yield _sighting(view, why + few, first_over(aux, limit), factor, level)


def _explained(view: RunView, ratio: float) -> bool:
    """Return whether more tokens, or a slower machine, explain longer updates."""
    for name in ("completions/mean_length", "sequences/tokens_per_rank/mean", "time/generate"):
        series = view.series(name)
        if series is not None and len(series) >= 4:
            before, after = ends(series)
            if after / max(before, 1e-9) > 1 + 0.4 * (ratio - 1):
                return True
    return False


def _sighting(view: RunView, why: str, first: int, value: float, level: Level) -> Sighting:
    coefficient = raw_number(view, "moe_aux_loss_coeff", "aux_loss_coef", "router_aux_loss_coef")
    if coefficient is None:
        coefficient = view.number("model.moe.aux_loss_coefficient")
    off = ", and no balancing loss is on" if coefficient == 0 else ""
    return Sighting(
        message=f"Experts are loaded unevenly: {why}{off}. Look at the loads of each layer; a "
        "small balancing loss evens them out.",
        evidence=(why,),
        causes=(Cause("expert-load-imbalance", why),),
        fixes=(
            Fix(
                "model.moe.aux_loss_coefficient",
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
            Fix(
                "model.moe.balancing",
                "aux",
                "the loss counts only where it is chosen",
                Grade.UNSAFE,
            ),
        ),
        first_step=first,
        last_step=view.last_step,
        value=value,
        level=level,
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
