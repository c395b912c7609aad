"""From one update to the next the policy began to produce garbage.

## What it sees
After `before` good records the reward drops to less than `kept` of what it was, within two records,
and stays there for `fire`; at the same time completions jump to the limit or to nothing, or entropy
or variety jumps. Trainer and engine agree on the tokens, and all numbers are finite. If fewer
records were good, nothing at all must be left of the reward. The rule also fires if the policy
loses the reward that it began with within the first `early` records and never recovers it, while
its texts change: the first updates wrecked the policy.

## Why it matters
One update has wrecked the weights. Training on samples of these weights cannot repair them.

## Likely causes
- entropy-bonus-too-high: the bonus outweighs the reward.
- stale-policy: the policy learned from samples of much older weights.
- too-many-updates-per-rollout: ratios of new to old probability were far from 1 before the drop.
- length-penalty-too-strong: answers shrink under a penalty for long ones.
- lr-too-high: the step was too large; often the gradient norm before it is unusually high.
- no-eos: the policy no longer writes the end token, while texts vary as before or begin alike.
- policy-collapse: a batch of outliers, an off-policy batch, a reward that broke.

## What to do
Go back to the checkpoint before the drop. Lower the learning rate, clip gradients harder, look at
the batch of that step.

## Known false alarms
Weights that were damaged while they were sent to the engine have the same effect on the reward, but
then trainer and engine disagree, and other rules fire. If the two cases cannot be distinguished,
the rule is not evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeGuard

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import staleness
from homeostat.health.rules.signs import is_nonfinite, samples_per_step
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

_SIGNS = (
    "completions/clipped_ratio",
    "completions/mean_length",
    "completions/distinct_share",
    "entropy",
)
_GAPS = ("sampling/sampling_logp_difference/mean", "sampling/k3", "sampling/prob_difference/mean")


class Options(RuleOptions):
    kept: float = option(0.25, "Share of the reward that is left after a collapse, at most.")
    before: int = option(5, "Good records before it.")
    fire: int = option(3, "Bad records after it, all there are.")
    early: int = option(8, "First records within which a policy may be lost without a jump.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    known = view.series(*_GAPS) is not None
    at = _drop(reward, options, before=1 if known else min(3, options.before))
    if is_nonfinite(view, "grad_norm", "train/loss", "kl", "entropy"):
        return
    broken = _broken(view, reward, at)
    if at is None or not broken:
        at = _lost_early(view, reward, options)
        broken = _changed(view, int(reward.steps[at])) if at is not None else []
    if at is None:
        return
    step = int(reward.steps[at])
    if not broken or any(_grows(view, step, name) for name in _GAPS):
        return
    spiked = _spike(view, step)
    if not spiked and not known:
        yield Unknown(
            f"the reward broke at step {step}, but policy and engine cannot be distinguished"
        )
        return
    was, now = median(reward.values[:at]), median(reward.values[at:])
    lr = view.series("learning_rate")
    rate = (
        f"the learning rate was {lr.before(step).latest:.3g}" if _has(lr, step) else "a large step"
    )
    rate = _carried(view, step) or rate
    yield Sighting(
        message=f"At step {step} the reward fell from {was:.3g} to {now:.3g}, and "
        f"{broken[0]}: an update wrecked the policy. Go back to a checkpoint before it.",
        evidence=tuple(broken),
        causes=(
            *_bonus(view),
            *_off_policy(view, step),
            *_shortened(view, step),
            # Where the very first updates wrecked it, the missing ends are part of the wreck.
            *(() if at <= options.early else _endless(view, broken)),
            Cause("lr-too-high", spiked or rate),
            *(_endless(view, broken) if at <= options.early else ()),
            Cause("policy-collapse", "garbage from one update to the next"),
        ),
        fixes=(
            Fix("checkpoint.load_step", f"before {step}", "the present weights cannot be repaired"),
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            Fix("trainer.max_grad_norm", "a half", "bounds the steps of outliers", Grade.UNSAFE),
        ),
        first_step=step,
        last_step=int(reward.steps[-1]),
        value=now,
        limit=options.kept * was,
    )


def _broken(view: RunView, reward: Series, at: int | None) -> list[str]:
    if at is None:
        return []
    return [said for name in _SIGNS if (said := _jump(view, int(reward.steps[at]), name))]


def _lost_early(view: RunView, reward: Series, options: Options) -> int | None:
    """Return the step at which the initial reward is lost in the first updates and stays lost.

    It may be lost step by step or at once. A few samples may earn something by luck, so the initial
    reward must be more than that.
    """
    values = reward.values
    if len(values) <= options.fire or not np.isfinite(values).all():
        return None
    began, num = float(values[0]), samples_per_step(view)
    is_luck = began * num < 10.0 if num else began < 0.05
    low = np.flatnonzero(values < 0.5 * began)
    if began <= 0.0 or is_luck or not len(low) or low[0] > options.early:
        return None
    half = len(values) // 2
    between = values[int(low[0]) : half]
    if len(between) and float(between.mean()) >= 0.5 * began:
        return None  # it came back, and was lost later
    late = values[max(int(low[0]), half) :]
    gone = len(late) >= options.fire and late.max() < options.kept * began
    return int(low[0]) if gone and median(late) < 0.1 * began else None


def _changed(view: RunView, step: int) -> list[str]:
    """Return the metrics of the texts that differ from the first record.

    They show that an update changed the policy, and not the reward its criteria.
    """
    found = []
    for name in _SIGNS:
        series = view.series(name)
        old = series.before(step).finite().values if series is not None else np.zeros(0)
        new = series.since(step).finite().values if series is not None else np.zeros(0)
        if len(old) and len(new):
            was, now = float(old[0]), median(new)
            if abs(now - was) > max(0.25 * abs(was), 0.05):
                found.append(f"{name} went from {was:.3g} to {now:.3g}")
    return found


def _carried(view: RunView, step: int) -> str:
    """Return how far the updates before a step moved the policy, if that was measured."""
    moved = view.series("policy/update_kl")
    before = moved.before(step + 1).finite().values if moved is not None else np.zeros(0)
    far = float(before[-8:].max()) if len(before) else 0.0
    return f"one step of updates carried the policy {far:.2g} nats a token" if far > 0.05 else ""


def _bonus(view: RunView) -> list[Cause]:
    bonus = view.number("algorithm.entropy_bonus")
    if bonus is None or bonus < 0.05:
        return []
    return [Cause("entropy-bonus-too-high", f"the entropy bonus is {bonus:g}")]


def _off_policy(view: RunView, step: int) -> Iterator[Cause]:
    """Return the evidence that the samples just before were not, or no longer, the policy's own."""
    gap = view.series(*_GAPS)
    near = gap.before(step).finite().values[-5:] if gap is not None else np.zeros(0)
    if len(near) and median(near) > 0.3 and (age := staleness(view)) > 0.0:
        yield Cause("stale-policy", f"samples were {age:.2g} steps old, {median(near):.2g} off")
    updates, ratio = view.number("trainer.updates_per_step"), view.series("policy/ratio_max")
    far = ratio.before(step).finite().values[-3:] if ratio is not None else np.zeros(0)
    if updates is not None and updates >= 4 and len(far) and float(far.max()) > 5.0:
        why = f"{updates:.0f} updates on the same samples, ratios up to {far.max():.3g}"
        yield Cause("too-many-updates-per-rollout", why)


