"""The metric catalogue: every metric name with its unit, its meaning and how it is reduced.

A record of `metrics.jsonl` covers all steps since the record before it. `reduce` says how the
values of these steps are combined into the value of the record:

    mean   plain mean over the steps
    rate   mean over the steps weighted by time/step: all tokens over all seconds
    last   the newest value (counters, schedules, gauges)
    sum    total over the steps
    max    the largest value
    min    the smallest value

If one value is NaN the result is NaN, and an infinity is never averaged away, so no bad value is
hidden. A metric with `own_step` belongs to exactly one step, so logging it closes the record there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Reduce(StrEnum):
    """The reduction that combines the values of several steps into one record."""

    MEAN = "mean"
    RATE = "rate"
    LAST = "last"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One entry of the catalogue.

    In a name `<i>` stands for a number, `<name>` for a label from the recipe or from homeostat, and
    `<text>` for a name that a user's function chose: printable characters, including slashes and
    spaces.
    """

    name: str
    unit: str
    reduce: Reduce
    meaning: str
    own_step: bool = False


_MEAN, _RATE, _LAST, _SUM, _MAX, _MIN = Reduce

CATALOGUE: tuple[MetricInfo, ...] = (
    MetricInfo(
        "train/loss",
        "nats/token",
        _MEAN,
        "Training loss of the update, normalised as the algorithm says.",
    ),
    MetricInfo("reward", "", _MEAN, "Mean reward of the sampled completions, as used in training."),
    MetricInfo(
        "reward_std",
        "",
        _MEAN,
        "Standard deviation of the rewards within a group, averaged over groups.",
    ),
    MetricInfo(
        "frac_reward_zero_std",
        "share",
        _MEAN,
        "Share of groups in which all rewards are equal, among groups with two or more rewards.",
    ),
    MetricInfo("rewards/<name>/mean", "", _MEAN, "Mean value of one reward function."),
    MetricInfo(
        "rewards/<name>/std", "", _MEAN, "Standard deviation of one reward function's values."
    ),
    MetricInfo(
        "rewards/<name>/logged/<text>",
        "",
        _MEAN,
        "Mean of the values that a function passed to log_metric.",
    ),
    MetricInfo(
        "rewards/<name>/failed", "samples", _SUM, "Number of samples on which the reward failed."
    ),
    MetricInfo(
        "rewards/<name>/failed_share",
        "share",
        _MEAN,
        "Share of samples on which the reward failed.",
    ),
    MetricInfo("judge/calls", "calls", _SUM, "Number of requests sent to judges, with retries."),
    MetricInfo(
        "judge/cached", "samples", _SUM, "Number of samples for which a judge's answer was known."
    ),
    MetricInfo("judge/retries", "calls", _SUM, "Number of requests to judges that were repeated."),
    MetricInfo(
        "judge/failed",
        "samples",
        _SUM,
        "Number of samples that a judge gave no score: no answer, or one that cannot be read.",
    ),
    MetricInfo(
        "judge/seconds", "s", _SUM, "Time spent in calls of judges, summed over concurrent calls."
    ),
    MetricInfo(
        "rewards/<name>/none",
        "samples",
        _SUM,
        "Number of samples for which the reward returned None (it does not apply).",
    ),
    MetricInfo("advantages/mean", "", _MEAN, "Mean advantage of the samples."),
    MetricInfo("advantages/std", "", _MEAN, "Standard deviation of the samples' advantages."),
    MetricInfo("advantages/zero_share", "share", _MEAN, "Share of samples with advantage 0."),
    MetricInfo(
        "ebft/alignment",
        "",
        _MEAN,
        "Twice the cosine between the features of a sample and of the truth: from -2 to 2.",
    ),
    MetricInfo(
        "ebft/diversity",
        "",
        _MEAN,
        "Twice the mean product of a sample's features with those of the prompt's other samples: "
        "2 if all are the same, 0 for whitened ones that differ.",
    ),
    MetricInfo(
        "ebft/cfm_loss",
        "",
        _MEAN,
        "Squared distance of the mean features of a prompt's samples from those of the truth, "
        "before whitening: from 0 to 4.",
    ),
    MetricInfo(
        "ebft/ce_loss", "nats/token", _MEAN, "Cross-entropy of the truth (ebft.ce_coefficient)."
    ),
    MetricInfo(
        "entropy",
        "nats/token",
        _MEAN,
        "Entropy of the policy at the tokens of its completions. Rows that are not trained "
        "because their advantage is 0 are represented by up to 8 of them per update.",
    ),
    MetricInfo(
        "kl", "nats/token", _MEAN, "Estimated KL divergence of the policy from the reference model."
    ),
    MetricInfo("kl_coefficient", "", _LAST, "Weight of the KL penalty."),
    MetricInfo(
        "critic/explained_variance",
        "share",
        _MEAN,
        "Share of the variance of what tokens earned that the critic's values explain, before the "
        "step's updates. 0: no more than a constant would. Missing if all earned the same.",
    ),
    MetricInfo("critic/loss", "", _MEAN, "Value loss of the critic's updates."),
    MetricInfo("critic/value_mean", "", _MEAN, "Mean value of the trained tokens."),
    MetricInfo(
        "critic/return_mean", "", _MEAN, "Mean of what the trained tokens earned from there on."
    ),
    MetricInfo("critic/return_std", "", _MEAN, "Standard deviation of what they earned."),
    MetricInfo(
        "critic/clipped_share",
        "share",
        _MEAN,
        "Share of tokens in which the clipped value decides the critic's loss.",
    ),
    MetricInfo("critic/grad_norm", "", _MEAN, "Gradient norm of the critic before clipping."),
    MetricInfo("critic/lr", "", _LAST, "Learning rate of the critic."),
    MetricInfo(
        "clip_ratio/low_mean",
        "share",
        _MEAN,
        "Share of tokens whose ratio is clipped at the lower bound.",
    ),
    MetricInfo(
        "clip_ratio/high_mean",
        "share",
        _MEAN,
        "Share of tokens whose ratio is clipped at the upper bound.",
    ),
    MetricInfo(
        "clip_ratio/region_mean",
        "share",
        _MEAN,
        "Share of tokens whose ratio is clipped at either bound.",
    ),
    MetricInfo(
        "clip_ratio/dual_mean",
        "share",
        _MEAN,
        "Share of tokens whose ratio is clipped by dual_clip.",
    ),
    MetricInfo("policy/ratio_mean", "", _MEAN, "Mean ratio of new to old policy."),
    MetricInfo("policy/ratio_max", "", _MAX, "Largest ratio of new to old policy."),
    MetricInfo("policy/ratio_min", "", _MIN, "Smallest ratio of new to old policy."),
    MetricInfo(
        "moe/route_agreement",
        "share",
        _MEAN,
        "Share of (token, layer) pairs whose set of experts is the same in engine and trainer, in "
        "the step's first update: recorded routes against what the trainer's routers would have "
        "chosen.",
    ),
    MetricInfo(
        "moe/replayed_share",
        "share",
        _MEAN,
        "Share of the tokens in updates whose routes were replayed. The last token of a row, which "
        "no engine ran, routes freely.",
    ),
    MetricInfo(
        "moe/router_drift",
        "share",
        _MEAN,
        "Share of (token, layer) pairs whose set of experts would be another one by the step's "
        "last update: what the routers would choose then against the recorded routes.",
    ),
    MetricInfo(
        "policy/update_kl",
        "nats/token",
        _MEAN,
        "KL divergence of the updated policy from the policy at the start of the step.",
    ),
    MetricInfo(
        "sampling/sampling_logp_difference/mean",
        "nats",
        _MEAN,
        "Mean absolute difference between the engine's log-probs, as sampled, and the trainer's.",
    ),
    MetricInfo(
        "sampling/sampling_logp_difference/max",
        "nats",
        _MAX,
        "Largest absolute difference of a single token's log-probs.",
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/mean",
        "",
        _MEAN,
        "Mean ratio of the trainer's to the engine's probability of a token.",
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/max",
        "",
        _MAX,
        "Largest ratio of the trainer's to the engine's probability.",
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/min",
        "",
        _MIN,
        "Smallest ratio of the trainer's to the engine's probability.",
    ),
    MetricInfo(
        "sampling/k3",
        "nats/token",
        _MEAN,
        "KL divergence between engine and trainer, by the k3 estimator.",
    ),
    MetricInfo(
        "sampling/ess",
        "share",
        _MEAN,
        "Effective sample size under the tokens' importance ratios, as a share of the sample.",
    ),
    MetricInfo(
        "sampling/ess_sequence",
        "share",
        _MEAN,
        "Effective sample size under the ratios of whole completions, as a share of the sample.",
    ),
    MetricInfo(
        "sampling/kept_share",
        "share",
        _MEAN,
        "Mean share of the vocabulary that top-k, top-p and min-p left to draw a token from.",
    ),
    MetricInfo(
        "sampling/kept_mass",
        "share",
        _MEAN,
        "Mean probability of what was left, under the distribution before the cut.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/share",
        "share",
        _MEAN,
        "Share of tokens that were sampled by a policy i versions old.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/logp_difference",
        "nats",
        _MEAN,
        "Mean absolute log-prob difference of those tokens.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/k3",
        "nats/token",
        _MEAN,
        "KL divergence between engine and trainer on those tokens, by the k3 estimator.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/ess",
        "share",
        _MEAN,
        "Effective sample size of those tokens, as a share.",
    ),
    MetricInfo(
        "verify/<name>/error_mean",
        "nats",
        _MEAN,
        "Mean absolute difference from a float64 reference: of the trainer, of the engine "
        "as it sampled, or of the engine as it scores.",
    ),
    MetricInfo(
        "verify/<name>/error_max",
        "nats",
        _MAX,
        "Largest absolute difference from the float64 reference.",
    ),
    MetricInfo(
        "verify/<name>/share_off",
        "share",
        _MAX,
        "Share of tokens that differ by more than rounding explains.",
    ),
    MetricInfo(
        "stale/steps/mean",
        "steps",
        _MEAN,
        "Mean age, in steps, of the policy that sampled the trained tokens.",
    ),
    MetricInfo(
        "stale/steps/max",
        "steps",
        _MAX,
        "Largest age, in steps, of the policy that sampled the trained tokens.",
    ),
    MetricInfo(
        "stale/updates/mean",
        "updates",
        _MEAN,
        "Mean number of updates that were due between the weights that sampled a token and "
        "those on which it is trained.",
    ),
    MetricInfo("stale/updates/max", "updates", _MAX, "Largest number of such updates."),
    MetricInfo(
        "correction/factor_mean",
        "",
        _MEAN,
        "Mean factor by which the correction multiplies the surrogate.",
    ),
    MetricInfo(
        "correction/tokens/truncated",
        "share",
        _MEAN,
        "Share of tokens whose weight is set to a bound.",
    ),
    MetricInfo(
        "correction/tokens/masked", "share", _MEAN, "Share of tokens whose weight is set to 0."
    ),
    MetricInfo(
        "correction/tokens/rejected", "share", _MEAN, "Share of tokens that `reject` leaves out."
    ),
    MetricInfo(
        "correction/tokens/vetoed", "share", _MEAN, "Share of tokens that `veto` leaves out."
    ),
    MetricInfo(
        "correction/tokens/off_policy",
        "share",
        _MEAN,
        "Share of tokens that `off_policy_mask` leaves out.",
    ),
    MetricInfo(
        "correction/sequences/<name>",
        "share",
        _MEAN,
        "Share of completions that contain such a token.",
    ),
    MetricInfo("completions/mean_length", "tokens", _MEAN, "Mean length of the completions."),
    MetricInfo("completions/min_length", "tokens", _MIN, "Length of the shortest completion."),
    MetricInfo("completions/max_length", "tokens", _MAX, "Length of the longest completion."),
    MetricInfo(
        "completions/clipped_ratio", "share", _MEAN, "Share of completions that were truncated."
    ),
    MetricInfo(
        "completions/mean_terminated_length",
        "tokens",
        _MEAN,
        "Mean length of the completions that were not truncated.",
    ),
    MetricInfo(
        "completions/min_terminated_length",
        "tokens",
        _MIN,
        "Length of the shortest completion that was not truncated.",
    ),
    MetricInfo(
        "completions/max_terminated_length",
        "tokens",
        _MAX,
        "Length of the longest completion that was not truncated.",
    ),
    MetricInfo(
        "completions/distinct_share",
        "share",
        _MEAN,
        "Number of distinct completion texts, as a share of all completions.",
    ),
    MetricInfo("rollout/rounds", "rounds", _SUM, "Number of sampling rounds."),
    MetricInfo(
        "rollout/replayed_rounds",
        "rounds",
        _SUM,
        "Number of sampling rounds taken from the journal.",
    ),
    MetricInfo(
        "rollout/groups_passed_over",
        "groups",
        _SUM,
        "Number of groups that filters dropped, dynamic sampling among them.",
    ),
    MetricInfo(
        "rollout/filtered_share",
        "share",
        _MEAN,
        "Share of the sampled groups that filters dropped.",
    ),
    MetricInfo(
        "rollout/groups_lacking",
        "groups",
        _SUM,
        "Number of groups that a step lacks because its sampling rounds were used up.",
    ),
    MetricInfo(
        "filter/<name>",
        "groups",
        _SUM,
        "Number of groups that filters dropped for this reason.",
    ),
    MetricInfo(
        "curriculum/seen_share",
        "share",
        _LAST,
        "Share of the prompts that were sampled at least once.",
    ),
    MetricInfo(
        "curriculum/solve_rate",
        "share",
        _LAST,
        "Mean estimated solve rate of the prompts that were sampled.",
    ),
    MetricInfo(
        "curriculum/drawn_rate",
        "share",
        _MEAN,
        "Mean estimated solve rate of the step's prompts, after the step.",
    ),
    MetricInfo(
        "curriculum/replayed_share",
        "share",
        _MEAN,
        "Share of the step's prompts that were drawn again by rollout.curriculum.replay.",
    ),
    MetricInfo("rollout/untrained_share", "share", _MEAN, "Share of samples that are not trained."),
    MetricInfo(
        "rollout/failed_share",
        "share",
        _MEAN,
        "Share of samples that are not trained because a reward failed on them.",
    ),
    MetricInfo("rollout/overlong_penalty", "", _MEAN, "Mean penalty for length (overlong: shape)."),
    MetricInfo(
        "train/updates_without_signal",
        "updates",
        _SUM,
        "Number of updates that were left out because no row has an advantage.",
    ),
    MetricInfo(
        "replay/logp_difference/mean",
        "nats",
        _MEAN,
        "Mean absolute difference between the log-probs of the current engine and those "
        "recorded when the tokens were sampled.",
    ),
    MetricInfo(
        "replay/logp_difference/max", "nats", _MAX, "Largest such difference of a single token."
    ),
    MetricInfo("eval/reward", "", _LAST, "Mean reward on the held-out prompts.", own_step=True),
    MetricInfo(
        "eval/reward_coverage",
        "share",
        _LAST,
        "Share of the held-out samples on which no reward failed.",
    ),
    MetricInfo(
        "eval/gold_reward",
        "",
        _LAST,
        "Mean gold reward on the held-out prompts: the rewards of role eval, which are not "
        "trained on.",
        own_step=True,
    ),
    MetricInfo(
        "eval/gold_coverage",
        "share",
        _LAST,
        "Share of the held-out samples on which no gold reward failed.",
        own_step=True,
    ),
    MetricInfo(
        "eval/rewards/<name>/mean",
        "",
        _LAST,
        "Mean value of one reward function on the held-out prompts.",
    ),
    MetricInfo(
        "eval/rewards/<name>/failed",
        "samples",
        _LAST,
        "Number of held-out samples on which the reward failed.",
    ),
    MetricInfo("eval/judge/calls", "calls", _SUM, "judge/calls of the evaluation."),
    MetricInfo("eval/judge/cached", "samples", _SUM, "judge/cached of the evaluation."),
    MetricInfo("eval/judge/retries", "calls", _SUM, "judge/retries of the evaluation."),
    MetricInfo("eval/judge/failed", "samples", _SUM, "judge/failed of the evaluation."),
    MetricInfo("eval/judge/seconds", "s", _SUM, "judge/seconds of the evaluation."),
    MetricInfo(
        "eval/pass@<i>",
        "share",
        _LAST,
        "Share of prompts for which at least one of i samples is solved.",
    ),
    MetricInfo(
        "eval/pass@<i>/<name>", "share", _LAST, "The same, if this reward decides what is solved."
    ),
    MetricInfo("eval/policy_version", "", _LAST, "Step whose weights were evaluated (RL)."),
    MetricInfo(
        "eval/completions/mean_length",
        "tokens",
        _LAST,
        "Mean length of the completions of held-out prompts.",
    ),
    MetricInfo(
        "eval/completions/clipped_ratio",
        "share",
        _LAST,
        "Share of the completions of held-out prompts that were truncated.",
    ),
    MetricInfo("time/generate", "s", _MEAN, "Time until the last completion of a step."),
    MetricInfo(
        "time/reward",
        "s",
        _MEAN,
        "Time that a step waited for rewards after its last completion; they start before it.",
    ),
    MetricInfo(
        "time/score",
        "s",
        _MEAN,
        "Time spent on advantages and on old and reference log-probs in a step.",
    ),
    MetricInfo("time/train", "s", _MEAN, "Time spent on the updates of a step."),
    MetricInfo(
        "sync/seconds", "s", _MEAN, "Duration of a publication of the weights to the engine."
    ),
    MetricInfo("sync/bytes", "bytes", _LAST, "Size of the published weights."),
    MetricInfo("sync/version", "", _LAST, "Step whose weights were published last."),
    MetricInfo(
        "engine/tokens_per_s", "tokens/s", _MEAN, "Number of new tokens sampled per second."
    ),
    MetricInfo(
        "engine/policy_version",
        "",
        _LAST,
        "Version of the weights with which the engine samples next.",
    ),
    MetricInfo(
        "engine/max_running",
        "requests",
        _MAX,
        "Largest number of requests sampled at the same time.",
    ),
    MetricInfo(
        "engine/preemptions",
        "requests",
        _LAST,
        "Number of requests preempted because the cache was full.",
    ),
    MetricInfo("engine/cache_bytes", "bytes", _LAST, "Memory used by the KV cache."),
    MetricInfo("engine/warmup_s", "seconds", _LAST, "Total time spent capturing CUDA graphs."),
    MetricInfo("train/row_loss_max", "nats/token", _MAX, "Largest mean loss of a single row."),
    MetricInfo(
        "train/skipped_steps",
        "steps",
        _LAST,
        "Number of updates not applied so far because a value was not finite.",
    ),
    MetricInfo("eval/loss", "nats/token", _LAST, "Loss on the held-out rows.", own_step=True),
    MetricInfo(
        "reward_model/accuracy",
        "share",
        _MEAN,
        "Share of pairs whose chosen completion has the higher score; with bce, of rows that are "
        "on the right side of 0.5.",
    ),
    MetricInfo(
        "reward_model/margin", "", _MEAN, "Mean score of chosen less that of rejected completions."
    ),
    MetricInfo(
        "reward_model/error",
        "",
        _MEAN,
        "Mean distance of the model's scores from the given ones (pointwise).",
    ),
    MetricInfo("reward_model/score_mean", "", _MEAN, "Mean score of the rows of an update."),
    MetricInfo("reward_model/score_std", "", _MEAN, "Standard deviation of these scores."),
    MetricInfo(
        "eval/reward_model_accuracy",
        "share",
        _LAST,
        "reward_model/accuracy of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "eval/reward_model_margin",
        "",
        _LAST,
        "reward_model/margin of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "eval/reward_model_error",
        "",
        _LAST,
        "reward_model/error of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "preference/accuracy",
        "",
        _MEAN,
        "Share of pairs whose chosen completion has the higher implicit reward; in kto, of rows "
        "that are on the right side of the baseline.",
    ),
    MetricInfo(
        "preference/margin",
        "",
        _MEAN,
        "Mean implicit reward of chosen (desirable) less rejected (undesirable) completions.",
    ),
    MetricInfo(
        "preference/chosen_reward",
        "",
        _MEAN,
        "Mean implicit reward of chosen completions: beta times the log-ratio of policy to "
        "reference (orpo, simpo: the mean log-prob), per token where the loss divides by length.",
    ),
    MetricInfo(
        "preference/rejected_reward", "", _MEAN, "Mean implicit reward of rejected completions."
    ),
    MetricInfo(
        "preference/chosen_logp",
        "nats",
        _MEAN,
        "Mean log-prob of chosen completions under the policy, summed over tokens.",
    ),
    MetricInfo(
        "preference/rejected_logp",
        "nats",
        _MEAN,
        "Mean log-prob of rejected completions under the policy, summed over tokens.",
    ),
    MetricInfo(
        "preference/kl",
        "nats",
        _MEAN,
        "Baseline of kto: estimate of the KL of policy and reference, from prompts with the "
        "completions of other rows.",
    ),
    MetricInfo(
        "eval/preference_accuracy",
        "",
        _LAST,
        "preference/accuracy of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "eval/preference_margin",
        "",
        _LAST,
        "preference/margin of the held-out rows.",
        own_step=True,
    ),
    MetricInfo("grad_norm", "", _MEAN, "Norm of the whole gradient before clipping."),
    MetricInfo(
        "update/weight_ratio/<name>",
        "",
        _MAX,
        "Norm of an update divided by the norm of the weights, for a group of layers.",
    ),
    MetricInfo(
        "probe/first_ratio_off",
        "",
        _MAX,
        "Largest distance from 1 of the ratio of new to old policy before anything was updated.",
    ),
    MetricInfo(
        "probe/round_trip_bad",
        "rows",
        _MAX,
        "Number of rows whose tokens are not the ones that were sampled.",
    ),
    MetricInfo(
        "probe/mask_difference",
        "tokens",
        _MAX,
        "Number of tokens by which the trained tokens differ from those that the update asked for.",
    ),
    MetricInfo(
        "probe/trained_unchanged", "tensors", _MAX, "Number of trained tensors that did not change."
    ),
    MetricInfo("probe/frozen_changed", "tensors", _MAX, "Number of frozen tensors that changed."),
    MetricInfo(
        "probe/dtype_odd",
        "tensors",
        _MAX,
        "Number of tensors whose dtype differs from the model's.",
    ),
    MetricInfo(
        "data/rows_without_training", "share", _MEAN, "Share of rows in which no token has a loss."
    ),
    MetricInfo("learning_rate", "", _LAST, "Learning rate of the update."),
    MetricInfo(
        "epoch",
        "epochs",
        _LAST,
        "Number of passes over the data so far, including the fraction of the current one.",
    ),
    MetricInfo(
        "num_tokens", "tokens", _LAST, "Number of tokens processed so far, trained and context."
    ),
    MetricInfo("time/step", "s", _MEAN, "Duration of one step, including waiting for data."),
    MetricInfo("time/data_wait", "s", _MEAN, "Time that an update waited for its rows."),
    MetricInfo("time/eval", "s", _SUM, "Time spent evaluating."),
    MetricInfo("time/checkpoint", "s", _SUM, "Time spent saving checkpoints."),
    MetricInfo("time/health", "s", _MEAN, "Time spent on health rules, per step."),
    MetricInfo(
        "throughput/tokens_per_s", "tokens/s", _RATE, "Number of tokens processed per second."
    ),
    MetricInfo(
        "throughput/trained_tokens_per_s",
        "tokens/s",
        _RATE,
        "Number of tokens with a loss processed per second.",
    ),
    MetricInfo(
        "data/packing_fill",
        "share",
        _MEAN,
        "Share of the micro-batches' token budget that is filled.",
    ),
    MetricInfo("data/trained_share", "share", _MEAN, "Share of tokens that have a loss."),
    MetricInfo("data/rows", "rows", _SUM, "Number of rows processed."),
    MetricInfo("data/trained_rows", "rows", _SUM, "Number of rows in the updates (RL)."),
    MetricInfo(
        "data/share/<name>",
        "share",
        _MEAN,
        "Share of the step's rows, in RL of its prompts, that come from this training source.",
    ),
    MetricInfo("data/micro_batches", "batches", _MEAN, "Number of micro-batches in one update."),
    MetricInfo(
        "moe/aux_loss",
        "",
        _MEAN,
        "Load-balancing loss of the routers before its coefficient; 1 is an even load.",
    ),
    MetricInfo("moe/z_loss", "", _MEAN, "Loss on the routers' logits, before its coefficient."),
    MetricInfo(
        "moe/max_violation",
        "",
        _MAX,
        "Tokens of the busiest expert of all layers over its layer's mean, less 1.",
    ),
    MetricInfo(
        "moe/load_max_share",
        "share",
        _MAX,
        "Largest share of the tokens that one expert has, in any layer.",
    ),
    MetricInfo(
        "moe/load_min_share",
        "",
        _MIN,
        "Tokens of the idlest expert of all layers, against an even share (1).",
    ),
    MetricInfo(
        "moe/dead_experts", "share", _MEAN, "Share of all experts that had no token in a step."
    ),
    MetricInfo(
        "moe/dropped_share",
        "share",
        _MEAN,
        "Share of (token, slot) pairs for which the chosen expert had no room.",
    ),
    MetricInfo(
        "moe/bias_max", "", _MAX, "Largest absolute expert bias of all layers before the update."
    ),
    MetricInfo(
        "memory/max_alloc",
        "bytes",
        _MAX,
        "Peak device memory held by tensors; on a CPU, peak memory of the process.",
    ),
    MetricInfo("memory/max_reserved", "bytes", _MAX, "Peak device memory reserved by torch."),
    MetricInfo("memory/host_rss", "bytes", _LAST, "Host memory held by this process."),
    MetricInfo(
        "gpu/<i>/memory_used", "bytes", _LAST, "Memory in use on device i by all processes."
    ),
    MetricInfo("gpu/<i>/utilization", "share", _MEAN, "Share of time that device i was busy."),
    MetricInfo("gpu/<i>/temperature", "C", _MAX, "Temperature of device i."),
)

_HOLES = {
    "<i>": r"(?:0|[1-9]\d*)",
    "<name>": r"[A-Za-z0-9_.-]+",
    # No control characters, no line or bidi controls, no lone surrogates.
    "<text>": r"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,100}",
}
_EXACT = {info.name: info for info in CATALOGUE if "<" not in info.name}
_PATTERNS = {
    re.compile(re.sub("|".join(_HOLES), lambda hole: _HOLES[hole.group()], info.name)): info
    for info in CATALOGUE
    if "<" in info.name
}


def describe(name: str) -> MetricInfo | None:
    """Return the catalogue entry of a metric name, or None if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((info for pattern, info in _PATTERNS.items() if pattern.fullmatch(name)), None)
