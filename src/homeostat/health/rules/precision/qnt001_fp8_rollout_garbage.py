"""A quantised engine samples garbage.

## What it sees
The engine is quantised (FP8 or INT4) and, from the first records on, its answers cannot be the
model's: log-probs far from the trainer's (above `max_gap` nats), samples in a mixture of scripts,
or nearly all answers run to the limit without a reward.

## Why it matters
The quantised weights, or their scales, were loaded or refreshed wrongly. From then on the run
trains on garbage.

## Likely causes
- fp8-rollout-garbage: scales of the first load are used for later weights, or layers are quantised
  that must not be.

## What to do
Sample once with bf16 weights: if the samples are good, the quantisation is at fault. Do not
quantise lm_head and embeddings; update engine and trainer together.

## Known false alarms
Quantisation may cost a small model much accuracy without being broken; the model then still writes
words.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import quantisation
from homeostat.health.rules.readings import mean_since
from homeostat.health.rules.sync.garble import is_garbled
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_gap: float = option(0.5, "Nats that quantisation explains.")
    max_prob_gap: float = option(0.2, "Distance of probabilities that it explains.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    kind = quantisation(view)
    if not kind:
        return
    signs = list(_signs(view, options))
    if not signs:
        return
    yield Sighting(
        message=f"The engine is quantised ({kind}) and its answers are not the model's: "
        f"{'; '.join(signs)}. Sample with bf16 weights to compare; then update engine and trainer.",
        evidence=tuple(signs),
        causes=(Cause("fp8-rollout-garbage", f"{kind} weights of the engine"),),
        fixes=(
            Fix(
                "",
                "none",
                "bf16 weights in the engine",
                theirs={"verl": "actor_rollout_ref.rollout.quantization"},
            ),
            Fix("sync.verify", "true", "compares engine and trainer", Grade.SAFE),
        ),
        first_step=min((int(s.steps[0]) for s in view.metrics.values() if len(s)), default=None),
        last_step=view.last_step,
    )


def _signs(view: RunView, options: Options) -> Iterator[str]:
    gap = mean_since(view, "sampling/sampling_logp_difference/mean", step=0)
    if gap is not None and gap > options.max_gap:
        yield f"log-probs differ by {gap:.2g} nats"
    prob = mean_since(view, "sampling/prob_difference/mean", step=0)
    if prob is not None and prob > options.max_prob_gap:
        yield f"probabilities differ by {prob:.2g}"
    garbled = [sample for sample in view.samples if is_garbled(sample.text)]
    if garbled:
        yield f"a sample reads {garbled[0].text.strip()[:50]!r}"
    cut = mean_since(view, "completions/clipped_ratio", step=0)
    reward = mean_since(view, "reward", step=0)
    if cut is not None and cut > 0.8 and reward is not None and abs(reward) < 0.02:
        yield f"{cut:.0%} of the answers run to the limit, none is right"


RULE = Rule(
    code="QNT001",
    name="fp8-rollout-garbage",
    family=Family.PRECISION,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "RWD001",
        "QNT002",
        "RWD002",
        "RWD004",
        "RWD006",
        "GEN001",
        "GEN002",
        "GEN004",
        "OFF001",
        "OFF002",
        "POL002",
        "POL011",
        "POL013",
    ),
)
