"""Tokens per second fall during the run.

## What it sees
Throughput of the newest records below `share` of the first ones, falling steadily over at least
`min_records` records, the first of all left out. Or, a warning: the engine's rate fell to less than
`jump_share` from one record to the next, for `fire` records, while answers are as long as before
and updates do not slow down with it.

## Why it matters
The run takes longer than planned; something grows, heats up or leaks.

## Likely causes
- throughput-falls: heat, another job on the machine, memory that is full, longer rows.
- expert-load-imbalance: in models with experts, see MOE002.

## What to do
Compare the times of the parts of a step: the part that grows says where to look.

## Known false alarms
Answers that get longer lower the rate of generation by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, rank_correlation
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView, Series


class Options(RuleOptions):
    share: float = option(0.7, "Share of the first rate that is too low.")
    min_records: int = option(12, "Number of records that are needed.")
    jump_share: float = option(0.25, "Share of the engine's earlier rate that is a breakdown.")
    fire: int = option(6, "Number of records that must show a breakdown.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    jumped = _breakdown(view, options)
    if jumped is not None:
        yield jumped
        return
    rate = needed(view, "throughput/tokens_per_s", "throughput/tokens_per_s_per_device")
    late = rate.finite().since(int(rate.steps[0]) + 1)
    if len(late) < options.min_records:
        return
    first, last = ends(late)
    if last > options.share * first or rank_correlation(late) > -0.7:
        return
    yield Sighting(
        message=f"Throughput fell from {first:.4g} to {last:.4g} tokens/s. Compare the times of a "
        "step's parts: the one that grows says why.",
        causes=(Cause("throughput-falls", f"{last / first:.0%} of what it was"),),
        fixes=(Fix("observe.profiler.steps", "two late steps", "shows what grew"),),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=last,
        limit=options.share * first,
    )


def _breakdown(view: RunView, options: Options) -> Sighting | None:
    """The engine samples at a fraction of its rate, all at once."""
    found, lengths = view.series("engine/tokens_per_s"), view.series("completions/mean_length")
    rate = found.finite() if found is not None else None
    if rate is None or lengths is None or len(rate) < options.min_records:
        return None
    usual = median(rate.values[1 : options.fire + 1])
    spell = newest_spell(rate.values < options.jump_share * usual, fire=options.fire, clear=2)
    if spell is None or not spell.is_open or spell.start < options.fire:
        return None
    first, now = int(rate.steps[spell.start]), median(rate.values[spell.start :])
    before, after = lengths.before(first).finite().values, lengths.since(first).finite().values
    if not len(before) or not len(after):
        return None
    length = median(before)
    if not 0.7 * length < median(after) < 1.4 * length:
        return None
    # If updates slow down as well, the whole machine is slow.
    if _slowdown(view.series("time/train"), first) > 0.5 * usual / now:
        return None
    return Sighting(
        message=f"The engine samples {now:.4g} tokens/s since step {first}, {usual:.4g} before, "
        f"with answers as long as they were (limit {options.jump_share:.0%}). Is something else "
        "running on its device?",
        evidence=(f"engine/tokens_per_s {usual:.4g} -> {now:.4g}",),
        causes=(
            Cause("throughput-falls", f"{now / usual:.0%} of the rate it had"),
            Cause("rollout-underutilised", "sampling takes a multiple of its time"),
        ),
        fixes=(Fix("observe.profiler.steps", "two late steps", "shows what takes the time"),),
        first_step=first,
        last_step=int(rate.steps[-1]),
        value=now,
        limit=options.jump_share * usual,
        level=Level.WARN,
    )


def _slowdown(series: Series | None, step: int) -> float:
    """Return how many times larger it is from a step on; 1 if nothing is known."""
    before = series.before(step).finite().values if series is not None else ()
    after = series.since(step).finite().values if series is not None else ()
    if not len(before) or not len(after):
        return 1.0
    return median(after) / max(median(before), 1e-9)


RULE = Rule(
    code="PRF005",
    name="throughput-falls",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("throughput/tokens_per_s|throughput/tokens_per_s_per_device",),
    options=Options,
)
