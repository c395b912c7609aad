"""List the metrics of held-out prompts and rows, of the engine, reward models and preferences."""

from __future__ import annotations

from homeostat.observe.catalogue.info import LAST, MAX, MEAN, SUM, MetricInfo

METRICS: tuple[MetricInfo, ...] = (
    MetricInfo("eval/reward", "", LAST, "Mean reward on the held-out prompts.", own_step=True),
    MetricInfo(
        "eval/reward_coverage",
        "share",
        LAST,
        "Share of the held-out samples on which no reward failed.",
    ),
    MetricInfo(
        "eval/gold_reward",
        "",
        LAST,
        "Mean gold reward on the held-out prompts: the rewards of role eval, which are not "
        "trained on.",
        own_step=True,
    ),
    MetricInfo(
        "eval/gold_coverage",
        "share",
        LAST,
        "Share of the held-out samples on which no gold reward failed.",
        own_step=True,
    ),
    MetricInfo(
        "eval/rewards/<name>/mean",
        "",
        LAST,
        "Mean value of one reward function on the held-out prompts.",
    ),
    MetricInfo(
        "eval/rewards/<name>/failed",
        "samples",
        LAST,
        "Number of held-out samples on which the reward failed.",
    ),
    MetricInfo("eval/judge/calls", "calls", SUM, "judge/calls of the evaluation."),
    MetricInfo("eval/judge/cached", "samples", SUM, "judge/cached of the evaluation."),
    MetricInfo("eval/judge/retries", "calls", SUM, "judge/retries of the evaluation."),
    MetricInfo("eval/judge/failed", "samples", SUM, "judge/failed of the evaluation."),
    MetricInfo("eval/judge/seconds", "s", SUM, "judge/seconds of the evaluation."),
    MetricInfo(
        "eval/pass@<i>",
        "share",
        LAST,
        "Share of prompts for which at least one of i samples is solved.",
    ),
    MetricInfo(
        "eval/pass@<i>/<name>", "share", LAST, "The same, if this reward decides what is solved."
    ),
    MetricInfo("eval/policy_version", "", LAST, "Step whose weights were evaluated (RL)."),
    MetricInfo(
        "eval/completions/mean_length",
        "tokens",
        LAST,
        "Mean length of the completions of held-out prompts.",
    ),
    MetricInfo(
        "eval/completions/clipped_ratio",
        "share",
        LAST,
        "Share of the completions of held-out prompts that were truncated.",
    ),
    MetricInfo("time/generate", "s", MEAN, "Time until the last completion of a step."),
    MetricInfo(
        "time/reward",
        "s",
        MEAN,
        "Time that a step waited for rewards after its last completion. Scoring starts earlier.",
    ),
    MetricInfo(
        "time/score",
        "s",
        MEAN,
        "Time spent on advantages and on old and reference log-probs in a step.",
    ),
    MetricInfo("time/train", "s", MEAN, "Time spent on the updates of a step."),
    MetricInfo(
        "time/wait_groups",
        "s",
        MEAN,
        "Time that the trainer waited for the groups of a step to be sampled and scored "
        "(rollout.max_staleness).",
    ),
    MetricInfo(
        "time/wait_drain",
        "s",
        MEAN,
        "Time that the trainer waited for in-flight completions before it could publish "
        "(rollout.max_staleness without rollout.partial).",
    ),
    MetricInfo(
        "time/engine_idle",
        "s",
        MEAN,
        "Time of a step in which the engine sampled nothing (rollout.max_staleness).",
    ),
    MetricInfo(
        "sync/seconds", "s", MEAN, "Duration of a publication of the weights to the engine."
    ),
    MetricInfo(
        "sync/staged_seconds",
        "s",
        MEAN,
        "Time for which weights were sent while the engine continued to sample (sync.overlap); it "
        "is not part of sync/seconds.",
    ),
    MetricInfo("sync/bytes", "bytes", LAST, "Size of the published weights."),
    MetricInfo(
        "sync/sent_bytes",
        "bytes",
        LAST,
        "Bytes that a publication sent to each engine: less than sync/bytes if only differences "
        "are sent.",
    ),
    MetricInfo("sync/version", "", LAST, "Step whose weights were published last."),
    MetricInfo("engine/tokens_per_s", "tokens/s", MEAN, "Number of new tokens sampled per second."),
    MetricInfo(
        "engine/policy_version",
        "",
        LAST,
        "Version of the weights with which the engine samples next.",
    ),
    MetricInfo(
        "engine/max_running",
        "requests",
        MAX,
        "Largest number of requests sampled at the same time.",
    ),
    MetricInfo(
        "engine/preemptions",
        "requests",
        LAST,
        "Number of requests that were preempted because the cache was full.",
    ),
    MetricInfo("engine/cache_bytes", "bytes", LAST, "Memory used by the KV cache."),
    MetricInfo("engine/warmup_s", "seconds", LAST, "Total time spent capturing CUDA graphs."),
    MetricInfo("train/row_loss_max", "nats/token", MAX, "Largest mean loss of a single row."),
    MetricInfo(
        "train/skipped_steps",
        "steps",
        LAST,
        "Number of updates not applied so far because a value was not finite.",
    ),
    MetricInfo("eval/loss", "nats/token", LAST, "Loss on the held-out rows.", own_step=True),
    MetricInfo(
        "reward_model/accuracy",
        "share",
        MEAN,
        "Share of pairs whose chosen completion has the higher score; with bce, of rows that are "
        "on the right side of 0.5.",
    ),
    MetricInfo(
        "reward_model/margin", "", MEAN, "Mean score of chosen less that of rejected completions."
    ),
    MetricInfo(
        "reward_model/error",
        "",
        MEAN,
        "Mean distance of the model's scores from the given ones (pointwise).",
    ),
    MetricInfo("reward_model/score_mean", "", MEAN, "Mean score of the rows of an update."),
    MetricInfo("reward_model/score_std", "", MEAN, "Standard deviation of these scores."),
    MetricInfo(
        "eval/reward_model_accuracy",
        "share",
        LAST,
        "reward_model/accuracy of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "eval/reward_model_margin",
        "",
        LAST,
        "reward_model/margin of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "eval/reward_model_error",
        "",
        LAST,
        "reward_model/error of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "preference/accuracy",
        "",
        MEAN,
        "Share of pairs whose chosen completion has the higher implicit reward; in kto, of rows "
        "that are on the right side of the baseline.",
    ),
    MetricInfo(
        "preference/margin",
        "",
        MEAN,
        "Mean implicit reward of chosen (desirable) less rejected (undesirable) completions.",
    ),
    MetricInfo(
        "preference/chosen_reward",
        "",
        MEAN,
        "Mean implicit reward of chosen completions: beta times the log-ratio of policy to "
        "reference (orpo, simpo: the mean log-prob), per token where the loss divides by length.",
    ),
    MetricInfo(
        "preference/rejected_reward", "", MEAN, "Mean implicit reward of rejected completions."
    ),
    MetricInfo(
        "preference/chosen_logp",
        "nats",
        MEAN,
        "Mean log-prob of chosen completions under the policy, summed over tokens.",
    ),
    MetricInfo(
        "preference/rejected_logp",
        "nats",
        MEAN,
        "Mean log-prob of rejected completions under the policy, summed over tokens.",
    ),
    MetricInfo(
        "preference/kl",
        "nats",
        MEAN,
        "Baseline of kto: estimate of the KL of policy and reference, from prompts with the "
        "completions of other rows.",
    ),
    MetricInfo(
        "eval/preference_accuracy",
        "",
        LAST,
        "preference/accuracy of the held-out rows.",
        own_step=True,
    ),
    MetricInfo(
        "eval/preference_margin",
        "",
        LAST,
        "preference/margin of the held-out rows.",
        own_step=True,
    ),
)
