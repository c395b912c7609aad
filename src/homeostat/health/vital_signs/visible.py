"""Count the vital signs that a log shows, and name the settings that would show the rest.

"No illness" means little if little is logged. So the answer states how many vital signs of a run of
this kind could be judged, and which settings of the framework log more of them. A setting is named
only if the framework's own sources have it (frameworks/telling.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.health.finding import Fix
from homeostat.health.frameworks import UNKNOWN
from homeostat.health.frameworks.telling import told
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView

# Sign -> metrics that show it. A prefix ends in "/". A name in brackets is not a metric.
_ALL: dict[str, tuple[str, ...]] = {
    "loss": ("train/loss", "train/policy_loss"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "evaluation": ("eval/",),
    "time of a step": ("time/step", "time/train", "time/update"),
    "throughput": ("throughput/", "engine/effective_tokens_per_s"),
    "device memory": ("memory/max_alloc", "memory/max_reserved", "memory/max_active"),
    "tokens seen": ("num_tokens", "throughput/tokens_per_s"),
    "planned steps": ("[total]",),
    "console text": ("[log]",),
    "settings": ("[settings]",),
}
_SFT: dict[str, tuple[str, ...]] = {
    "token accuracy": ("train/token_accuracy",),
    "entropy": ("entropy",),
    "skipped steps": ("train/skipped_steps", "train/skipped_since_record"),
    "weights moved": ("update/", "probe/trained_unchanged"),
}
_PREFERENCE: dict[str, tuple[str, ...]] = {
    "margin": ("preference/margin",),
    "accuracy": ("preference/accuracy", "reward_model/accuracy"),
    "reward of chosen answers": ("preference/chosen_reward",),
    "reward of rejected answers": ("preference/rejected_reward",),
    "log-prob of chosen answers": ("preference/chosen_logp",),
    "log-prob of rejected answers": ("preference/rejected_logp",),
}
_RL: dict[str, tuple[str, ...]] = {
    "reward": ("reward",),
    "spread of rewards in a group": ("reward_std", "reward/std"),
    "reward of each function": ("rewards/",),
    "groups without a difference": ("frac_reward_zero_std", "zero_std_groups/"),
    "largest and smallest reward": ("reward/max", "reward/min"),
    "advantages": ("advantages/",),
    "KL to the reference": ("kl", "kl/", "preference/kl"),
    "entropy": ("entropy", "entropy/"),
    "clipped share": ("clip_ratio/",),
    "policy ratio": ("policy/ratio_mean", "policy/ratio_max", "probe/first_ratio_off"),
    "step of the policy": ("policy/update_kl",),
    "length of answers": ("completions/mean_length", "completions/median_length"),
    "longest answer": ("completions/max_length",),
    "answers cut at the limit": ("completions/clipped_ratio",),
    "length of answers that ended": ("completions/mean_terminated_length",
                                     "completions/terminated_share"),
    "length of prompts": ("prompts/",),
    "engine against trainer": ("sampling/sampling_logp_difference/", "sampling/prob_difference/",
                               "sampling/mult_prob_error", "sampling/log_ppl_difference",
                               "sampling/k1"),
    "importance weights": ("sampling/importance_sampling_ratio/", "sampling/sequence_ratio/"),
    "age of samples": ("stale/",),
    "time of sampling": ("time/generate", "time/rollout", "time/generation"),
    "time of rewards": ("time/reward", "time/score"),
    "time of weight updates": ("sync/seconds", "time/sync", "time/update_weights"),
    "engine's load": ("engine/",),
    "different answers": ("completions/distinct_share", "completions/repetition_share"),
    "answers as text": ("[samples]",),
}  # fmt: skip
_CRITIC: dict[str, tuple[str, ...]] = {
    "value model": ("critic/explained_variance", "critic/loss"),
    "returns": ("returns/", "critic/return_mean"),
}
# Signs, and the setting that logs them. `why` is what the log shows then.
_FLAGS: tuple[tuple[tuple[str, ...], Fix], ...] = (
    (
        ("evaluation",),
        Fix(
            "eval.interval_steps",
            "50",
            "evaluation on held-out rows",
            theirs={"verl": "trainer.test_freq=10", "nemo_rl": "grpo.val_period=10",
                    "slime": "--eval-interval=10", "miles": "--eval-interval=10",
                    "skyrl": "trainer.eval_interval=10", "areal": "evaluator.freq_steps=10",
                    "prime_rl": "orchestrator.eval.interval=10",
                    "chatlearn": "runtime_args.eval_episode_interval=1"},
        ),
    ),
    (
        ("answers as text",),
        Fix(
            "observe.completions.max_per_step",
            "8",
            "answers as text",
            theirs={"trl": "log_completions=true", "axolotl": "trl.log_completions=true",
                    "ms_swift": "--log_completions=true", "open_r1": "log_completions=true",
                    "unsloth": "log_completions=true"},
        ),
    ),
    (
        ("engine against trainer", "importance weights"),
        Fix(
            "observe.verify_logprobs",
            "",
            "engine against trainer",
            theirs={"verl": "actor_rollout_ref.rollout.calculate_log_probs=true"},
        ),
    ),
    (
        ("[metrics]",),
        Fix(
            "",
            "",
            "every metric as a number",
            theirs={"verl": "trainer.logger=['console','tensorboard']",
                    "transformers": "report_to=tensorboard"},
        ),
    ),
)  # fmt: skip
_EVERY_STEP = Fix("observe.log_interval", "1", "a record at every step")
# With fewer records than this, a record at every step is recommended.
_MIN_RECORDS = 20


@dataclass(frozen=True, slots=True)
class Visible:
    """The vital signs that the log shows, those that it lacks, and settings that would log more.

    `flags` are (setting, value, what it shows).
    """

    shown: tuple[str, ...]
    hidden: tuple[str, ...]
    flags: tuple[tuple[str, str, str], ...]

    @property
    def words(self) -> str:
        """Return how much could be judged, in one sentence."""
        total = len(self.shown) + len(self.hidden)
        return f"{len(self.shown)} of {total} vital signs are logged"


def signs_of(view: RunView) -> dict[str, tuple[str, ...]]:
    """Return sign -> metrics that show it, for a run of this kind."""
    signs = dict(_ALL)
    if view.kind is Kind.RL:
        signs |= _RL
        if any(name.startswith(("critic/", "returns/")) for name in view.metrics):
            signs |= _CRITIC
    elif view.kind in (Kind.PREFERENCE, Kind.REWARD_MODEL):
        signs |= _PREFERENCE
    else:
        signs |= _SFT
    return signs


def visible_signs(view: RunView) -> Visible:
    """Return which vital signs the log shows, and which settings would show the others."""
    signs = signs_of(view)
    shown = tuple(name for name, by in signs.items() if any(_is_there(one, view) for one in by))
    hidden = tuple(name for name in signs if name not in shown)
    return Visible(shown, hidden, tuple(_flags(view, hidden)))


def _is_there(name: str, view: RunView) -> bool:
    match name:
        case "[total]":
            return view.total_steps is not None or view.number("trainer.max_steps") is not None
        case "[log]":
            return bool(view.log)
        case "[settings]":
            return bool(view.settings)
        case "[samples]":
            return bool(view.samples)
    if name.endswith("/"):
        return any(one.startswith(name) for one in view.metrics)
    return name in view.metrics


def _flags(view: RunView, hidden: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    if view.framework is UNKNOWN:
        return
    if _is_sparse(view):
        yield from _named(_EVERY_STEP, view)
    for signs, fix in _FLAGS:
        lacking = not view.metrics if signs == ("[metrics]",) else any(s in hidden for s in signs)
        if lacking:
            yield from _named(fix, view)


def _named(fix: Fix, view: RunView) -> Iterator[tuple[str, str, str]]:
    here = told(fix, view.framework)
    if here.setting:
        yield here.setting, here.value, fix.why


def _is_sparse(view: RunView) -> bool:
    """Return whether the log has few records, and not one for every step."""
    longest = max(view.metrics.values(), key=len, default=None)
    if longest is None or not 2 <= len(longest) < _MIN_RECORDS:
        return False
    return median(np.diff(longest.steps)) > 1.0
