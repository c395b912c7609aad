"""Load balancing moves the router while RL trains the policy.

## What it sees
RL of a model with experts with a balancing loss above `max_coefficient`, or with updates of the
router's bias.

## Why it matters
A small change of the router is a large change of the distribution. A loss that has nothing to do
with the reward then moves the policy, and off-policy samples make it worse.

## Likely causes
- router-loss-in-rl: settings of pretraining.

## What to do
Set the balancing to none, its coefficient to 0, the bias update rate to 0 for RL.

## Known false alarms
Long RL runs may need a little of it to keep the loads even; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_moe, raw_number
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_coefficient: float = option(0.002, "Weight of the balancing loss that is harmless.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    if not is_moe(view):
        return
    weight = raw_number(view, "moe_aux_loss_coeff", "aux_loss_coef", "router_aux_loss_coef") or 0.0
    rate = raw_number(view, "moe_router_bias_update_rate") or 0.0
    if weight <= options.max_coefficient and rate <= 0:
        return
    what = f"a balancing loss of {weight:g}" if weight > options.max_coefficient else ""
    what = what or f"updates of the router's bias at a rate of {rate:g}"
    yield Sighting(
        message=f"RL with {what}: the router moves for reasons that have nothing to do with the "
        "reward. Switch it off for RL.",
        causes=(Cause("router-loss-in-rl", what),),
        fixes=(
            Fix(
                "",
                "0",
                "the router follows the reward alone",
                Grade.UNSAFE,
                theirs={
                    "chatlearn": "models.policy_trainer.megatron_model_cfg.moe_aux_loss_coeff",
                    "slime": "--moe-aux-loss-coeff",
                    "miles": "--moe-aux-loss-coeff",
                },
            ),
            Fix(
                "",
                "0",
                "no updates of the bias",
                Grade.UNSAFE,
                theirs={
                    "chatlearn": "models.policy_trainer.megatron_model_cfg."
                    "moe_router_bias_update_rate",
                    "slime": "--moe-router-bias-update-rate",
                },
            ),
        ),
        value=max(weight, rate),
        limit=options.max_coefficient,
    )


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
