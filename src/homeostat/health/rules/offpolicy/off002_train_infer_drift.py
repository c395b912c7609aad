"""The distance between trainer and engine grows step by step.

## What it sees
The distance of log-probs on sampled tokens rises almost without a step back over `fire` records, to
`growth` times where it began and past what rounding explains, while samples are of the current
weights and entropy did not grow as much.

## Why it matters
Both compute the same weights, so the distance should stay where it was. If it grows, something is
not carried over at each publication, or the policy moves to where the two models differ. It ends in
a collapse; now it is cheap to stop.

## Likely causes
- train-infer-logprob-drift: a part of the weights is not sent, or sent in lower precision.
- lora-not-synced: the adapter grows while the engine has an old one.
- moe-routing-mismatch: routing differs more and more.
- entropy-explosion: less certain tokens differ more.

## What to do
Compare checksums of the weights after a publication, or score one fixed row in both at each step.
Switch importance weights on meanwhile.

## Known false alarms
A distance that grows along with entropy: information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import gap_of, staleness
from homeostat.health.rules.readings import is_moe, rank_correlation
from homeostat.health.rules.signs import has_lora, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    growth: float = option(2.0, "Factor over the first records that is more than chance.")
    fire: int = option(8, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    gap = gap_of(view)
    if gap is None:
        yield Unknown("no distance of log-probs is a number")
        return
    series = gap.series.finite()
    if len(series) < options.fire or staleness(view) > 0.0:
        return
    grown, entropy = trend(series), trend(view.series("entropy"))
    if grown is None or not grown.rises:
        return
    # The first records are the level to compare with: means over a quarter would blur it.
    start = median(series.values[:3])
    end = median(series.values[-3:])
    if end < options.growth * start or end < gap.usual:
        return
    along = (
        entropy is not None and entropy.rises and entropy.end / entropy.start > 0.7 * end / start
    )
    spell = newest_spell(series.values > 1.3 * start, fire=3, window=4, clear=3)
    first = int(series.steps[spell.start if spell is not None else 0])
    # A drift that begins amid the run is steady from there on, whatever the order before it.
    since = series.since(first)
    if max(rank_correlation(part) for part in (series, since) if len(part) >= options.fire) < 0.85:
        return
    yield Sighting(
        message=f"Trainer and engine drift apart: {gap.name} went from {start:.3g} to {end:.3g} "
        f"since step {first}. Compare the weights of both after a publication.",
        evidence=(f"{gap.name} {start:.3g} -> {end:.3g} over {len(series)} records",),
        causes=tuple(_causes(view, along=along)),
        fixes=(
            Fix("sync.verify", "true", "checks the engine's weights each time", Grade.SAFE),
            Fix(
                "algorithm.correction.weight.type",
                "token",
                "importance weights account for the difference until then",
                Grade.UNSAFE,
                theirs={"slime": "--use-tis", "miles": "--use-tis"},
            ),
        ),
        first_step=first,
        last_step=int(series.steps[-1]),
        value=end,
        limit=options.growth * start,
        level=Level.INFO if along else None,
    )


def _causes(view: RunView, *, along: bool) -> Iterator[Cause]:
    if along:
        yield Cause("entropy-explosion", "entropy grows as well: less certain tokens differ more")
    yield Cause("train-infer-logprob-drift", "the distance grows with each publication")
    if has_lora(view):
        yield Cause("lora-not-synced", "the adapter may not reach the engine")
    if is_moe(view):
        yield Cause("moe-routing-mismatch", "a mixture of experts may route tokens otherwise")


RULE = Rule(
    code="OFF002",
    name="train-infer-logprob-drift",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=(
        "sampling/sampling_logp_difference/mean|sampling/mult_prob_error"
        "|sampling/prob_difference/mean|sampling/k3|sampling/k1",
    ),
    kinds=(Kind.RL,),
    options=Options,
)
