"""From the first step on, the engine samples from something else than the model.

## What it sees
Log-probs of engine and trainer are far apart from the first records on (mean distance above
`min_gap` nats, or probabilities by `min_prob_gap`), most answers run to the limit or the reward is
near 0, and a setting is known to lose weights: an engine that sleeps at level 2 (which discards
weights), or an adapter that is not gathered for the engine.

## Why it matters
Answers come from a broken policy and are trained on as the policy's own.

## Likely causes
- sleep-wake-weights-lost: sleep level 2 frees the weights themselves; they must be sent again in
  full, base weights included.
- lora-not-synced: the adapter's tensors never reach the engine.

## What to do
Use sleep level 1 (weights are kept on the host), or publish all weights after waking. For verl with
an adapter: layered_summon.

## Known false alarms
None known: a gap of this size has no harmless cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import has_adapter, is_false, mean_since, raw, raw_number
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_gap: float = option(0.3, "Nats between engine and trainer that are far.")
    min_prob_gap: float = option(0.1, "Distance of probabilities that is far.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    gap = mean_since(view, "sampling/sampling_logp_difference/mean", step=0)
    prob = mean_since(view, "sampling/prob_difference/mean", step=0)
    far = (gap or 0) > options.min_gap or (prob or 0) > options.min_prob_gap
    lost, adapter = _level_two(view), has_adapter(view)
    unsent = adapter and is_false(raw(view, "layered_summon"))
    cut = mean_since(view, "completions/clipped_ratio", step=0)
    reward = mean_since(view, "reward", step=0)
    bad = (cut or 0) > 0.5 or (reward is not None and reward < 0.05)
    if not far or not bad or not (lost or unsent):
        return
    causes = (
        [Cause("sleep-wake-weights-lost", "sleep level 2 discards the weights")] if lost else []
    )
    causes += [Cause("lora-not-synced", "the adapter is not gathered for it")] if unsent else []
    steps = [int(series.steps[0]) for series in view.metrics.values() if len(series)]
    is_gap = (gap or 0) > options.min_gap
    size = f"{gap:.2g} nats" if is_gap else f"{prob:.2g} in probability"
    yield Sighting(
        message=f"Engine and trainer differ by {size} from the first step on, and "
        + (
            f"{cut:.0%} of the answers run to the limit"
            if (cut or 0) > 0.5
            else "no answer is right"
        )
        + ": the engine does not hold the model's weights. Use sleep level 1, or send all weights "
        "after waking.",
        evidence=(f"difference {size}",),
        causes=tuple(causes),
        fixes=(
            Fix(
                "engine.sleep",
                "false",
                "the engine keeps its weights",
                Grade.SAFE,
            ),
            Fix(
                "",
                "true",
                "the adapter is gathered layer by layer, and sent",
                theirs={"verl": "actor_rollout_ref.rollout.layered_summon"},
            ),
        ),
        first_step=min(steps),
        last_step=view.last_step,
        value=gap if is_gap else prob,
        limit=options.min_gap if is_gap else options.min_prob_gap,
    )


def _level_two(view: RunView) -> bool:
    level = raw_number(view, "vllm_sleep_level", "sleep_level")
    return level == 2 or view.log.has("sleep level: 2", "sleep_level=2", "sleep(level=2)")


RULE = Rule(
    code="SYN003",
    name="sleep-wake-weights-lost",
    family=Family.SYNC,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("sampling/sampling_logp_difference/mean|sampling/prob_difference/mean",),
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "RWD001",
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
