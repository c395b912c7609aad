"""The remedies for illnesses, as data: nothing in this file changes a run.

A remedy is an action (send the weights again, go back to a checkpoint) or an edit of one setting,
as a function of its current value. Its grade says whether it may change how the run learns, its
window how many steps it has to show an effect, and its metric what must improve. A run tries one
remedy at a time, reverts those that did not help, and records both (run/healing/healer.py).

Remedies are found by the name of a finding's first cause and by the finding's own name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from homeostat.health.finding import Finding, Grade, Level
from homeostat.health.view import Series

# A metric that changed by less than this share counts as unchanged.
MIN_GAIN = 0.1
# The size of one update, relative to the weights, that is acceptable: in fine-tuning, and for
# weights that were initialised at random.
GENTLE_UPDATE, GENTLE_FRESH_UPDATE = 0.01, 0.03
# Number of updates before the first symptom that may have caused the illness.
STEPS_BEFORE = 3
# A penalty of this size matters beside advantages, which are about 1.
HOLDING_PENALTY = 0.3
# The highest KL coefficient that is in common use.
USUAL_PENALTY = 0.1
# Low precision is started this many steps after the step at which it failed.
STEPS_LATER = 10
# Maximum number of decoder layers at each end of the model that a remedy keeps in bf16.
MAX_KEPT_LAYERS = 2


class Action(StrEnum):
    """Something that a run can do other than change a setting."""

    REPUBLISH = "republish_weights"
    LOWER_TOKEN_BUDGET = "lower_token_budget"
    PRUNE_CHECKPOINTS = "prune_checkpoints"
    ROLL_BACK = "roll_back"
    BACK_TO_BF16 = "back_to_bf16"
    # Actions that a run's guards take by themselves, at once.
    RETRY_SMALLER = "retry_smaller"
    SKIP_STEP = "skip_step"
    RESTART_ENGINE = "restart_engine"
    RESTART_TRAINER = "restart_trainer"
    RESTART_REWARD_WORKER = "restart_reward_worker"


@dataclass(frozen=True, slots=True)
class Signs:
    """The input of an edit: the finding, and the newest records of the run."""

    finding: Finding
    metrics: Mapping[str, Series]
    # True if the weights were initialised at random when the run began.
    is_fresh: bool = False


def _unknown_excess(_: Any, __: Signs) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """A new value of one key, as a function of the old value and of the excess.

    The excess is the factor by which the value is too large (or too small); 1 if that is not known.
    The new value is None if nothing is left to change.
    """

    path: str
    change: Callable[[Any, float], Any]
    excess: Callable[[Any, Signs], float] = _unknown_excess

    def new_value(self, old: Any, signs: Signs) -> Any:
        return self.change(old, self.excess(old, signs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """An action, an edit, or a return to a checkpoint with an edit.

    `most` is how many times it may be tried. `doses` is how many times in a row it may be tried
    without effect, each on top of the one before, until all of them are reverted.
    """

    name: str
    grade: Grade
    metric: str
    better: Literal["lower", "higher"]
    window: int
    action: Action | None = None
    edit: ConfigEdit | None = None
    most: int = 1
    doses: int = 1


def is_better(before: float | None, after: float | None, *, better: str) -> bool:
    """Return whether a metric improved by more than MIN_GAIN of its value. None did not improve."""
    if before is None or after is None:
        return False
    gain = before - after if better == "lower" else after - before
    return gain > MIN_GAIN * abs(before)


def times_over(_: Any, signs: Signs) -> float:
    """Return the finding's value divided by its limit; 1 if that is unknown or below 1."""
    value, limit = signs.finding.value, signs.finding.limit
    if value is None or limit is None or not (math.isfinite(value) and value > limit > 0):
        return 1.0
    return value / limit


