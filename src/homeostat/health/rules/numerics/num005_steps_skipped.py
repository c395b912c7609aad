"""Updates are left out because they are not finite.

## What it sees
Our own events step_skipped and the metric train/skipped_steps: more than `max_share` of the steps
since the first one, or `in_a_row` one after the other, were skipped. Megatron counts from 0 in each
record; there the counts are added up. fp16 training that skips only within its first `search` steps
looks for its loss scale, which is information.

## Why it matters
A skipped update costs a step and harms nothing. Many of them mean that something breaks again and
again: the same rows, the same module.

## Likely causes
- bad-batch: the same rows, or a small part of the data.
- steps-skipped: the module and direction named by the event.
- fp16-overflow: the run is in fp16.
- benign-loss-scale-search: fp16 training skips its first steps until the loss scale fits.

## What to do
The event names the module in which the first value was not finite and the file with the rows:
replay it. A value from the forward pass points at data or weights, one from the backward pass at
the loss or the precision.

## Known false alarms
None known: they are counted, not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import precision
from homeostat.health.view import Event, RunView


class Options(RuleOptions):
    max_share: float = option(0.02, "Share of the steps that is a warning.")
    in_a_row: int = option(3, "Number of consecutive skipped steps that are an error.")
    search: int = option(40, "Steps in which fp16 training may look for its loss scale.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    skipped = view.events_of("step_skipped")
    count = _num_skipped(view) or float(len(skipped))
    last = view.last_step
    if not count or not last:
        return
    share = count / last
    steps = sorted(event.step for event in skipped if event.step is not None)
    longest = _longest(steps)
    is_much = share > options.max_share and count >= 2 and not _is_search(view, options)
    level = Level.WARN if is_much else Level.INFO
    # The newest step was skipped, and nothing came after it.
    level = Level.WARN if steps and steps[-1] >= last and level is Level.INFO else level
    level = Level.ERROR if longest >= options.in_a_row else level
    origins = Counter(str(event.fields["origin"]) for event in skipped if _has_origin(event))
    where = f", most often first seen in {origins.most_common(1)[0][0]}" if origins else ""
    yield Sighting(
        message=f"{count:.0f} of {last} updates were not finite and were skipped ({share:.1%})"
        f"{where}. {_advice(steps)}",
        evidence=tuple(f"{number} x {origin}" for origin, number in origins.most_common(3)),
        causes=tuple(_causes(view, options, origins, longest)),
        fixes=(
            Fix(
                "trainer.on_nonfinite",
                "halt",
                "the run stops at the first such update, so that you can look at it",
            ),
            Fix("data.bad_rows", "drop", "leaves broken rows out"),
        ),
        first_step=steps[0] if steps else _first_skipped(view),
        last_step=steps[-1] if steps else last,
        value=share,
        limit=options.max_share,
        level=level,
    )


def _num_skipped(view: RunView) -> float:
    """Return how many updates were skipped; some frameworks count from 0 in each record."""
    total, each = view.latest("train/skipped_steps"), view.series("train/skipped_since_record")
    if total is None and each is not None:
        return float(each.finite().values.sum())
    return total or 0.0


def _first_skipped(view: RunView) -> int | None:
    each = view.series("train/skipped_since_record")
    steps = each.steps[each.values > 0] if each is not None else np.zeros(0)
    return int(steps[0]) if len(steps) else None


def _advice(steps: list[int]) -> str:
    if steps:
        return "Replay the rows that the event names."
    return "Find the rows or the module whose gradient is not finite, or train in bf16."


def _is_search(view: RunView, options: Options) -> bool:
    """Return whether all were skipped at the start, where fp16 training looks for its scale."""
    each, scale = view.series("train/skipped_since_record"), view.series("train/loss_scale")
    if each is None or scale is None or not len(each.finite()):
        return False
    late = each.finite().values[each.finite().steps > options.search]
    return bool(scale.values[-1] > 1.0) and not late.any()


def _has_origin(event: Event) -> bool:
    return bool(event.fields.get("origin"))


def _longest(steps: list[int]) -> int:
    """Most skipped steps that follow each other."""
    best = run = 1 if steps else 0
    for before, step in pairwise(steps):
        run = run + 1 if step == before + 1 else 1
        best = max(best, run)
    return best


def _causes(
    view: RunView, options: Options, origins: Counter[str], longest: int
) -> Iterator[Cause]:
    if _is_search(view, options):
        yield Cause("benign-loss-scale-search", "only the first steps, as in any fp16 run")
        return
    scale = view.series("train/loss_scale")
    if precision(view) == "fp16":
        yield Cause("fp16-overflow", "the run is in fp16")
    elif scale is not None and scale.values[-1] < scale.first:
        why = f"the loss scale fell from {scale.first:.6g} to {scale.values[-1]:.6g}"
        yield Cause("fp16-overflow", why)
    elif longest <= 1:
        yield Cause("bad-batch", "single steps, with finite ones between them")
    why = f"first seen in {next(iter(origins))}" if origins else "updates are not finite"
    yield Cause("steps-skipped", why)


RULE = Rule(
    code="NUM005",
    name="steps-skipped",
    family=Family.NUMERICS,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("train/skipped_steps|train/skipped_since_record",),
    options=Options,
    explains=("NUM006",),
)
