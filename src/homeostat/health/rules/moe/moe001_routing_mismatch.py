"""Trainer and engine send tokens to different experts.

## What it sees
A model with experts whose routing is not replayed, and either the share of tokens and layers that
engine and trainer route alike (moe/route_agreement) is below `min_agreement`, or their log-probs
differ by more than rounding over most records (mean distance above `max_gap` nats or `max_prob` of
probability, KL above `max_kl`, or a mean factor above `max_factor`).

## Why it matters
A router decides by small differences. Where the two sides round differently, a few percent of the
tokens take another expert, and their log-probs are off by whole nats: ratios explode, and runs
collapse after some hundred steps.

## Likely causes
- moe-routing-mismatch: the router's choice differs between the two implementations.
- engine-logprob-mismatch: the implementations differ in more than the router.

## What to do
Record the experts at sampling and replay them in training (routing replay, R3); keep the router in
fp32; correct with importance weights. With `model.numerics: invariant`, homeostat's engine chooses
exactly the same experts as the trainer.

## Known false alarms
The rule does not judge models without experts. Samples of older weights are also routed
differently: then the problem is the age of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import is_replaying
from homeostat.health.rules.readings import is_moe, is_true, raw
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_agreement: float = option(0.8, "Smallest share of routes that are the same on both sides.")
    max_gap: float = option(0.03, "Nats that rounding explains.")
    max_kl: float = option(0.01, "KL that rounding explains.")
    max_prob: float = option(0.03, "Mean distance of probabilities that rounding explains.")
    max_factor: float = option(1.05, "Mean factor that rounding explains.")


_REPLAY = Fix(
    "model.moe.router_replay",
    "ids",
    "the trainer then uses the experts that the engine sampled with",
    Grade.UNSAFE,
    theirs={
        "slime": "--use-rollout-routing-replay",
        "miles": "--use-rollout-routing-replay",
        "verl": "actor_rollout_ref.actor.megatron.router_replay.mode=R3, "
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        "skyrl": "trainer.policy.megatron_config.moe_enable_routing_replay=true",
        "prime_rl": "trainer.enable_router_replay=true",
    },
)
_WEIGHTS = Fix(
    "algorithm.correction.weight.type",
    "token",
    "importance weights account for the difference",
    Grade.UNSAFE,
    theirs={"nemo_rl": "loss_fn.use_importance_sampling_correction"},
)


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    if not is_moe(view) or is_replaying(view):
        return
    seen = [*_routes(view, options), *_log_probs(view, options)]
    if not seen:
        yield Unknown("no comparison of engine and trainer was logged")
        return
    over = [(text, step) for text, step, is_over in seen if is_over]
    if not over:
        return
    corrected = is_true(raw(view, "use_importance_sampling_correction", "use_tis"))
    yield Sighting(
        message=f"Engine and trainer of this model with experts disagree: {over[0][0]}. They route "
        "tokens to different experts. Replay the routing, keep the router in fp32"
        + ("." if corrected else ", and switch the importance correction on."),
        evidence=tuple(text for text, _ in over),
        causes=(
            Cause("moe-routing-mismatch", "a model with experts, without routing replay"),
            Cause("engine-logprob-mismatch", over[0][0]),
        ),
        fixes=(_REPLAY, _WEIGHTS),
        first_step=over[0][1],
        last_step=view.last_step,
    )


def _routes(view: RunView, options: Options) -> Iterator[tuple[str, int, bool]]:
    """Return the same as `_log_probs`, of the routes themselves."""
    series = view.series("moe/route_agreement")
    values = series.finite() if series is not None else None
    if values is None or len(values) < 3:
        return
    held = values.values < options.min_agreement
    text = (
        f"{median(values.values):.0%} of the routes are the same (limit "
        f"{options.min_agreement:.0%})"
    )
    step = int(values.steps[int(np.argmax(held))])
    yield text, step, bool(held[-3:].all() and held.mean() > 0.2)


def _log_probs(view: RunView, options: Options) -> Iterator[tuple[str, int, bool]]:
    """Return what was compared, from which step on, and whether it is over its limit."""
    for name, what, limit in (
        ("sampling/sampling_logp_difference/mean", "mean distance of log-probs", options.max_gap),
        ("sampling/prob_difference/mean", "mean distance of probabilities", options.max_prob),
        ("sampling/k3", "KL of trainer from engine", options.max_kl),
        ("sampling/mult_prob_error", "mean factor between probabilities", options.max_factor),
    ):
        series = view.series(name)
        values = series.finite() if series is not None else None
        if values is None or len(values) < 3:
            continue
        held = values.values > limit
        text = f"{what} {median(values.values):.3g} (limit {limit:g})"
        step = int(values.steps[int(np.argmax(held))])
        yield text, step, bool(held.mean() > 0.7 and held[-1])


RULE = Rule(
    code="MOE001",
    name="moe-routing-mismatch",
    family=Family.MOE,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=("OFF001", "OFF002"),
)
