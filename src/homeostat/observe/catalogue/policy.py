"""List the metrics of rewards, advantages and the policy that RL trains."""

from __future__ import annotations

from homeostat.observe.catalogue.info import LAST, MAX, MEAN, MIN, SUM, MetricInfo

METRICS: tuple[MetricInfo, ...] = (
    MetricInfo(
        "train/loss",
        "nats/token",
        MEAN,
        "Training loss of the update, normalised by algorithm.normalise.",
    ),
    MetricInfo("reward", "", MEAN, "Mean reward of the sampled completions, as used in training."),
    MetricInfo(
        "reward_std",
        "",
        MEAN,
        "Standard deviation of the rewards within a group, averaged over groups.",
    ),
    MetricInfo(
        "frac_reward_zero_std",
        "share",
        MEAN,
        "Share of groups in which all rewards are equal, among groups with two or more rewards.",
    ),
    MetricInfo(
        "reward/noise_share",
        "",
        MEAN,
        "Variance of rewards among equal completions of a prompt, over the variance among all "
        "completions of these prompts: 0 if the completion decides the reward, about 1 if chance "
        "does.",
    ),
    MetricInfo("rewards/<name>/mean", "", MEAN, "Mean value of one reward function."),
    MetricInfo(
        "rewards/<name>/std", "", MEAN, "Standard deviation of one reward function's values."
    ),
    MetricInfo(
        "rewards/<name>/logged/<text>",
        "",
        MEAN,
        "Mean of the values that a function passed to log_metric.",
    ),
    MetricInfo(
        "rewards/<name>/failed", "samples", SUM, "Number of samples on which the reward failed."
    ),
    MetricInfo(
        "rewards/<name>/failed_share",
        "share",
        MEAN,
        "Share of samples on which the reward failed.",
    ),
    MetricInfo("judge/calls", "calls", SUM, "Number of requests sent to judges, with retries."),
    MetricInfo(
        "judge/cached", "samples", SUM, "Number of samples for which a judge's answer was known."
    ),
    MetricInfo("judge/retries", "calls", SUM, "Number of requests to judges that were repeated."),
    MetricInfo(
        "judge/failed",
        "samples",
        SUM,
        "Number of samples that a judge gave no score: no answer, or one that cannot be read.",
    ),
    MetricInfo(
        "judge/seconds", "s", SUM, "Time spent in calls of judges, summed over concurrent calls."
    ),
    MetricInfo(
        "rewards/<name>/none",
        "samples",
        SUM,
        "Number of samples for which the reward returned None (it does not apply).",
    ),
    MetricInfo("advantages/mean", "", MEAN, "Mean advantage of the samples."),
    MetricInfo("advantages/std", "", MEAN, "Standard deviation of the samples' advantages."),
    MetricInfo("advantages/zero_share", "share", MEAN, "Share of samples with advantage 0."),
    MetricInfo(
        "ebft/alignment",
        "",
        MEAN,
        "Twice the cosine between the features of a sample and of the reference: from -2 to 2.",
    ),
    MetricInfo(
        "ebft/diversity",
        "",
        MEAN,
        "Twice the mean cosine between the features of two samples of a prompt: 2 if all are the "
        "same, 0 for whitened ones that differ.",
    ),
    MetricInfo(
        "ebft/cfm_loss",
        "",
        MEAN,
        "Squared distance between the mean features of a prompt's samples and those of the "
        "reference, before whitening: from 0 to 4.",
    ),
    MetricInfo(
        "ebft/spread",
        "",
        MEAN,
        "The value that ebft/cfm_loss would have if the reference were one more sample of the "
        "policy.",
    ),
    MetricInfo(
        "ebft/ce_loss", "nats/token", MEAN, "Cross-entropy of the reference (ebft.ce_coefficient)."
    ),
    MetricInfo(
        "entropy",
        "nats/token",
        MEAN,
        "Entropy of the policy at the tokens of its completions. Rows that are not trained "
        "because their advantage is 0 are represented by up to 8 of them per update.",
    ),
    MetricInfo(
        "kl", "nats/token", MEAN, "Estimated KL divergence of the policy from the reference model."
    ),
    MetricInfo("kl_coefficient", "", LAST, "Weight of the KL penalty."),
    MetricInfo(
        "critic/explained_variance",
        "share",
        MEAN,
        "Share of the variance of returns that the critic's values explain, before the step's "
        "updates. 0: no more than a constant would. Missing if all returns are equal.",
    ),
    MetricInfo("critic/loss", "", MEAN, "Value loss of the critic's updates."),
    MetricInfo("critic/value_mean", "", MEAN, "Mean value of the trained tokens."),
    MetricInfo(
        "critic/return_mean",
        "",
        MEAN,
        ("Mean return of the trained tokens: the reward that followed each of them."),
    ),
    MetricInfo("critic/return_std", "", MEAN, "Standard deviation of these returns."),
    MetricInfo(
        "critic/clipped_share",
        "share",
        MEAN,
        "Share of tokens for which the clipped value determines the critic's loss.",
    ),
    MetricInfo("critic/grad_norm", "", MEAN, "Gradient norm of the critic before clipping."),
    MetricInfo("critic/lr", "", LAST, "Learning rate of the critic."),
    MetricInfo(
        "clip_ratio/low_mean",
        "share",
        MEAN,
        "Share of tokens whose ratio is clipped at the lower bound.",
    ),
    MetricInfo(
        "clip_ratio/high_mean",
        "share",
        MEAN,
        "Share of tokens whose ratio is clipped at the upper bound.",
    ),
    MetricInfo(
        "clip_ratio/region_mean",
        "share",
        MEAN,
        "Share of tokens whose ratio is clipped at either bound.",
    ),
    MetricInfo(
        "clip_ratio/dual_mean",
        "share",
        MEAN,
        "Share of tokens whose ratio is clipped by dual_clip.",
    ),
    MetricInfo("policy/ratio_mean", "", MEAN, "Mean ratio of new to old policy."),
    MetricInfo("policy/ratio_max", "", MAX, "Largest ratio of new to old policy."),
    MetricInfo("policy/ratio_min", "", MIN, "Smallest ratio of new to old policy."),
    MetricInfo(
        "moe/route_agreement",
        "share",
        MEAN,
        "Share of (token, layer) pairs whose set of experts is the same in engine and trainer, in "
        "the step's first update. It compares the recorded routes with the choice of the "
        "trainer's routers.",
    ),
    MetricInfo(
        "moe/replayed_share",
        "share",
        MEAN,
        "Share of the tokens in updates whose routes were replayed. The last token of a row is "
        "not replayed, because no engine computed it.",
    ),
    MetricInfo(
        "moe/router_drift",
        "share",
        MEAN,
        "Share of (token, layer) pairs whose recorded experts differ from those that the routers "
        "would choose in the step's last update.",
    ),
    MetricInfo(
        "policy/update_kl",
        "nats/token",
        MEAN,
        "KL divergence of the updated policy from the policy at the start of the step.",
    ),
)
