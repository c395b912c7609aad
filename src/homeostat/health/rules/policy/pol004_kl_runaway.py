"""KL to the reference grows without bound, or a single update moves the policy further than a whole
run should.

## What it sees
One of four: KL per token stays above `max_kl`; or it is above `min_kl` and ten times its first
value (or above `far_kl`) and growing, while the reward falls from its best, and below `far_kl`
faster since then than before, or with gradients that grow since then; or KL summed over a
completion is above `max_sequence`, ten times its first value and growing; or the KL of single
updates, measured from the policy that sampled, was above `update` in two records, or once above
three times that. Such updates are only information if they are over and the reward has risen since.

## Why it matters
The reference is what keeps the model a language model. Far away from it the reward can no longer be
trusted, and the text degrades.

## Likely causes
- lr-too-high: each update moves the policy too far.
- too-many-updates-per-rollout: many updates on the same samples.
- mode-collapse: the policy gives only one answer.
- reward-hacking: the reward keeps rising, but by other means than intended.
- kl-runaway: the KL penalty is missing or too weak.

## What to do
Go back to the checkpoint with the best held-out reward. Lower the learning rate, raise the KL
coefficient (or let it adapt to a target), take fewer updates per rollout, leave cut samples out.

## Known false alarms
Without a KL penalty a policy may move far from the reference and still be good: while its reward
rises and KL per token stays below `max_kl`, nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.reward.rwd004_reward_constant import zero_since
from homeostat.health.rules.signs import has_lora, trend, turned_down
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series

# Records at each end of a part whose median is compared, and by how much faster KL must grow.
_FEW, _FASTER = 3, 1.5


class Options(RuleOptions):
    max_kl: float = option(2.0, "KL per token, in nats, that is too far in any case.")
    min_kl: float = option(0.1, "KL per token from which on a falling reward is laid to it.")
    far_kl: float = option(0.5, "The same where KL was never much smaller.")
    max_sequence: float = option(20.0, "KL of a whole completion that is too far.")
    update: float = option(1.0, "KL of one update, in nats, after which the policy is another one.")
    huge: float = option(1000.0, "Above this the estimator is to blame, not the policy.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(4, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    kl = view.series("kl", "kl/sequence")
    found = list(_of_reference(view, kl.finite(), options)) if kl is not None else []
    yield from found or _of_updates(view, options)


def _of_updates(view: RunView, options: Options) -> Iterator[Sighting]:
    """Report updates that replace the policy: its samples say nothing of the next one."""
    updates = view.series("policy/update_kl")
    finite = updates.finite() if updates is not None else None
    if finite is None or not len(finite):
        return
    far = np.flatnonzero(finite.values > options.update)
    most = float(finite.values.max())
    if len(far) < 2 and most <= 3.0 * options.update:
        return
    first, last = int(finite.steps[far[0]]), int(finite.steps[far[-1]])
    reward = view.series("reward")
    since = trend(reward.since(last)) if reward is not None else None
    is_over = far[-1] < 0.5 * len(finite) and since is not None and since.rises
    yield Sighting(
        message=f"Single updates moved the policy by a KL of up to {most:.3g} (limit "
        f"{options.update:.3g}), first at step {first}: the samples no longer tell anything about "
        "the policy. Lower the learning rate, or take fewer updates per rollout.",
        evidence=(f"policy/update_kl above {options.update:g} in {len(far)} records",),
        causes=(
            Cause("lr-too-high", "one update carries too far"),
            Cause("too-many-updates-per-rollout", "or many on the same samples"),
        ),
        fixes=(
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            Fix("trainer.updates_per_step", "a half", "less drift per rollout", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=last,
        value=most,
        limit=options.update,
        level=Level.INFO if is_over else None,
    )


def _of_reference(view: RunView, finite: Series, options: Options) -> Iterator[Sighting]:
    whole = "kl" not in view.metrics or not len(view.metrics["kl"])
    if len(finite) < options.fire + 1:
        return
    limit = options.max_sequence if whole else options.max_kl
    start = _early(finite)
    over = (finite.values > limit) & (finite.values < options.huge)
    if whole:
        over &= finite.values > 10.0 * start
    spell = newest_spell(over, fire=options.fire, window=options.window, clear=3)
    if spell is not None and spell.is_open:
        # What came after the record that was last above the limit is not what it fired for.
        seen = finite.head(spell.end + 1)
        yield _sighting(view, seen, int(finite.steps[spell.start]), limit, start, turned=False)
        return
    turned = None if whole else _turned(view, finite, start, options)
    if turned is not None:
        yield _sighting(view, finite, turned, options.min_kl, start, turned=True)


def _early(kl: Series) -> float:
    """Return the initial level: the KL of the first updates, not the 0 before any."""
    early = kl.values[: max(3, len(kl) // 6)]
    positive = early[early > 0.0]
    return median(positive) if len(positive) else 0.0


def _turned(view: RunView, kl: Series, start: float, options: Options) -> int | None:
    """The step at which the reward was best, where it has fallen since while KL grew on."""
    reward = view.series("reward")
    far = kl.latest > options.far_kl or kl.latest > max(options.min_kl, 10.0 * start)
    if reward is None or not far:
        return None
    if rank_correlation(kl) < 0.8 or kl.latest > options.huge:
        return None
    # Where the scorer broke, KL did not turn the reward down.
    broken = zero_since(view, fire=4)
    turned = turned_down(reward if broken is None else reward.before(broken))
    if turned is None or kl.latest > options.far_kl or _speeds_up(kl, turned):
        return turned
    return turned if _gradients_grow(view, turned) else None


def _gradients_grow(view: RunView, turned: int) -> bool:
    """Return whether gradients are larger since a step, and still grow: updates drive the run on.

    A gradient that grew with the reward, and no more since, is that of a run that learns.
    """
    grads = view.series("grad_norm")
    if grads is None:
        return False
    before, since = trend(grads.before(turned)), trend(grads.since(turned))
    if before is None or since is None or not since.rises:
        return False
    return since.end > _FASTER * before.end


def _speeds_up(kl: Series, turned: int) -> bool:
    """Return whether KL grows faster after a step than before it, or all of it is from then on.

    A small KL grows by about as much in every step of any run that learns.
    """
    before, after = kl.before(turned), kl.since(turned)
    if len(before) < _FEW or len(after) < _FEW:
        return True
    paces = [
        (median(part.values[-_FEW:]) - median(part.values[:_FEW]))
        / max(1.0, float(part.steps[-1] - part.steps[0]))
        for part in (before, after)
    ]
    return paces[1] > _FASTER * max(paces[0], 0.0)


def _sighting(
    view: RunView, kl: Series, first: int, limit: float, start: float, *, turned: bool
) -> Sighting:
    reward = trend(view.series("reward"))
    falls = turned or (reward is not None and reward.falls)
    return Sighting(
        message=f"KL to the reference grew from {start:.3g} to {kl.latest:.3g} (limit {limit:.3g})"
        + (" while the reward turned down" if falls else "")
        + ". Go back to the best checkpoint; lower the learning rate or raise the KL penalty.",
        evidence=(f"KL {start:.3g} -> {kl.latest:.3g} over steps {kl.steps[0]}-{kl.steps[-1]}",)
        + ((f"reward {reward.start:.3g} -> {reward.end:.3g}",) if reward is not None else ()),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            Fix(
                "algorithm.kl.coefficient",
                "2 to 10 times as large",
                "pulls the policy back to the reference",
                Grade.UNSAFE,
            ),
            Fix("trainer.updates_per_step", "1", "less drift per rollout", Grade.UNSAFE),
            Fix(
                "algorithm.overlong",
                "mask",
                "samples that were cut teach the wrong thing",
                Grade.UNSAFE,
                theirs={"trl": "mask_truncated_completions=true"},
            ),
        ),
        first_step=first,
        last_step=int(kl.steps[-1]),
        value=kl.latest,
        limit=limit,
        confidence=Confidence.INFERRED if falls else None,
    )


def _causes(view: RunView) -> Iterator[Cause]:
    """Those that something speaks for, the surest first."""
    lr, updates = view.number("trainer.lr"), view.number("trainer.updates_per_step")
    grads, reward = trend(view.series("grad_norm")), trend(view.series("reward"))
    entropy = trend(view.series("entropy/sequence", "entropy"))
    if lr is not None and lr > (3e-4 if has_lora(view) else 5e-6):
        yield Cause("lr-too-high", f"the learning rate is {lr:g}")
    elif grads is not None and grads.rises and grads.end > 1.5 * grads.start:
        yield Cause("lr-too-high", f"gradients grew from {grads.start:.3g} to {grads.end:.3g}")
    if entropy is not None and entropy.falls and entropy.end < 0.2 * entropy.start:
        yield Cause("mode-collapse", f"entropy fell from {entropy.start:.3g} to {entropy.end:.3g}")
    if updates is not None and updates > 2:
        yield Cause("too-many-updates-per-rollout", f"{updates:.0f} updates on the same samples")
    if reward is not None and reward.rises:
        yield Cause("reward-hacking", "the reward rises on, far from the reference")
    yield Cause("kl-runaway", "nothing holds the policy near the reference")


RULE = Rule(
    code="POL004",
    name="kl-runaway",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("kl|kl/sequence|policy/update_kl",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD006", "POL015"),
)
