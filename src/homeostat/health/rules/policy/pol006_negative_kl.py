"""The mean KL estimate is clearly below zero.

## What it sees
KL per token below `min_kl`, or KL summed over a completion below `min_sequence`, in `fire` of the
newest `window` records.

## Why it matters
A KL divergence is never negative. Its plain estimate (the mean log-ratio of samples) becomes
negative if the samples do not come from the policy whose log-probs are used: other sampling
settings, other weights, or padding that is counted. The penalty then turns into a reward for
leaving the reference.

## Likely causes
- kl-negative-generation-kwargs: top-k, top-p, a minimum length or wrong pad and end tokens change
  what is sampled.
- empty-completions: only padding or the end token is left to compare.
- kl-negative-weak-reward-model: tiny batches and a poor reward model push the policy to text that
  the reference finds more likely.

## What to do
Sample with temperature 1, no top-k, no top-p, no minimum length, and the right end token. Use the
estimator k3, which cannot be negative.

## Known false alarms
In a new policy the plain estimate may be slightly negative by chance, but stays far inside the
limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import raw_number
from homeostat.health.rules.signs import newest
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_kl: float = option(-0.05, "KL per token that chance does not explain.")
    min_sequence: float = option(-1.0, "KL of a completion that chance does not explain.")
    fire: int = option(2, "Number of records that must show it ...")
    window: int = option(4, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    whole = view.series("kl") is None
    kl, limit = view.series("kl", "kl/sequence"), options.min_sequence if whole else options.min_kl
    assert kl is not None, "needs says so"
    spell = newest_spell(kl.values < limit, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    value, first = float(kl.values[spell.end]), int(kl.steps[spell.start])
    yield Sighting(
        message=f"The KL estimate is {value:.4g} since step {first} (limit {limit:g}): the samples "
        "are not drawn from the policy that is trained. Check the sampling settings.",
        evidence=(f"KL {value:.4g} at step {kl.steps[spell.end]}",),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("rollout.temperature", "1.0", "sample from the policy itself", Grade.UNSAFE),
            Fix("", "", "no top_k, top_p, min_length; the tokenizer's own pad and end tokens"),
            Fix("algorithm.kl.estimator", "k3", "is never negative", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(kl.steps[spell.end]),
        value=value,
        limit=limit,
    )


def _causes(view: RunView) -> Iterator[Cause]:
    batch = view.number("trainer.batch_rows", "trainer.micro_batch_rows")
    length = newest(view, "completions/mean_length")
    cut = [(w, raw_number(view, w)) for w in ("top_k", "top_p", "min_p", "min_length")]
    odd = [f"{w}={v:g}" for w, v in cut if v is not None and v not in (0.0, 1.0, -1.0)]
    kwargs = Cause(
        "kl-negative-generation-kwargs",
        f"sampling is bent by {', '.join(odd)}" if odd else "samples are not the raw policy's",
    )
    if batch == 1 and not odd:
        yield Cause("kl-negative-weak-reward-model", "batches of one row and a noisy reward")
    yield kwargs
    if length is not None and length <= 2.0:
        yield Cause("empty-completions", f"completions have {length:.1f} tokens")
    if batch != 1:
        yield Cause("kl-negative-weak-reward-model", "a poor reward may drive it as well")


RULE = Rule(
    code="POL006",
    name="negative-kl",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("kl|kl/sequence",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("GEN003",),
)
