"""The gradient norm grows by orders of magnitude, or is large all the time.

## What it sees
The median norm of the newest records is at least `growth` times that of the first ones and above
the limit: a warning. A norm that is above the limit at nearly every step without growing is
information: its scale depends on how the loss is summed.

## Why it matters
A growing gradient is the last sign before a run diverges; clipping makes each of its steps as large
as the bound allows.

## Likely causes
- lr-too-high: the rate is above what is usual.
- grad-norm-explosion: nothing else explains it.
- engine-logprob-mismatch: in RL, log-probs of engine and trainer differ, so that ratios explode.

## What to do
Lower the rate, keep clipping on. Check that the data is rendered with the model's own chat
template. In RL look at the log-prob difference and the KL first.

## Known false alarms
If the loss is summed over tokens, norms in the hundreds are normal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, peak_rate, usual_rates
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    growth: float = option(10.0, "Factor over the first norms that the newest have.")
    max_norm: float = option(100.0, "Norm that is large (SFT).")
    max_norm_rl: float = option(10.0, "The same in RL.")
    min_records: int = option(8, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    norm = needed(view, "grad_norm")
    norm = norm.finite()
    if len(norm) < options.min_records:
        return
    limit = options.max_norm_rl if view.kind is Kind.RL else options.max_norm
    first, last = ends(norm)
    if last <= limit:
        return
    explodes = last > options.growth * first and float(np.min(norm.values[-3:])) > limit
    if not explodes and float(np.mean(norm.values > limit)) < 0.8:
        return
    yield _sighting(view, norm, limit=limit, explodes=explodes, sizes=(first, last))


def _sighting(
    view: RunView, norm: Series, *, limit: float, explodes: bool, sizes: tuple[float, float]
) -> Sighting:
    first, last = sizes
    start = int(norm.steps[np.flatnonzero(norm.values > limit)[0]])
    story = (
        f"The gradient norm grew from {first:.3g} to {last:.3g} (limit {limit:g}, passed at step "
        f"{start}): the run is about to diverge. Lower the learning rate."
        if explodes
        else f"The gradient norm is {last:.3g} at nearly every step (usual: below {limit:g}). If "
        "the loss is a mean over tokens, that is too large."
    )
    return Sighting(
        message=story,
        evidence=(f"grad_norm {first:.3g} -> {last:.3g} over {len(norm)} records",),
        causes=tuple(_causes(view, explodes=explodes)),
        fixes=(
            Fix("trainer.lr", "a third of it", "smaller steps", Grade.UNSAFE),
            Fix("trainer.max_grad_norm", "1.0", "bounds a single step", Grade.UNSAFE),
        ),
        first_step=start,
        last_step=int(norm.steps[-1]),
        value=last,
        limit=limit,
        level=Level.WARN if explodes else Level.INFO,
    )


def _causes(view: RunView, *, explodes: bool) -> Iterator[Cause]:
    rate, usual = peak_rate(view), usual_rates(view)
    if rate is not None and usual is not None and rate > usual.high:
        yield Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")
    gap = view.latest("sampling/sampling_logp_difference/mean")
    if gap is not None and gap > 0.1:
        yield Cause("engine-logprob-mismatch", f"engine and trainer differ by {gap:.2g} nats")
    yield Cause(
        "grad-norm-explosion" if explodes else "grad-norm-high", "the norm itself, nothing else"
    )


RULE = Rule(
    code="LRN010",
    name="grad-norm-explosion",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("grad_norm",),
    options=Options,
    explains=("LRN009",),
)
