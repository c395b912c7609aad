"""Load balancing moves the router while RL trains the policy.

## What it sees
RL of a model with experts with a balancing loss above `max_coefficient`, or with updates of the
router's bias: by the settings, or because the largest bias (moe/bias_max) changes from record to
record. A warning from `harmful_coefficient` or `harmful_rate` on, and where the bias was seen to
move by more than `max_move`.

## Why it matters
A small change of the router is a large change of the distribution. A loss that has nothing to do
with the reward then moves the policy, and off-policy samples make it worse.

## Likely causes
- router-loss-in-rl: settings of pretraining.

## What to do
Set the balancing to none, its coefficient to 0, the bias update rate to 0 for RL. A bias that comes
with the checkpoint stays as it is: it belongs to the policy.

## Known false alarms
Long RL runs may need a little of it to keep the loads even; a small coefficient is therefore
information only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_moe, raw_number
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_coefficient: float = option(0.002, "Weight of the balancing loss that is harmless.")
    harmful_coefficient: float = option(0.05, "Weight that is a warning.")
    harmful_rate: float = option(0.01, "Rate of bias updates that is a warning.")
    max_move: float = option(0.05, "Distance by which the largest bias may move in a run.")


_LOSS_OFF = Fix(
    "model.moe.aux_loss_coefficient",
    "0",
    "the router follows the reward alone",
    Grade.UNSAFE,
    theirs={
        "chatlearn": "models.policy_trainer.megatron_model_cfg.moe_aux_loss_coeff",
        "slime": "--moe-aux-loss-coeff",
        "miles": "--moe-aux-loss-coeff",
    },
)
_BIAS_OFF = Fix(
    "model.moe.router_bias_update_rate",
    "0",
    "no updates of the bias",
    Grade.UNSAFE,
    theirs={
        "chatlearn": "models.policy_trainer.megatron_model_cfg.moe_router_bias_update_rate",
        "slime": "--moe-router-bias-update-rate",
    },
)


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    if not is_moe(view):
        return
    weight, rate, move = _weight(view), _rate(view), _move(view)
    found = []
    if weight > options.max_coefficient:
        found.append(f"a balancing loss of {weight:g}")
    if rate > 0:
        found.append(f"updates of the router's bias at a rate of {rate:g}")
    if move > options.max_move:
        found.append(f"a router bias that moved by {move:.2g}")
    if not found:
        return
    what = " and ".join(found)
    is_harmful = (
        weight >= options.harmful_coefficient
        or rate >= options.harmful_rate
        or move > options.max_move
    )
    yield Sighting(
        message=f"RL with {what}: the router moves for reasons that have nothing to do with the "
        "reward. Switch it off for RL.",
        evidence=tuple(found),
        causes=(Cause("router-loss-in-rl", what),),
        fixes=(_LOSS_OFF, _BIAS_OFF) if weight > options.max_coefficient else (_BIAS_OFF,),
        value=max(weight, rate),
        limit=options.max_coefficient,
        level=Level.WARN if is_harmful else Level.INFO,
    )


def _weight(view: RunView) -> float:
    """Return the weight of the balancing loss; 0 where `model.moe.balancing` has none."""
    if view.setting("model.moe.balancing") in ("none", "bias"):
        return 0.0
    raw = raw_number(view, "moe_aux_loss_coeff", "aux_loss_coef", "router_aux_loss_coef")
    return (raw if raw is not None else view.number("model.moe.aux_loss_coefficient")) or 0.0


def _rate(view: RunView) -> float:
    if view.setting("model.moe.balancing") in ("none", "aux", "sequence_aux"):
        return 0.0
    raw = raw_number(view, "moe_router_bias_update_rate")
    return (raw if raw is not None else view.number("model.moe.router_bias_update_rate")) or 0.0


def _move(view: RunView) -> float:
    """Return by how much the largest bias differs between the records of the run."""
    biases = view.series("moe/bias_max")
    values = biases.finite().values if biases is not None else np.zeros(0)
    return float(np.ptp(values)) if len(values) >= 3 else 0.0


RULE = Rule(
    code="MOE004",
    name="router-loss-in-rl",
    family=Family.MOE,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
)
