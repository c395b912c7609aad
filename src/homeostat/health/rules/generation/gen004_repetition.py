"""Completions repeat themselves.

## What it sees
The share of completions that loop stays above `limit` in `fire` records, or most of the newest
printed completions do.

## Why it matters
Loops fill the completion up to the length limit without content. They come from a policy that is
too certain, from greedy sampling, or from damaged weights.

## Likely causes
- nan-update-poisoned-weights: one character over and over, and numbers that are not finite.
- entropy-collapse: the policy is certain of every token.
- repetition: temperature too low, a model too weak for its prompts.

## What to do
Sample at temperature 1; check that numbers are finite; compare with the first checkpoint.

## Known false alarms
Tasks whose answers repeat by nature (tables, counting).
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import is_nonfinite, newest, repeats_itself, solved_share
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.3, "Largest acceptable share of completions that loop.")
    fire: int = option(3, "Number of consecutive records that must show it.")
    samples: int = option(3, "Printed completions that are needed to judge by them.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    share = view.series("completions/repetition_share")
    if share is not None:
        spell = newest_spell(share.values > options.limit, fire=options.fire, clear=2)
        if spell is not None and spell.is_open:
            value = float(share.values[spell.end])
            yield _sighting(view, value, int(share.steps[spell.start]), options)
        return
    last = max((s.step for s in view.samples if s.step is not None), default=None)
    texts = [s.text for s in view.samples if s.step == last and s.text.strip()]
    if len(texts) < options.samples:
        yield Unknown("too few completions to read, and no share of repetition is logged")
        return
    loops = sum(map(repeats_itself, texts)) / len(texts)
    reached = solved_share(view)
    if loops > 0.5 and not (reached is not None and reached > 0.5):
        yield _sighting(view, loops, last, options)


def _sighting(view: RunView, value: float, first: int | None, options: Options) -> Sighting:
    entropy = newest(view, "entropy")
    causes = []
    if is_nonfinite(view, "train/loss", "grad_norm", "kl", "entropy"):
        causes.append(Cause("nan-update-poisoned-weights", "numbers are not finite"))
    if entropy is not None and entropy < 0.05:
        causes.append(Cause("entropy-collapse", f"entropy is {entropy:.3g}"))
    causes.append(Cause("repetition", f"{value:.0%} of the completions loop"))
    return Sighting(
        message=f"{value:.0%} of the completions repeat themselves (limit {options.limit:.0%}). "
        "Sample at temperature 1, and compare with an earlier checkpoint.",
        evidence=(f"looping completions {value:.0%}",),
        causes=tuple(causes),
        fixes=(
            Fix(
                "rollout.temperature", "1.0", "greedy decoding tends to repeat itself", Grade.UNSAFE
            ),
        ),
        first_step=first,
        last_step=view.last_step,
        value=value,
        limit=options.limit,
    )


RULE = Rule(
    code="GEN004",
    name="repetition",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
)
