"""No loss was ever finite, although neither precision nor learning rate explains it.

## What it sees
Loss or gradient norm is not finite in every record from the first one on, in bf16 or fp32, with a
learning rate inside or below the usual band and batch sizes that fit.

## Why it matters
The first forward pass already gives NaN, before anything was trained: the weights in the file, or
the code that multiplies them, are broken. No training setting changes that.

## Likely causes
- attention-kernel-nan: the attention kernel of this build (flash, memory-efficient, or of a torch
  for another CUDA) returns NaN, often for rows that are masked entirely.

## What to do
Run the same step with another attention implementation (eager is always right). If it is finite,
use that or another build of torch or flash-attn. If not, load the checkpoint and look for NaN in
its tensors.

## Known false alarms
A checkpoint that contains NaN looks the same; the test above distinguishes the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.config.batch import micro_exceeds_mini
from homeostat.health.rules.readings import (
    broken,
    labels_masked,
    peak_rate,
    precision,
    usual_rates,
)
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_records: int = option(3, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    bad = broken(view)
    assert bad is not None, "needs says so"
    rate, usual = peak_rate(view), usual_rates(view)
    if len(bad) < options.min_records or not bad.values.all() or labels_masked(view):
        return
    if precision(view) not in ("bf16", "fp32") or micro_exceeds_mini(view) is not None:
        return
    if rate is None or usual is None or rate > 3 * usual.high:
        return
    loss = view.series("train/loss", "train/policy_loss")
    if loss is not None and len(loss.finite()) and loss.finite().values.all():
        # A loss that is finite and not 0 came out of a forward pass that works.
        return
    first = int(bad.steps[0])
    yield Sighting(
        message=f"Nothing is finite from the first record on (step {first}), in {precision(view)} "
        f"and at an ordinary rate of {rate:.2g}: the forward pass itself gives NaN. Try another "
        "attention implementation or another build of torch.",
        evidence=(f"{len(bad)} of {len(bad)} records are not finite", f"rate {rate:.2g}"),
        causes=(Cause("attention-kernel-nan", "NaN before anything was trained, outside fp16"),),
        fixes=(
            Fix("model.attention", "eager", "plain torch, without a fused kernel", Grade.SAFE),
            Fix("", "another build of torch or flash-attn", "one made for this CUDA and GPU"),
        ),
        first_step=first,
        last_step=int(bad.steps[-1]),
    )


RULE = Rule(
    code="NUM004",
    name="attention-kernel-nan",
    family=Family.NUMERICS,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm",),
    options=Options,
    explains=("NUM002", "DAT001"),
)
