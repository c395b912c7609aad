"""The importance weight of whole sequences collapses although the tokens agree.

## What it sees
Single tokens differ by less than `max_gap` in log-prob (`max_prob_gap` in probability), yet the
mean ratio is below `limit` in most records; or the effective sample size of sequences is below
`min_ess` while that of tokens is above 0.5; or the effective sample size of whatever weights are
used is below `lost_ess` in the newest records, and tokens are not known to differ.

## Why it matters
A sequence's ratio is the product of its tokens': small differences add up with length. Most weights
end near 0, a few at the bound; most of the batch is thrown away.

## Likely causes
- sequence-level-is-collapse: weights of whole sequences on long completions.

## What to do
Weight by token, or by the geometric mean (length-normalised) of the ratios.

## Known false alarms
None known: token ratios of such log-probs average to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import newest
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    max_gap: float = option(0.05, "Distance of tokens' log-probs that is small.")
    max_prob_gap: float = option(0.01, "The same of tokens' probabilities.")
    limit: float = option(0.85, "Mean ratio that such tokens cannot have.")
    min_ess: float = option(0.2, "Effective sample size of sequences that is too small.")
    lost_ess: float = option(
        0.05, "Effective sample size that is too small whatever else is known."
    )
    fire: int = option(3, "Number of records that must show it, and it must be most of them.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    gap = _gap(view)
    ratio = view.series("sampling/importance_sampling_ratio/mean")
    if gap is not None and gap.value > gap.limit(options):
        return
    if gap is not None and ratio is not None and _mostly(ratio, options.limit, options.fire):
        value = median(ratio.finite().values)
        said = f"the mean importance ratio is {value:.3g}"
        yield _sighting(view, said, ratio, value, options.limit, gap)
        return
    whole = _whole(view)
    if gap is not None and whole is not None and _mostly(whole, options.min_ess, options.fire):
        value = median(whole.finite().values)
        said = f"{value:.0%} of the sample is left by sequence weights"
        yield _sighting(view, said, whole, value, options.min_ess, gap)
        return
    left = view.series("sampling/ess")
    if left is not None and _lasts(left, options.lost_ess, options.fire):
        value = median(left.finite().values[-options.fire :])
        said = f"{value:.1%} of the sample is left after weighting"
        yield _sighting(view, said, left, value, options.lost_ess, gap)


def _whole(view: RunView) -> Series | None:
    """The effective sample size of sequences, where they are weighted and tokens' is ample."""
    tokens = newest(view, "sampling/ess", count=50)
    weighted = "sequence" in str(view.setting("algorithm.correction.weight.type", default=""))
    is_ample = tokens is not None and tokens >= 0.5
    return view.series("sampling/ess_sequence") if weighted and is_ample else None


@dataclass(frozen=True, slots=True)
class _Gap:
    """The distance of single tokens from the engine's: in log-probs, or in probabilities."""

    value: float
    unit: str

    def limit(self, options: Options) -> float:
        return options.max_gap if self.unit == "nats" else options.max_prob_gap

    def __str__(self) -> str:
        return f"{self.value:.2g} {self.unit}"


def _gap(view: RunView) -> _Gap | None:
    nats = newest(view, "sampling/sampling_logp_difference/mean", count=50)
    if nats is not None:
        return _Gap(nats, "nats")
    share = newest(view, "sampling/prob_difference/mean", count=50)
    return _Gap(share, "of probability") if share is not None else None


def _lasts(series: Series, limit: float, fire: int) -> bool:
    values = series.finite().values
    return len(values) >= fire and bool((values[-fire:] < limit).all())


def _mostly(series: Series, limit: float, fire: int) -> bool:
    low = series.finite().values < limit
    return bool(low.sum() >= fire and low.mean() > 0.7)


def _sighting(
    view: RunView, said: str, series: Series, value: float, limit: float, gap: _Gap | None
) -> Sighting:
    length = newest(view, "completions/mean_length", count=50)
    why = f"tokens differ by {gap} only" if gap else "weights of sequences multiply token ratios"
    agree = f"Tokens agree to {gap}, yet {said}" if gap else f"Only {said}"
    if length is not None:
        why += f", but a completion has {length:.0f} of them"
    return Sighting(
        message=f"{agree} (limit {limit:g}): weights of whole "
        "sequences collapse with length. Weight by token.",
        evidence=(said, why),
        causes=(Cause("sequence-level-is-collapse", why),),
        fixes=(
            Fix(
                "algorithm.correction.weight.type",
                "token",
                "does not add up over length",
                Grade.UNSAFE,
                theirs={"trl": "vllm_importance_sampling_mode=token_truncate"},
            ),
            Fix(
                "algorithm.correction.weight.type",
                "geometric",
                "normalised by length",
                Grade.UNSAFE,
            ),
        ),
        first_step=int(series.steps[int((series.values < limit).argmax())]),
        last_step=int(series.steps[-1]),
        value=value,
        limit=limit,
    )


RULE = Rule(
    code="OFF004",
    name="sequence-level-is-collapse",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("sampling/importance_sampling_ratio/mean|sampling/ess_sequence|sampling/ess",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("OFF005",),
)
