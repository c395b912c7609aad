"""The KL penalty holds the policy at the reference, so the policy does not learn.

## What it sees
A KL coefficient of `coefficient` or more, KL per token below `max_kl` and a reward without a rise
over `fire` records, although rewards differ within groups.

## Why it matters
The penalty undoes each step towards a higher reward.

## Likely causes
- kl-penalty-too-strong: the coefficient outweighs the advantages.
- lr-too-low: the policy would hardly move without the penalty either.

## What to do
Lower the coefficient to 0.001 - 0.01; if KL stays near 0, raise the learning rate.

## Known false alarms
Runs that have only just begun. The finding is only information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import newest, trend
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    coefficient: float = option(0.1, "KL coefficient that is strong.")
    max_kl: float = option(0.005, "KL per token of a policy that stays where it is.")
    fire: int = option(20, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    weight = newest(view, "kl_coefficient", count=1) or view.number("algorithm.kl.coefficient")
    if weight is None:
        yield Unknown("the weight of the KL penalty is not known")
        return
    reward, kl = view.series("reward"), newest(view, "kl", count=10)
    assert reward is not None, "needs says so"
    moved, spread = trend(reward), newest(view, "reward_std")
    if weight < options.coefficient or kl is None or not 0.0 <= kl < options.max_kl:
        return
    if len(reward) < options.fire or moved is None or moved.is_real or spread == 0.0:
        return
    causes = [Cause("kl-penalty-too-strong", f"its weight is {weight:g}")]
    if kl < 1e-4:
        causes.append(Cause("lr-too-low", f"KL is {kl:.2g}"))
    yield Sighting(
        message=f"The KL penalty has weight {weight:g}, KL stays at {kl:.2g} and the reward at "
        f"{moved.end:.3g}: the penalty holds the policy where it was. Lower its weight.",
        evidence=(f"KL {kl:.2g}", f"reward {moved.start:.3g} -> {moved.end:.3g}"),
        causes=tuple(causes),
        fixes=(Fix("algorithm.kl.coefficient", "0.001", "lets the policy move", Grade.UNSAFE),),
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=weight,
        limit=options.coefficient,
    )


RULE = Rule(
    code="POL016",
    name="kl-penalty-too-strong",
    family=Family.POLICY,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("reward", "kl"),
    kinds=(Kind.RL,),
    options=Options,
)
