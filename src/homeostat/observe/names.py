"""The metric catalogue: every name a run may log, its unit, meaning and how it is reduced.

A record of `metrics.jsonl` stands for all steps since the record before it. `reduce` says how the
steps' values become the record's value:

    mean   plain mean over the steps
    rate   mean over the steps weighted by time/step: all tokens over all seconds
    last   the newest value (counters, schedules, gauges)
    sum    total over the steps
    max    the largest
    min    the smallest

A NaN makes what it enters a NaN, and an infinity is never averaged away: nothing is hidden.
A metric with `own_step` belongs to exactly one step, so logging it closes the record there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Reduce(StrEnum):
    MEAN = "mean"
    RATE = "rate"
    LAST = "last"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One line of the catalogue.

    `<i>` in a name stands for a number, `<name>` for a label of ours, `<text>` for a name that a
    user's function chose: printable characters, slashes and spaces among them.
    """

    name: str
    unit: str
    reduce: Reduce
    meaning: str
    own_step: bool = False


_MEAN, _RATE, _LAST, _SUM, _MAX, _MIN = Reduce

CATALOGUE: tuple[MetricInfo, ...] = (
    MetricInfo("train/loss", "nats/token", _MEAN, "Training loss of the update, as normalised."),
    MetricInfo("reward", "", _MEAN, "Mean reward of the sampled completions, as trained on."),
    MetricInfo("reward_std", "", _MEAN, "Deviation of the rewards within a group, mean of groups."),
    MetricInfo(
        "frac_reward_zero_std",
        "share",
        _MEAN,
        "Share of groups whose rewards are all the same, of those with two rewards or more.",
    ),
    MetricInfo("rewards/<name>/mean", "", _MEAN, "Mean value of one reward function."),
    MetricInfo("rewards/<name>/std", "", _MEAN, "Deviation of one reward function's values."),
    MetricInfo("rewards/<name>/logged/<text>", "", _MEAN, "What a function gave to log_metric."),
    MetricInfo("rewards/<name>/failed", "samples", _SUM, "Values that a reward failed to give."),
    MetricInfo(
        "rewards/<name>/failed_share", "share", _MEAN, "Share of the samples it failed to give."
    ),
    MetricInfo("rewards/<name>/none", "samples", _SUM, "Samples that a reward gave None for."),
    MetricInfo("advantages/mean", "", _MEAN, "Mean advantage of the samples."),
    MetricInfo("advantages/std", "", _MEAN, "Deviation of the samples' advantages."),
    MetricInfo("advantages/zero_share", "share", _MEAN, "Share of samples with advantage 0."),
    MetricInfo(
        "entropy",
        "nats/token",
        _MEAN,
        "Entropy of the policy at its completions' tokens; of rows without advantage, which are "
        "not trained, up to 8 of an update stand for all.",
    ),
    MetricInfo("kl", "nats/token", _MEAN, "Estimated KL from the reference model."),
    MetricInfo("kl_coefficient", "", _LAST, "Weight of the KL penalty."),
    MetricInfo("clip_ratio/low_mean", "share", _MEAN, "Tokens whose ratio the lower bound holds."),
    MetricInfo("clip_ratio/high_mean", "share", _MEAN, "Tokens whose ratio the upper bound holds."),
    MetricInfo("clip_ratio/region_mean", "share", _MEAN, "Tokens that either bound holds."),
    MetricInfo("clip_ratio/dual_mean", "share", _MEAN, "Tokens that the dual clip holds."),
    MetricInfo("policy/ratio_mean", "", _MEAN, "Mean ratio of new to old policy."),
    MetricInfo("policy/ratio_max", "", _MAX, "Largest ratio of new to old policy."),
    MetricInfo("policy/ratio_min", "", _MIN, "Smallest ratio of new to old policy."),
    MetricInfo("policy/update_kl", "nats/token", _MEAN, "KL from the policy that sampled."),
    MetricInfo(
        "sampling/sampling_logp_difference/mean",
        "nats",
        _MEAN,
        "Mean distance of the engine's log-probs, as sampled, from the trainer's.",
    ),
    MetricInfo(
        "sampling/sampling_logp_difference/max", "nats", _MAX, "Largest such distance of a token."
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/mean", "", _MEAN, "Mean of trainer over engine."
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/max", "", _MAX, "Largest of trainer over engine."
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/min", "", _MIN, "Smallest of trainer over engine."
    ),
    MetricInfo("sampling/k3", "nats/token", _MEAN, "KL of trainer from engine, estimator k3."),
    MetricInfo(
        "sampling/ess",
        "share",
        _MEAN,
        "Effective sample size of the tokens' ratios: share of the sample they leave.",
    ),
    MetricInfo("sampling/ess_sequence", "share", _MEAN, "The same of whole completions' ratios."),
    MetricInfo("sampling/by_age/<i>/share", "share", _MEAN, "Tokens of a policy i versions old."),
    MetricInfo("sampling/by_age/<i>/logp_difference", "nats", _MEAN, "Mean distance of those."),
    MetricInfo("sampling/by_age/<i>/k3", "nats/token", _MEAN, "KL of those, estimator k3."),
    MetricInfo("sampling/by_age/<i>/ess", "share", _MEAN, "Effective sample size of those."),
    MetricInfo(
        "verify/<name>/error_mean",
        "nats",
        _MEAN,
        "Mean distance from a float64 reference: of the trainer, of the engine as it sampled, "
        "and as it scores.",
    ),
    MetricInfo("verify/<name>/error_max", "nats", _MAX, "Largest such distance."),
    MetricInfo(
        "verify/<name>/share_off", "share", _MAX, "Tokens further off than rounding explains."
    ),
    MetricInfo("stale/steps/mean", "steps", _MEAN, "Mean age of the tokens' policy, in steps."),
    MetricInfo("stale/steps/max", "steps", _MAX, "Largest such age."),
    MetricInfo(
        "stale/updates/mean",
        "updates",
        _MEAN,
        "Updates due between the weights that sampled a token and those it is trained on.",
    ),
    MetricInfo("stale/updates/max", "updates", _MAX, "Most such updates."),
    MetricInfo("correction/factor_mean", "", _MEAN, "Mean of what multiplies the surrogate."),
    MetricInfo("correction/tokens/truncated", "share", _MEAN, "Tokens whose weight is a bound."),
    MetricInfo("correction/tokens/masked", "share", _MEAN, "Tokens whose weight is 0."),
    MetricInfo("correction/tokens/rejected", "share", _MEAN, "Tokens that reject leaves out."),
    MetricInfo("correction/tokens/vetoed", "share", _MEAN, "Tokens that the veto leaves out."),
    MetricInfo(
        "correction/tokens/off_policy", "share", _MEAN, "Tokens off_policy_mask leaves out."
    ),
    MetricInfo("correction/sequences/<name>", "share", _MEAN, "Completions with such a token."),
    MetricInfo("completions/mean_length", "tokens", _MEAN, "Mean length of the completions."),
    MetricInfo("completions/min_length", "tokens", _MIN, "Shortest completion."),
    MetricInfo("completions/max_length", "tokens", _MAX, "Longest completion."),
    MetricInfo("completions/clipped_ratio", "share", _MEAN, "Share of completions that were cut."),
    MetricInfo(
        "completions/mean_terminated_length", "tokens", _MEAN, "Mean length of those not cut."
    ),
    MetricInfo("completions/min_terminated_length", "tokens", _MIN, "Shortest of those not cut."),
    MetricInfo("completions/max_terminated_length", "tokens", _MAX, "Longest of those not cut."),
    MetricInfo("completions/distinct_share", "share", _MEAN, "Share of texts that are distinct."),
    MetricInfo("rollout/rounds", "rounds", _SUM, "Rounds of sampling."),
    MetricInfo("rollout/replayed_rounds", "rounds", _SUM, "Rounds taken from the journal."),
    MetricInfo("rollout/groups_passed_over", "groups", _SUM, "Groups that had nothing to teach."),
    MetricInfo("rollout/untrained_share", "share", _MEAN, "Share of samples that is not trained."),
    MetricInfo(
        "rollout/failed_share", "share", _MEAN, "Share not trained because a reward failed on it."
    ),
    MetricInfo("rollout/overlong_penalty", "", _MEAN, "Mean penalty for length."),
    MetricInfo("train/updates_without_signal", "updates", _SUM, "Updates left out: no advantage."),
    MetricInfo("replay/logp_difference/mean", "nats", _MEAN, "Engine now from engine then."),
    MetricInfo("replay/logp_difference/max", "nats", _MAX, "Largest such distance of a token."),
    MetricInfo("eval/reward", "", _LAST, "Mean reward on the held-out prompts.", own_step=True),
    MetricInfo(
        "eval/reward_coverage", "share", _LAST, "Share of the samples that no reward failed on."
    ),
    MetricInfo("eval/rewards/<name>/mean", "", _LAST, "The same for one reward function."),
    MetricInfo("eval/rewards/<name>/failed", "samples", _LAST, "Samples that it failed on."),
    MetricInfo("eval/pass@<i>", "share", _LAST, "Prompts of which one of i samples is solved."),
    MetricInfo("eval/pass@<i>/<name>", "share", _LAST, "The same, where this reward decides."),
    MetricInfo("eval/policy_version", "", _LAST, "The step whose weights were evaluated (RL)."),
    MetricInfo("eval/completions/mean_length", "tokens", _LAST, "Mean length on held-out prompts."),
    MetricInfo("eval/completions/clipped_ratio", "share", _LAST, "Share of those that were cut."),
    MetricInfo("time/generate", "s", _MEAN, "Time until the last completion of a step."),
    MetricInfo(
        "time/reward",
        "s",
        _MEAN,
        "Time that a step waited for rewards after its last completion; they start before it.",
    ),
    MetricInfo("time/score", "s", _MEAN, "Time for advantages, old and reference log-probs."),
    MetricInfo("time/train", "s", _MEAN, "Time spent on the updates of a step."),
    MetricInfo("sync/seconds", "s", _MEAN, "Time of a publication of the weights to the engine."),
    MetricInfo("sync/bytes", "bytes", _LAST, "Bytes of the weights that were published."),
    MetricInfo("sync/version", "", _LAST, "The step whose weights were published."),
    MetricInfo("engine/tokens_per_s", "tokens/s", _MEAN, "New tokens sampled per second."),
    MetricInfo("engine/policy_version", "", _LAST, "Version of the weights that sample next."),
    MetricInfo("engine/max_running", "requests", _MAX, "Most requests sampled at one time."),
    MetricInfo("engine/preemptions", "requests", _LAST, "Requests put back for lack of cache."),
    MetricInfo("engine/cache_bytes", "bytes", _LAST, "Memory of cached keys and values."),
    MetricInfo("engine/warmup_s", "seconds", _LAST, "Time spent on CUDA graphs, in all."),
    MetricInfo("train/row_loss_max", "nats/token", _MAX, "Largest mean loss of one row."),
    MetricInfo("train/skipped_steps", "steps", _LAST, "Updates not applied so far (not finite)."),
    MetricInfo("eval/loss", "nats/token", _LAST, "Loss on the held-out rows.", own_step=True),
    MetricInfo("grad_norm", "", _MEAN, "Norm of the whole gradient before clipping."),
    MetricInfo(
        "update/weight_ratio/<name>",
        "",
        _MAX,
        "Norm of an update over the norm of the weights, of a group of layers.",
    ),
    MetricInfo(
        "probe/first_ratio_off",
        "",
        _MAX,
        "Largest distance from 1 of new over old probability before anything was updated.",
    ),
    MetricInfo(
        "probe/round_trip_bad",
        "rows",
        _MAX,
        "Rows whose tokens are not the ones that were sampled.",
    ),
    MetricInfo(
        "probe/mask_difference", "tokens", _MAX, "Tokens with a loss, less those of the update."
    ),
    MetricInfo("probe/trained_unchanged", "tensors", _MAX, "Trained tensors that did not move."),
    MetricInfo("probe/frozen_changed", "tensors", _MAX, "Frozen tensors that moved."),
    MetricInfo("probe/dtype_odd", "tensors", _MAX, "Tensors of another dtype than the model's."),
    MetricInfo(
        "data/rows_without_training", "share", _MEAN, "Share of the rows that has no loss at all."
    ),
    MetricInfo("learning_rate", "", _LAST, "Learning rate that the update used."),
    MetricInfo("epoch", "epochs", _LAST, "Passes over the data so far, with the part of this one."),
    MetricInfo("num_tokens", "tokens", _LAST, "Tokens processed so far, trained and context."),
    MetricInfo("time/step", "s", _MEAN, "Time of one update, waiting for data included."),
    MetricInfo("time/data_wait", "s", _MEAN, "Time an update waited for its rows."),
    MetricInfo("time/eval", "s", _SUM, "Time spent evaluating."),
    MetricInfo("time/checkpoint", "s", _SUM, "Time spent saving checkpoints."),
    MetricInfo("time/health", "s", _MEAN, "Time spent looking for illnesses, a step."),
    MetricInfo("throughput/tokens_per_s", "tokens/s", _RATE, "Tokens processed per second."),
    MetricInfo(
        "throughput/trained_tokens_per_s", "tokens/s", _RATE, "Tokens with a loss per second."
    ),
    MetricInfo("data/packing_fill", "share", _MEAN, "Share of the micro-batches that is filled."),
    MetricInfo("data/trained_share", "share", _MEAN, "Share of the tokens that has a loss."),
    MetricInfo("data/rows", "rows", _SUM, "Rows that were processed."),
    MetricInfo("data/trained_rows", "rows", _SUM, "Rows that the updates were computed on (RL)."),
    MetricInfo("data/micro_batches", "batches", _MEAN, "Micro-batches of one update."),
    MetricInfo(
        "memory/max_alloc",
        "bytes",
        _MAX,
        "Peak of device memory held by tensors; on a CPU, of the process.",
    ),
    MetricInfo("memory/max_reserved", "bytes", _MAX, "Peak of device memory held by torch."),
    MetricInfo("memory/host_rss", "bytes", _LAST, "Host memory held by this process."),
    MetricInfo("gpu/<i>/memory_used", "bytes", _LAST, "Memory in use on device i, all processes."),
    MetricInfo("gpu/<i>/utilization", "share", _MEAN, "Share of time that device i was busy."),
    MetricInfo("gpu/<i>/temperature", "C", _MAX, "Temperature of device i."),
)

_HOLES = {
    "<i>": r"(?:0|[1-9]\d*)",
    "<name>": r"[A-Za-z0-9_.-]+",
    # No control characters, no line or bidi controls, no halves of surrogate pairs.
    "<text>": r"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,100}",
}
_EXACT = {info.name: info for info in CATALOGUE if "<" not in info.name}
_PATTERNS = {
    re.compile(re.sub("|".join(_HOLES), lambda hole: _HOLES[hole.group()], info.name)): info
    for info in CATALOGUE
    if "<" in info.name
}


def describe(name: str) -> MetricInfo | None:
    """The catalogue's line for a metric name, or None when it has none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((info for pattern, info in _PATTERNS.items() if pattern.fullmatch(name)), None)
