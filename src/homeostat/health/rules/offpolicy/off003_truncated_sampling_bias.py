"""Log-probs of truncated sampling bias every importance ratio downwards.

## What it sees
The mean ratio of trainer to engine is below `limit` in `fire` records, and either sampling is
truncated (top-k, top-p or min-p is set) or not even the largest ratio reaches 1.

## Why it matters
After top-k or top-p the engine renormalises over the tokens it kept, so that each of them looks
likelier than under the whole policy. The ratio is then the kept mass, not a correction: it scales
the whole gradient down.

## Likely causes
- truncated-sampling-logprob-bias: the engine reports log-probs after truncation.

## What to do
Sample from the whole distribution in RL (top_p 1, top_k off, no min_p), or let the engine report
log-probs before truncation.

## Known false alarms
None known: ratios of the same policy average to 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import raw_number
from homeostat.health.rules.signs import newest
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.9, "Mean ratio that is too far below 1.")
    fire: int = option(3, "Number of records that must show it, and it must be most of them.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    ratio = view.series("sampling/importance_sampling_ratio/mean")
    assert ratio is not None, "needs says so"
    low = ratio.finite().values < options.limit
    gap = newest(view, "sampling/sampling_logp_difference/mean", count=50)
    if low.sum() < options.fire or low.mean() < 0.8 or (gap is not None and gap < 0.05):
        return
    settings = _truncation(view)
    highest = view.series("sampling/importance_sampling_ratio/max")
    below = highest is not None and bool((highest.finite().values < 1.0).mean() > 0.8)
    if not settings and not below:
        return
    value = median(ratio.finite().values)
    why = ", ".join(settings) or "no ratio reaches 1: the engine's log-probs are of kept tokens"
    yield Sighting(
        message=f"The ratio of trainer to engine averages {value:.3g} (limit {options.limit:g}): "
        f"log-probs after truncation scale the gradient down. Sample without top-k and top-p.",
        evidence=(f"mean ratio {value:.3g} in {int(low.sum())} records", why),
        causes=(Cause("truncated-sampling-logprob-bias", why),),
        fixes=(
            Fix(
                "",
                "top_p=1.0, no top_k, no min_p",
                "samples and log-probs then come from the same distribution",
                Grade.UNSAFE,
                theirs={
                    "trl": "top_k=0, top_p=1.0",
                    "verl": "actor_rollout_ref.rollout.top_k=-1, "
                    "actor_rollout_ref.rollout.top_p=1.0",
                },
            ),
        ),
        first_step=int(ratio.steps[int(low.argmax())]),
        last_step=int(ratio.steps[-1]),
        value=value,
        limit=options.limit,
    )


def _truncation(view: RunView) -> list[str]:
    if view.series("sampling/kept_share") is not None:
        # The tokens that were kept are replayed: both log-probs are of the same distribution.
        return []
    top_k, top_p, min_p = (raw_number(view, name) for name in ("top_k", "top_p", "min_p"))
    found = [f"top_k {top_k:g}"] if top_k is not None and top_k > 0 else []
    found += [f"top_p {top_p:g}"] if top_p is not None and 0 < top_p < 1 else []
    return found + ([f"min_p {min_p:g}"] if min_p is not None and min_p > 0 else [])


RULE = Rule(
    code="OFF003",
    name="truncated-sampling-logprob-bias",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("sampling/importance_sampling_ratio/mean",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("OFF001", "OFF005"),
)