def rate_excess(lr: Any, signs: Signs) -> float:
    """Return the factor by which a learning rate is too high, from how far it moved the weights.

    Updates are measured relative to the weights after the update, so a huge one measures as 1. It
    is converted to be relative to the weights before, as if it were at right angles to them.
    """
    rates = signs.metrics.get("learning_rate")
    if not lr or rates is None:
        return 1.0
    first = signs.finding.first_step
    rate_at = {int(s): v for s, v in zip(rates.steps, rates.values, strict=True) if v > 0}
    moved = 0.0
    for name, ratio in signs.metrics.items():
        if not name.startswith("update/weight_ratio/"):
            continue
        recent = ratio if first is None else ratio.since(first - STEPS_BEFORE)
        for step, value in zip(recent.steps, recent.values, strict=True):
            if math.isfinite(value) and int(step) in rate_at:
                share = min(float(value), 0.9999)
                moved = max(moved, share / math.sqrt(1 - share**2) / rate_at[int(step)])
    return float(lr * moved / (GENTLE_FRESH_UPDATE if signs.is_fresh else GENTLE_UPDATE))


def _penalty_excess(coefficient: Any, signs: Signs) -> float:
    """Return the factor by which the penalty is too small to hold a policy at this distance."""
    kl = signs.metrics.get("kl")
    far = kl.finite() if kl is not None else None
    if not coefficient or far is None or not len(far) or far.latest <= 0:
        return 1.0
    return HOLDING_PENALTY / (coefficient * far.latest)


def _halved(old: Any, _: float) -> Any:
    return old / 2 if old else None


def _lower(least: float) -> Callable[[Any, float], Any]:
    """Return an edit that divides by the excess, but at least by `least`."""

    def lower(old: Any, over: float) -> Any:
        return old / min(max(least, over), 1e4) if old else None

    return lower


def _raised(old: Any, over: float) -> Any:
    """Multiply by the missing factor, up to the usual value; beyond that, raise in small steps."""
    return min(old * max(3.0, over), max(USUAL_PENALTY, 3.0 * old)) if old else None


def _fewer(old: Any, over: float) -> Any:
    """Divide a count by its excess, and at least by two."""
    return max(1, int(old / max(2.0, over))) if old is not None and old > 1 else None


def _up_to_one(old: Any, _: float) -> Any:
    """Move half-way to 1. A nearly greedy value was hardly intended, so it becomes 1."""
    if old >= 1.0:
        return None
    return 1.0 if old < 0.3 or old >= 0.9 else round((old + 1.0) / 2, 4)


def _down_to_one(old: Any, _: float) -> Any:
    return None if old <= 1.0 else (1.0 if old <= 1.1 else round((old + 1.0) / 2, 4))


def _wider(old: Any, _: float) -> Any:
    return round(old * 1.4, 6) if old is not None and 0 < old < 1 else None


def _masked(old: Any, _: float) -> Any:
    return 0.5 if old is None else None


def _seen_last(_: Any, signs: Signs) -> float:
    """Return the last step at which a finding was seen."""
    return float(signs.finding.last_step or 0)


def _later(old: Any, seen: float) -> Any:
    """Return a first step that is twice as late, and well after the given step."""
    return max(2 * old, int(seen) + STEPS_LATER) if old is not None else None


def _one_more(old: Any, _: float) -> Any:
    return old + 1 if old is not None and old < MAX_KEPT_LAYERS else None


LR = ConfigEdit("trainer.lr", _halved)
LR_BY_EXCESS = ConfigEdit("trainer.lr", _lower(2.0), rate_excess)
# After the weights were destroyed, half the rate is hardly low enough.
LR_FAR_LOWER = ConfigEdit("trainer.lr", _lower(10.0), rate_excess)
FEWER_UPDATES = ConfigEdit("trainer.updates_per_step", _fewer)
CLIP_HIGHER = ConfigEdit("algorithm.clip_high", _wider)
MORE_KL = ConfigEdit("algorithm.kl.coefficient", _raised, _penalty_excess)
WARMER = ConfigEdit("rollout.temperature", _up_to_one)
COOLER = ConfigEdit("rollout.temperature", _down_to_one)
SYNC_OFTENER = ConfigEdit("sync.interval", _fewer, times_over)
OFF_POLICY_MASK = ConfigEdit("algorithm.correction.off_policy_mask", _masked)
FP8_LATER = ConfigEdit("trainer.fp8.start_step", _later, _seen_last)
INT4_LATER = ConfigEdit("trainer.int4.start_step", _later, _seen_last)
KEEP_LAST = ConfigEdit("trainer.fp8.skip_last", _one_more)
KEEP_FIRST = ConfigEdit("trainer.fp8.skip_first", _one_more)
EDITS = (FP8_LATER, INT4_LATER, KEEP_LAST, KEEP_FIRST,
         LR, LR_BY_EXCESS, LR_FAR_LOWER, FEWER_UPDATES, CLIP_HIGHER, MORE_KL, WARMER, COOLER,
         SYNC_OFTENER, OFF_POLICY_MASK)  # fmt: skip

