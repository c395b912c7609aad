"""What can be done about an illness, as data: nothing here touches a run.

A remedy is an action (send the weights again, go back to a checkpoint) or an edit of one setting,
as a function of its present value. Its grade says whether it may change how the run learns, its
window how many steps it has to show an effect, its metric what must get better. A run tries one
remedy at a time, takes back what did not help, and writes down both (run/healing.py).

Illnesses are looked up by the name of a finding's first cause and by its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from homeostat.health.finding import Finding, Grade, Level

# A metric that changed by less than this share is no better than before.
MIN_GAIN = 0.1
# Findings whose value is the learning rate itself, or grows with it.
PROPORTIONAL = frozenset({"lr-too-high", "update-too-large"})


class Action(StrEnum):
    """What a run can do besides changing a setting."""

    REPUBLISH = "republish_weights"
    LOWER_TOKEN_BUDGET = "lower_token_budget"
    PRUNE_CHECKPOINTS = "prune_checkpoints"
    ROLL_BACK = "roll_back"
    # What guards of the run do by themselves, at once.
    RETRY_SMALLER = "retry_smaller"
    SKIP_STEP = "skip_step"
    RESTART_ENGINE = "restart_engine"
    RESTART_REWARD_WORKER = "restart_reward_worker"


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """A new value of one key, as a function of the old one and of how many times over its limit
    the finding is (1 where that is not known). None where there is nothing left to change."""

    path: str
    change: Callable[[Any, float], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """An action, an edit, or going back with an edit. `most`: times that it may be tried."""

    name: str
    grade: Grade
    metric: str
    better: Literal["lower", "higher"]
    window: int
    action: Action | None = None
    edit: ConfigEdit | None = None
    most: int = 1


def is_better(before: float | None, after: float | None, *, better: str) -> bool:
    """Whether a metric got better by more than chance would do. One that is not known did not."""
    if before is None or after is None:
        return False
    gain = before - after if better == "lower" else after - before
    return gain > MIN_GAIN * abs(before)


def times_over(finding: Finding) -> float:
    """How many times over its limit it is, where that is in proportion to the setting at fault."""
    if finding.name not in PROPORTIONAL:
        return 1.0
    value, limit = finding.value, finding.limit
    if value is None or limit is None or not (math.isfinite(value) and value > limit > 0):
        return 1.0
    return value / limit


def _halved(old: Any, _: float) -> Any:
    return old / 2 if old else None


def _scaled_down(old: Any, over: float) -> Any:
    """For what grows in proportion to the value; never by less than half."""
    return old / max(2.0, min(over, 1000.0)) if old else None


def _doubled(old: Any, _: float) -> Any:
    return old * 2 if old else None


def _fewer_updates(old: Any, _: float) -> Any:
    return max(1, old // 2) if old > 1 else None


def _toward_one(old: Any, _: float) -> Any:
    return None if old == 1.0 else (1.0 if abs(old - 1.0) <= 0.1 else round((old + 1.0) / 2, 4))


def _wider(old: Any, _: float) -> Any:
    return round(old * 1.4, 6) if 0 < old < 1 else None


def _masked(old: Any, _: float) -> Any:
    return 0.5 if old is None else None


LR = ConfigEdit("trainer.lr", _halved)
LR_BY_EXCESS = ConfigEdit("trainer.lr", _scaled_down)
CLIP_HIGHER = ConfigEdit("algorithm.clip_high", _wider)
MORE_KL = ConfigEdit("algorithm.kl.coefficient", _doubled)
TEMPERATURE = ConfigEdit("rollout.temperature", _toward_one)
SYNC_OFTENER = ConfigEdit("sync.interval", _fewer_updates)
OFF_POLICY_MASK = ConfigEdit("algorithm.correction.off_policy_mask", _masked)
EDITS = (LR, LR_BY_EXCESS, CLIP_HIGHER, MORE_KL, TEMPERATURE, SYNC_OFTENER, OFF_POLICY_MASK)

MISMATCH = "sampling/sampling_logp_difference/mean"


def _lr(metric: str, better: Literal["lower", "higher"] = "lower") -> Remedy:
    return Remedy(
        name="halve-lr", grade=Grade.UNSAFE, edit=LR, metric=metric, better=better, window=10,
        most=4,
    )  # fmt: skip


def _back(metric: str, better: Literal["lower", "higher"], edit: ConfigEdit | None = LR) -> Remedy:
    return Remedy(
        name="roll-back", grade=Grade.UNSAFE, action=Action.ROLL_BACK, edit=edit, metric=metric,
        better=better, window=10,
    )  # fmt: skip


_REPUBLISH = Remedy(
    name="republish", grade=Grade.SAFE, action=Action.REPUBLISH, metric=MISMATCH, better="lower",
    window=3, most=2,
)  # fmt: skip
_SMALLER_STEPS = Remedy(
    name="lr-to-limit", grade=Grade.UNSAFE, edit=LR_BY_EXCESS, metric="grad_norm",
    better="lower", window=5, most=2,
)  # fmt: skip
_SMALLER = Remedy(
    name="smaller-micro-batches", grade=Grade.SAFE, action=Action.LOWER_TOKEN_BUDGET,
    metric="memory/max_alloc", better="lower", window=5, most=3,
)  # fmt: skip
_KL = Remedy(
    name="more-kl", grade=Grade.UNSAFE, edit=MORE_KL, metric="kl", better="lower", window=10, most=3
)
_COOLER = Remedy(
    name="temperature-toward-1", grade=Grade.UNSAFE, edit=TEMPERATURE,
    metric="completions/clipped_ratio", better="lower", window=15, most=2,
)  # fmt: skip
_WARMER = Remedy(
    name="temperature-toward-1", grade=Grade.UNSAFE, edit=TEMPERATURE, metric="entropy",
    better="higher", window=15, most=2,
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

# Illness -> remedies in the order in which they are tried.
TABLE: Mapping[str, tuple[Remedy, ...]] = {
    "update-too-large": (_back("train/loss", "lower", LR_BY_EXCESS), _SMALLER_STEPS),
    "lr-too-high": (
        _back("train/loss", "lower", LR_BY_EXCESS),
        _SMALLER_STEPS,
        _lr("grad_norm"),
    ),
    "loss-divergence": (_back("train/loss", "lower"), _lr("train/loss")),
    "grad-norm-explosion": (_lr("grad_norm"), _back("grad_norm", "lower")),
    "grad-norm-spikes": (_lr("grad_norm"),),
    "loss-spikes": (_lr("train/loss"),),
    "nan-update-poisoned-weights": (_back("train/skipped_steps", "lower", None),),
    "kl-runaway": (_KL, _lr("kl"), _back("kl", "lower")),
    "policy-collapse": (_back("reward", "higher"),),
    "reward-collapse": (_back("reward", "higher"), _lr("reward", "higher")),
    "entropy-collapse": (_WARMER, _CLIP, _lr("entropy", "higher")),
    "entropy-explosion": (_lr("entropy"), _back("entropy", "lower")),
    "length-explosion-gibberish": (_COOLER, _back("completions/mean_length", "lower")),
    "ppo-ratio-exceeds-threshold": (_lr("policy/ratio_max"),),
    "clip-fraction-high": (_lr("clip_ratio/region_mean"),),
    "too-many-updates-per-rollout": (_lr("clip_ratio/region_mean"),),
    "stale-policy": (_OFTENER, _MASK),
    "engine-logprob-mismatch": (_REPUBLISH,),
    "train-infer-logprob-drift": (_REPUBLISH, _OFTENER, _MASK),
    "engine-weights-differ": (_REPUBLISH,),
    "weights-not-updated": (_REPUBLISH,),
    "garbage-after-weight-sync": (_REPUBLISH,),
    "sleep-wake-weights-lost": (_REPUBLISH,),
    "weight-conversion-wrong": (_REPUBLISH,),
    "lora-not-synced": (_REPUBLISH,),
    "memory-near-limit": (_SMALLER,),
    "oom-retries": (_SMALLER,),
}


def remedies_for(finding: Finding) -> Iterator[Remedy]:
    """What may be tried about a finding, in order; nothing for one that only informs."""
    if finding.level is Level.INFO:
        return
    names = [cause.name for cause in finding.causes[:1]] + [finding.name]
    given: set[tuple[str, str]] = set()
    for name in names:
        for remedy in TABLE.get(name, ()):
            if (remedy.name, remedy.metric) not in given:
                given.add((remedy.name, remedy.metric))
                yield remedy


@dataclass(frozen=True, slots=True)
class OwnGuard:
    """What a guard of the run did, told by its event; `when`: a field with one of some values."""

    action: Action
    cause: str
    path: str = ""
    old: str = ""
    new: str = ""
    when: tuple[str, frozenset[str]] | None = None

    def applies(self, fields: Mapping[str, Any]) -> bool:
        return self.when is None or fields.get(self.when[0]) in self.when[1]

    def described(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the event that tells it as a remedy."""
        return {
            "code": "",
            "cause": f"{self.cause}: {fields.get('error') or fields.get('origin') or ''}".strip(
                ": "
            ),
            "remedy": str(self.action),
            "path": self.path,
            "old": fields.get(self.old),
            "new": fields.get(self.new),
            "grade": str(Grade.SAFE),
            "window": 0,
        }


OWN_GUARDS: Mapping[str, OwnGuard] = {
    "oom_retry": OwnGuard(
        Action.RETRY_SMALLER,
        "memory ran out",
        "trainer.max_tokens_per_device",
        "tokens_before",
        "tokens_now",
    ),
    "step_skipped": OwnGuard(Action.SKIP_STEP, "loss or gradient not finite"),
    "engine_restarted": OwnGuard(Action.RESTART_ENGINE, "the engine's process died"),
    "reward_trouble": OwnGuard(
        Action.RESTART_REWARD_WORKER,
        "a reward worker died or hung",
        when=("failure", frozenset({"worker_died", "timeout"})),
    ),
}
