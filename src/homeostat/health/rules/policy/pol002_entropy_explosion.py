"""The policy's entropy rises towards that of random text.

## What it sees
Entropy per token is above `growth` times its first value and above `limit`, in `fire` of the newest
`window` records; and in the last quarter of the run it is higher than in the first by more than
noise. If the reward falls meanwhile, or does not rise while entropy grew `far` times, `low_limit`
takes the place of `limit`. It is a warning if the reward does not rise with the entropy, or only
rose in the first third of the run without reaching its maximum, and if the deviation of continuous
actions is above `wide`.

## Why it matters
The policy forgets what it knew: probability leaks to tokens that make no sense, and soon whole
completions make no sense.

## Likely causes
- entropy-bonus-too-high: the bonus outweighs the reward.
- lr-too-high: large steps break the model.
- reward-always-zero: without a reward, the policy follows only noise and the bonus.
- entropy-explosion: rare tokens become more probable, because the upper clip range is wide or there
  is no KL penalty.

## What to do
Go back to a checkpoint before the rise. Lower the learning rate or the entropy bonus, add a KL
penalty, mask samples that are cut or far off-policy.

## Known false alarms
A model that begins overconfident and learns to explore: entropy and reward rise together, which is
information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import gains, newest, solved_share, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView

# Share of the highest reward from which on no further rise is expected.
_SOLVED = 0.85


class Options(RuleOptions):
    limit: float = option(1.0, "Entropy per token, in nats, that is much for a trained model.")
    low_limit: float = option(0.25, "The same where the reward falls meanwhile.")
    growth: float = option(2.0, "Factor over the first records that it must have grown by.")
    far: float = option(10.0, "Factor from which on a reward that does not rise is enough, too.")
    wide: float = option(10.0, "Deviation of actions above which most lie outside their range.")
    most: float = option(13.0, "Above this it cannot be an entropy per token.")
    fire: int = option(4, "Number of records that must show it ...")
    window: int = option(5, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    entropy = view.series("entropy")
    assert entropy is not None, "needs says so"
    finite = entropy.finite()
    if len(finite) < options.fire + 2 or median(finite.values) > options.most:
        return
    start = median(finite.values[:3])
    reward = trend(view.series("reward"))
    moved = trend(finite)
    far = moved is not None and moved.end > options.far * start
    worse = reward is not None and (reward.falls or (far and not reward.rises))
    limit = options.low_limit if worse else options.limit
    if moved is not None and not moved.rises:
        # The entropy fluctuates by that much, so single records say nothing.
        return
    held = (finite.values > limit) & (finite.values > options.growth * start)
    spell = newest_spell(held, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    spread = view.latest("train/std")
    is_wide = spread is not None and spread >= options.wide
    now, first = float(finite.values[spell.end]), int(finite.steps[spell.start])
    yield Sighting(
        message=f"Entropy rose from {start:.3g} to {now:.3g} nats per token (limit "
        f"{limit:.3g}, above it since step {first}). Go back to a checkpoint before that.",
        evidence=(f"entropy {start:.3g} -> {now:.3g}",)
        + ((f"reward {reward.start:.3g} -> {reward.end:.3g}",) if reward is not None else ()),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            Fix(
                "algorithm.kl.coefficient",
                "0.001 or more",
                "holds the policy near the reference",
                Grade.UNSAFE,
            ),
            Fix("algorithm.entropy_bonus", "0", "a bonus rewards noise", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(finite.steps[spell.end]),
        value=now,
        limit=limit,
        level=Level.INFO if _is_worth_it(view) and not is_wide else None,
    )


def _is_worth_it(view: RunView) -> bool:
    """Return whether the reward rises along, or has risen to about all there is to earn."""
    reward, reached = view.series("reward"), solved_share(view)
    moved = trend(reward)
    is_solved = reached is not None and reached >= _SOLVED
    return gains(reward) or (is_solved and moved is not None and moved.rises)


def _causes(view: RunView) -> Iterator[Cause]:
    bonus, grads = view.number("algorithm.entropy_bonus"), trend(view.series("grad_norm"))
    reward = newest(view, "reward")
    if bonus is not None and bonus > 0.005:
        yield Cause("entropy-bonus-too-high", f"the bonus is {bonus:g}")
    if grads is not None and grads.rises and grads.end > 2 * grads.start:
        yield Cause("lr-too-high", f"gradients grew from {grads.start:.3g} to {grads.end:.3g}")
    if reward is not None and reward == 0.0:
        yield Cause("reward-always-zero", "no reward is left to follow")
    yield Cause("entropy-explosion", "the policy drifts towards random text")


RULE = Rule(
    code="POL002",
    name="entropy-explosion",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("entropy",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD006",),
)