def _endless(view: RunView, broken: list[str]) -> list[Cause]:
    """Only the ends are missing: texts vary as before, or agree on how to begin."""
    if not any("clipped" in said for said in broken):
        return []
    if not any("distinct" in said or "entropy" in said for said in broken):
        return [Cause("no-eos", "completions no longer end, but vary as before")]
    if _begin_alike(view):
        return [Cause("no-eos", "answers to a prompt begin alike, and continue at random")]
    return []


def _shortened(view: RunView, step: int) -> Iterator[Cause]:
    """Answers shrink under a penalty for long ones: it pays more than to be right."""
    length = view.series("completions/mean_length")
    if length is None or view.setting("algorithm.overlong.type") is None:
        return
    old, new = length.before(step).finite().values, length.since(step).finite().values
    if len(old) and len(new) and median(new) < 0.6 * float(old[0]):
        why = f"answers shrank from {old[0]:.3g} to {median(new):.3g} tokens, and long ones cost"
        yield Cause("length-penalty-too-strong", why)


def _begin_alike(view: RunView) -> bool:
    """Most of the newest samples of a prompt share a long beginning, and none is the end."""
    last = view.samples[-1].step if view.samples else None
    texts: dict[str, list[str]] = {}
    for sample in view.samples:
        if sample.step == last and sample.prompt:
            texts.setdefault(sample.prompt, []).append(sample.text)
    pairs = [pair for group in texts.values() for pair in pairwise(sorted(group))]
    # Copies are another illness.
    shared = [_shared(*pair) / max(map(len, pair)) for pair in pairs if pair[0] != pair[1]]
    return len(shared) >= 8 and 2 * len(shared) > len(pairs) and median(shared) > 0.3


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _has(series: Series | None, step: int) -> TypeGuard[Series]:
    return series is not None and len(series.before(step)) > 0


