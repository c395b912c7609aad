"""List the metrics of samples: mismatch, staleness, corrections, lengths, filters and curricula."""

from __future__ import annotations

from homeostat.observe.catalogue.info import LAST, MAX, MEAN, MIN, SUM, MetricInfo

METRICS: tuple[MetricInfo, ...] = (
    MetricInfo(
        "sampling/sampling_logp_difference/mean",
        "nats",
        MEAN,
        "Mean absolute difference between the engine's log-probs, as sampled, and the trainer's.",
    ),
    MetricInfo(
        "sampling/sampling_logp_difference/max",
        "nats",
        MAX,
        "Largest absolute difference of a single token's log-probs.",
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/mean",
        "",
        MEAN,
        "Mean ratio of the trainer's to the engine's probability of a token.",
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/max",
        "",
        MAX,
        "Largest ratio of the trainer's to the engine's probability.",
    ),
    MetricInfo(
        "sampling/importance_sampling_ratio/min",
        "",
        MIN,
        "Smallest ratio of the trainer's to the engine's probability.",
    ),
    MetricInfo(
        "sampling/k3",
        "nats/token",
        MEAN,
        "KL divergence between engine and trainer, by the k3 estimator.",
    ),
    MetricInfo(
        "sampling/ess",
        "share",
        MEAN,
        "Effective sample size under the tokens' importance ratios, as a share of the sample.",
    ),
    MetricInfo(
        "sampling/ess_sequence",
        "share",
        MEAN,
        "Effective sample size under the ratios of whole completions, as a share of the sample.",
    ),
    MetricInfo(
        "sampling/kept_share",
        "share",
        MEAN,
        "Mean share of the vocabulary that top-k, top-p and min-p left to draw a token from.",
    ),
    MetricInfo(
        "sampling/kept_mass",
        "share",
        MEAN,
        "Mean probability of the remaining tokens, under the distribution before the cut.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/share",
        "share",
        MEAN,
        "Share of tokens that were sampled by a policy i versions old.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/logp_difference",
        "nats",
        MEAN,
        "Mean absolute log-prob difference of those tokens.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/k3",
        "nats/token",
        MEAN,
        "KL divergence between engine and trainer on those tokens, by the k3 estimator.",
    ),
    MetricInfo(
        "sampling/by_age/<i>/ess",
        "share",
        MEAN,
        "Effective sample size of those tokens, as a share.",
    ),
    MetricInfo(
        "verify/<name>/error_mean",
        "nats",
        MEAN,
        "Mean absolute difference from a float64 reference: of the trainer, of the engine "
        "as it sampled, or of the engine as it scores.",
    ),
    MetricInfo(
        "verify/<name>/error_max",
        "nats",
        MAX,
        "Largest absolute difference from the float64 reference.",
    ),
    MetricInfo(
        "verify/<name>/share_off",
        "share",
        MAX,
        "Share of tokens that differ by more than rounding explains.",
    ),
    MetricInfo(
        "stale/steps/mean",
        "steps",
        MEAN,
        "Mean age, in steps, of the policy that sampled the trained tokens.",
    ),
    MetricInfo(
        "stale/steps/max",
        "steps",
        MAX,
        "Largest age, in steps, of the policy that sampled the trained tokens.",
    ),
    MetricInfo(
        "stale/updates/mean",
        "updates",
        MEAN,
        "Mean number of updates that were due between the weights that sampled a token and "
        "those on which it is trained.",
    ),
    MetricInfo("stale/updates/max", "updates", MAX, "Largest number of such updates."),
    MetricInfo(
        "stale/mixed_share",
        "share",
        MEAN,
        "Share of the completions whose tokens were sampled by more than one version of the "
        "policy (rollout.partial).",
    ),
    MetricInfo(
        "correction/factor_mean",
        "",
        MEAN,
        "Mean factor by which the correction multiplies the surrogate.",
    ),
    MetricInfo(
        "correction/tokens/truncated",
        "share",
        MEAN,
        "Share of tokens whose weight is set to a bound.",
    ),
    MetricInfo(
        "correction/tokens/masked", "share", MEAN, "Share of tokens whose weight is set to 0."
    ),
    MetricInfo(
        "correction/tokens/rejected", "share", MEAN, "Share of tokens that `reject` leaves out."
    ),
    MetricInfo(
        "correction/tokens/vetoed", "share", MEAN, "Share of tokens that `veto` leaves out."
    ),
    MetricInfo(
        "correction/tokens/off_policy",
        "share",
        MEAN,
        "Share of tokens that `off_policy_mask` leaves out.",
    ),
    MetricInfo(
        "correction/sequences/<name>",
        "share",
        MEAN,
        "Share of completions that contain such a token.",
    ),
    MetricInfo("completions/mean_length", "tokens", MEAN, "Mean length of the completions."),
    MetricInfo("completions/min_length", "tokens", MIN, "Length of the shortest completion."),
    MetricInfo("completions/max_length", "tokens", MAX, "Length of the longest completion."),
    MetricInfo(
        "completions/clipped_ratio", "share", MEAN, "Share of completions that were truncated."
    ),
    MetricInfo(
        "completions/mean_terminated_length",
        "tokens",
        MEAN,
        "Mean length of the completions that were not truncated.",
    ),
    MetricInfo(
        "completions/min_terminated_length",
        "tokens",
        MIN,
        "Length of the shortest completion that was not truncated.",
    ),
    MetricInfo(
        "completions/max_terminated_length",
        "tokens",
        MAX,
        "Length of the longest completion that was not truncated.",
    ),
    MetricInfo(
        "completions/distinct_share",
        "share",
        MEAN,
        "Number of distinct completion texts, as a share of all completions.",
    ),
    MetricInfo("rollout/rounds", "rounds", SUM, "Number of sampling rounds."),
    MetricInfo(
        "rollout/buffer_groups",
        "groups",
        MEAN,
        "Number of sampled groups that wait to be trained on when a step begins "
        "(rollout.max_staleness).",
    ),
    MetricInfo(
        "rollout/groups_in_flight",
        "groups",
        MEAN,
        "Number of admitted groups that are still being sampled when a step begins.",
    ),
    MetricInfo(
        "rollout/replayed_rounds",
        "rounds",
        SUM,
        "Number of sampling rounds taken from the journal.",
    ),
    MetricInfo(
        "rollout/groups_passed_over",
        "groups",
        SUM,
        "Number of groups that filters dropped, dynamic sampling among them.",
    ),
    MetricInfo(
        "rollout/filtered_share",
        "share",
        MEAN,
        "Share of the sampled groups that filters dropped.",
    ),
    MetricInfo(
        "rollout/groups_lacking",
        "groups",
        SUM,
        "Number of groups that a step lacks because its sampling rounds were used up.",
    ),
    MetricInfo(
        "filter/<name>",
        "groups",
        SUM,
        "Number of groups that filters dropped for this reason.",
    ),
    MetricInfo(
        "curriculum/seen_share",
        "share",
        LAST,
        "Share of the prompts that were sampled at least once.",
    ),
    MetricInfo(
        "curriculum/solve_rate",
        "share",
        LAST,
        "Mean estimated solve rate of the prompts that were sampled.",
    ),
    MetricInfo(
        "curriculum/drawn_rate",
        "share",
        MEAN,
        "Mean estimated solve rate of the step's prompts, after the step.",
    ),
    MetricInfo(
        "curriculum/replayed_share",
        "share",
        MEAN,
        "Share of the step's prompts that were drawn again by rollout.curriculum.replay.",
    ),
    MetricInfo("rollout/untrained_share", "share", MEAN, "Share of samples that are not trained."),
    MetricInfo(
        "rollout/failed_share",
        "share",
        MEAN,
        "Share of samples that are not trained because a reward failed on them.",
    ),
    MetricInfo("rollout/overlong_penalty", "", MEAN, "Mean penalty for length (overlong: shape)."),
    MetricInfo(
        "train/updates_without_signal",
        "updates",
        SUM,
        "Number of updates that were skipped because all advantages were 0.",
    ),
    MetricInfo(
        "replay/logp_difference/mean",
        "nats",
        MEAN,
        "Mean absolute difference between the log-probs of the current engine and those "
        "recorded when the tokens were sampled.",
    ),
    MetricInfo(
        "replay/logp_difference/max", "nats", MAX, "Largest such difference of a single token."
    ),
)