MISMATCH = "sampling/sampling_logp_difference/mean"


def _lr(metric: str, better: Literal["lower", "higher"] = "lower") -> Remedy:
    return Remedy(
        name="halve-lr", grade=Grade.UNSAFE, edit=LR, metric=metric, better=better, window=10,
        most=4,
    )  # fmt: skip


def _back(
    metric: str, better: Literal["lower", "higher"], edit: ConfigEdit | None = LR_FAR_LOWER
) -> Remedy:
    return Remedy(
        name="roll-back", grade=Grade.UNSAFE, action=Action.ROLL_BACK, edit=edit, metric=metric,
        better=better, window=10, most=3, doses=3,
    )  # fmt: skip


_REPUBLISH = Remedy(
    name="republish", grade=Grade.SAFE, action=Action.REPUBLISH, metric=MISMATCH, better="lower",
    window=3, most=2,
)  # fmt: skip
_SMALLER_STEPS = Remedy(
    name="lr-to-limit", grade=Grade.UNSAFE, edit=LR_BY_EXCESS, metric="grad_norm",
    better="lower", window=5, most=3, doses=2,
)  # fmt: skip
_SMALLER = Remedy(
    name="smaller-micro-batches", grade=Grade.SAFE, action=Action.LOWER_TOKEN_BUDGET,
    metric="memory/max_alloc", better="lower", window=5, most=3,
)  # fmt: skip
_KL = Remedy(
    name="more-kl", grade=Grade.UNSAFE, edit=MORE_KL, metric="kl", better="lower", window=8,
    most=4, doses=3,
)  # fmt: skip
_COOLER = Remedy(
    name="temperature-toward-1", grade=Grade.UNSAFE, edit=COOLER,
    metric="completions/clipped_ratio", better="lower", window=15, most=2,
)  # fmt: skip
_WARMER = Remedy(
    name="temperature-toward-1", grade=Grade.UNSAFE, edit=WARMER, metric="entropy",
    better="higher", window=15, most=2,
)  # fmt: skip
_VARIED = Remedy(
    name="temperature-toward-1", grade=Grade.UNSAFE, edit=WARMER,
    metric="completions/distinct_share", better="higher", window=6, most=2,
)  # fmt: skip
_FEWER_UPDATES = Remedy(
    name="fewer-updates", grade=Grade.UNSAFE, edit=FEWER_UPDATES, metric="policy/ratio_max",
    better="lower", window=6, most=3, doses=3,
)  # fmt: skip
_CLIP = Remedy(
    name="clip-higher", grade=Grade.UNSAFE, edit=CLIP_HIGHER, metric="entropy", better="higher",
    window=20,
)  # fmt: skip
_OFTENER = Remedy(
    name="publish-oftener", grade=Grade.UNSAFE, edit=SYNC_OFTENER, metric="stale/updates/mean",
    better="lower", window=10, most=4,
)  # fmt: skip
_MASK = Remedy(
    name="off-policy-mask", grade=Grade.UNSAFE, edit=OFF_POLICY_MASK, metric="grad_norm",
    better="lower", window=20,
)  # fmt: skip


def _kept(end: str, edit: ConfigEdit, metric: str, better: Literal["lower", "higher"]) -> Remedy:
    return Remedy(
        name=f"keep-{end}-layer-in-bf16", grade=Grade.UNSAFE, edit=edit, metric=metric,
        better=better, window=10, most=2,
    )  # fmt: skip


def _bf16(metric: str, better: Literal["lower", "higher"] = "lower") -> Remedy:
    return Remedy(
        name="back-to-bf16", grade=Grade.UNSAFE, action=Action.BACK_TO_BF16, metric=metric,
        better=better, window=10,
    )  # fmt: skip