def _drop(reward: Series, options: Options, *, before: int) -> int | None:
    """Return where it fell at once and stayed."""
    values = reward.values
    # Nothing to look for where the newest reward is not far below the best.
    fallen = len(values) > options.fire and values[-2:].max() < options.kept * values.max()
    if not fallen or not np.isfinite(values).all():
        return None
    for at in range(before, len(values) - options.fire + 1):
        was = median(values[max(0, at - options.before) : at])
        # The last good records must still be good: a slide is no jump.
        good = was > 0 and values[max(0, at - 2) : at].min() > 0.6 * was
        after = values[at + 1 :]
        kept = options.kept if at >= options.before else 0.1
        gone = at >= options.before or median(after) < 0.05 * was
        if good and gone and values[at] < 0.6 * was and after.max() < kept * was:
            return at
    return None


def _jump(view: RunView, step: int, name: str) -> str:
    series = view.series(name)
    if series is None:
        return ""
    # Soon after: what comes later has other reasons.
    old, new = series.before(step).finite().values[-5:], series.since(step).finite().values[1:5]
    if len(old) < 1 or len(new) < 1:
        return ""
    was, now = median(old), median(new)
    if name == "completions/clipped_ratio":
        jumped = now > max(0.6, was + 0.4)
    elif name == "entropy":
        jumped = now > max(3.0 * was, 0.8) or now < 0.05 * was
    elif name == "completions/distinct_share":
        jumped = now > min(0.95, 1.6 * was) or now < 0.4 * was
    else:
        jumped = now > 2.0 * was or now < 0.25 * was
    return f"{name} went from {was:.3g} to {now:.3g}" if jumped else ""


def _grows(view: RunView, step: int, name: str) -> bool:
    series = view.series(name)
    if series is None:
        return False
    old, new = series.before(step).finite().values[-5:], series.since(step).finite().values
    return len(old) > 0 and len(new) > 0 and median(new) > max(0.1, 5 * median(old))


def _spike(view: RunView, step: int) -> str:
    """A gradient just before the drop that stands out from those before it."""
    grads = view.series("grad_norm")
    old = grads.before(step).finite().values if grads is not None else np.zeros(0)
    if len(old) < 3:
        return ""
    near, usual = float(old[-2:].max()), median(old[:-2])
    # Little is known of what is usual after a few records: there it must stand out far.
    least = (5 if len(old) >= 5 else 20) * usual
    return f"the gradient was {near:.3g} just before ({usual:.3g} else)" if near > least else ""


RULE = Rule(
    code="POL013",
    name="policy-collapse",
    family=Family.POLICY,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward", "completions/clipped_ratio|completions/mean_length|entropy"),
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "GEN001", "GEN003", "GEN004", "POL001", "POL002", "POL004", "POL011", "POL015", "RWD001",
        "RWD002", "RWD006", "RWD015",
    ),
)  # fmt: skip
