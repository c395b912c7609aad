"""Preference training makes chosen answers less likely, only more slowly than rejected ones.

## What it sees
The margin grows while the mean log-prob of the chosen answers falls: over the newest records it is
`min_fall` times as far from 0 as at the start, and lower by at least `min_nats`.

## Why it matters
The loss rewards only the difference. Probability that both answers lose goes to answers that nobody
labelled, which can be worse than either of them (likelihood displacement, arXiv:2410.08847).
Accuracy and margin look perfect all the while.

## Likely causes
- likelihood-displacement: nothing in the loss keeps the chosen answers likely, and the two answers
  of a pair are so similar that making one less likely affects the other, too.
- lr-too-high: the rate is above what preference training uses.

## What to do
Add the cross-entropy of the chosen answers to the loss, lower the rate or raise beta, and leave out
pairs whose answers are nearly the same. Judge by samples of the policy, not by the margin.

## Known false alarms
Chosen answers that the starting policy would never write become a little less likely in many
healthy runs; the limits are far beyond that. A run whose batches differ much in length makes the
mean log-prob jump: the rule compares means over several records.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, peak_rate, usual_rates
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell, rolling_mean
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_fall: float = option(1.5, "Times the log-prob's distance from 0 at the start.")
    min_nats: float = option(2.0, "Fall of the mean log-prob that counts at least.")
    average: int = option(3, "Number of records that are averaged.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(5, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    margin, chosen = needed(view, "preference/margin"), needed(view, "preference/chosen_logp")
    margin, chosen = margin.finite().on(chosen.finite())
    if len(chosen) < 2 * options.average:
        return
    logp, gap = rolling_mean(chosen, options.average), rolling_mean(margin, options.average)
    began, first_gap = float(logp[options.average - 1]), float(gap[options.average - 1])
    limit = min(options.min_fall * began, began - options.min_nats)
    held = (logp < limit) & (gap > first_gap)
    held[: options.average] = False
    spell = newest_spell(held, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    first, now = (
        int(chosen.steps[spell.start]),
        median(logp[spell.start :][held[spell.start :]]),
    )
    rate, usual = peak_rate(view), usual_rates(view)
    causes = [Cause("likelihood-displacement", "both answers fall, and the margin grows")]
    if rate is not None and usual is not None and rate > usual.high:
        causes.append(
            Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")
        )
    evidence = [f"preference/chosen_logp {began:.4g} -> {now:.4g}"]
    evidence.append(f"preference/margin {first_gap:.3g} -> {float(gap[-1]):.3g}")
    yield Sighting(
        message=f"Since step {first} the chosen answers have a log-prob of {now:.4g} ({began:.4g} "
        "at the start) while the margin grows: both answers of a pair are pushed down, and their "
        "probability goes to answers that nobody labelled.",
        evidence=tuple(evidence),
        causes=tuple(causes),
        fixes=(
            Fix(
                "algorithm.sft_weight",
                "0.2",
                "the cross-entropy of the chosen answers holds them up",
                Grade.UNSAFE,
            ),
            Fix("trainer.lr", "1e-6", "smaller steps displace less", Grade.UNSAFE),
            Fix("preference.beta", "0.3", "holds the policy at its reference", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(chosen.steps[-1]),
        value=now,
        limit=limit,
    )


RULE = Rule(
    code="LRN025",
    name="likelihood-displacement",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("preference/margin", "preference/chosen_logp"),
    kinds=(Kind.PREFERENCE,),
    options=Options,
)