def _finer(metric: str, better: Literal["lower", "higher"] = "lower") -> tuple[Remedy, ...]:
    """Return the remedies to try if some layers need a higher precision."""
    return (
        _kept("last", KEEP_LAST, metric, better),
        _kept("first", KEEP_FIRST, metric, better),
        _bf16(metric, better),
    )


def _later_switch(edit: ConfigEdit) -> Remedy:
    return Remedy(
        name=f"later-switch-{edit.path.split('.')[1]}", grade=Grade.UNSAFE,
        action=Action.ROLL_BACK, edit=edit, metric="train/loss", better="lower", window=10,
    )  # fmt: skip


# Illness -> remedies in the order in which they are tried.
TABLE: Mapping[str, tuple[Remedy, ...]] = {
    "update-too-large": (_back("train/loss", "lower"), _SMALLER_STEPS),
    "lr-too-high": (_back("train/loss", "lower"), _SMALLER_STEPS, _lr("grad_norm")),
    "loss-divergence": (_back("train/loss", "lower"), _lr("train/loss")),
    "grad-norm-explosion": (_SMALLER_STEPS, _back("grad_norm", "lower")),
    "no-gradient-clipping": (_back("train/loss", "lower"), _SMALLER_STEPS),
    "grad-norm-spikes": (_lr("grad_norm"),),
    "loss-spikes": (_lr("train/loss"),),
    "nan-update-poisoned-weights": (_back("train/skipped_steps", "lower", None),),
    "kl-runaway": (_KL, _SMALLER_STEPS, _back("kl", "lower")),
    "policy-collapse": (_back("reward", "higher"),),
    "reward-collapse": (_back("reward", "higher"), _lr("reward", "higher")),
    "entropy-collapse": (_WARMER, _CLIP, _lr("entropy", "higher")),
    "entropy-explosion": (_lr("entropy"), _back("entropy", "lower")),
    "greedy-sampling": (_VARIED,),
    "mode-collapse": (_VARIED,),
    "length-explosion-gibberish": (_COOLER, _back("completions/mean_length", "lower")),
    "ppo-ratio-exceeds-threshold": (_FEWER_UPDATES, _lr("policy/ratio_max")),
    "clip-fraction-high": (_lr("clip_ratio/region_mean"),),
    "too-many-updates-per-rollout": (_FEWER_UPDATES, _lr("clip_ratio/region_mean")),
    "stale-policy": (_OFTENER, _MASK),
    "sync-interval-without-correction": (_OFTENER,),
    "engine-logprob-mismatch": (_REPUBLISH,),
    "train-infer-logprob-drift": (_REPUBLISH, _OFTENER, _MASK),
    "engine-weights-differ": (_REPUBLISH,),
    "weights-not-updated": (_REPUBLISH,),
    "garbage-after-weight-sync": (_REPUBLISH,),
    "sleep-wake-weights-lost": (_REPUBLISH,),
    "weight-conversion-wrong": (_REPUBLISH,),
    "lora-not-synced": (_REPUBLISH,),
    "experts-permuted": (_REPUBLISH,),
    "memory-near-limit": (_SMALLER,),
    "collapse-after-switch": (
        _later_switch(FP8_LATER),
        _later_switch(INT4_LATER),
        _bf16("train/loss"),
    ),
    "fp8-zero-scale": (_bf16("train/skipped_steps"),),
    "fp8-saturation": (_bf16("train/loss"),),
    "quantisation-underflow": _finer("train/loss"),
    "quantised-gradient-off": _finer("train/loss"),
    "quantised-evaluation-gap": _finer("eval/quantised_gap"),
}


# Illnesses whose own remedy is tried before those of their likely causes: once weights are lost, no
# setting brings them back.
OWN_FIRST = frozenset({"kl-runaway", "stale-policy", "policy-collapse", "loss-divergence"})


def remedies_for(finding: Finding) -> Iterator[Remedy]:
    """Yield the remedies to try for a finding, in order; nothing for one that only informs."""
    if finding.level is Level.INFO:
        return
    names = [cause.name for cause in finding.causes[:1]] + [finding.name]
    if finding.name in OWN_FIRST:
        names.reverse()
    given: set[tuple[str, str]] = set()
    for name in names:
        for remedy in TABLE.get(name, ()):
            if (remedy.name, remedy.metric) not in given:
                given.add((remedy.name, remedy.metric))
                yield remedy
