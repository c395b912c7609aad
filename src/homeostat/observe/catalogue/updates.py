"""List the metrics of updates, rows, time, experts and memory."""

from __future__ import annotations

from homeostat.observe.catalogue.info import LAST, MAX, MEAN, MIN, RATE, SUM, MetricInfo

METRICS: tuple[MetricInfo, ...] = (
    MetricInfo("grad_norm", "", MEAN, "Norm of the whole gradient before clipping."),
    MetricInfo(
        "update/weight_ratio/<name>",
        "",
        MAX,
        "Norm of an update divided by the norm of the weights, for a group of layers.",
    ),
    MetricInfo(
        "probe/first_ratio_off",
        "",
        MAX,
        "Largest distance from 1 of the ratio of new to old policy before anything was updated.",
    ),
    MetricInfo(
        "probe/round_trip_bad",
        "rows",
        MAX,
        "Number of rows whose tokens are not the ones that were sampled.",
    ),
    MetricInfo(
        "probe/mask_difference",
        "tokens",
        MAX,
        "Number of tokens by which the trained tokens differ from those that the update requested.",
    ),
    MetricInfo(
        "probe/trained_unchanged", "tensors", MAX, "Number of trained tensors that did not change."
    ),
    MetricInfo("probe/frozen_changed", "tensors", MAX, "Number of frozen tensors that changed."),
    MetricInfo(
        "probe/dtype_odd",
        "tensors",
        MAX,
        "Number of tensors whose dtype differs from the model's.",
    ),
    MetricInfo(
        "probe/optimizer_updates",
        "updates",
        MAX,
        "Number of updates that the optimizer's state has seen; it never falls.",
    ),
    MetricInfo(
        "probe/packing_difference",
        "nats",
        MAX,
        "Largest difference between the log-probs of a row packed with others and of the row "
        "alone.",
    ),
    MetricInfo(
        "data/rows_without_training", "share", MEAN, "Share of rows in which no token has a loss."
    ),
    MetricInfo("learning_rate", "", LAST, "Learning rate of the update."),
    MetricInfo(
        "epoch",
        "epochs",
        LAST,
        "Number of passes over the data so far, including the fraction of the current one.",
    ),
    MetricInfo(
        "num_tokens", "tokens", LAST, "Number of tokens processed so far, trained and context."
    ),
    MetricInfo("time/step", "s", MEAN, "Duration of one step, including waiting for data."),
    MetricInfo("time/data_wait", "s", MEAN, "Time that an update waited for its rows."),
    MetricInfo("time/eval", "s", SUM, "Time spent evaluating."),
    MetricInfo("time/checkpoint", "s", SUM, "Time spent saving checkpoints."),
    MetricInfo("time/health", "s", MEAN, "Time spent on health rules, per step."),
    MetricInfo(
        "throughput/tokens_per_s", "tokens/s", RATE, "Number of tokens processed per second."
    ),
    MetricInfo(
        "throughput/trained_tokens_per_s",
        "tokens/s",
        RATE,
        "Number of tokens with a loss processed per second.",
    ),
    MetricInfo(
        "throughput/slowest_rank",
        "rank",
        LAST,
        "The rank that took longest for the same short work (several ranks).",
    ),
    MetricInfo(
        "throughput/slowest_rank_share",
        "share",
        MEAN,
        "Speed of the slowest rank in the same short work, as a share of the median rank's.",
    ),
    MetricInfo(
        "data/packing_fill",
        "share",
        MEAN,
        "Share of the micro-batches' token budget that is filled.",
    ),
    MetricInfo("data/trained_share", "share", MEAN, "Share of tokens that have a loss."),
    MetricInfo("data/rows", "rows", SUM, "Number of rows processed."),
    MetricInfo("data/trained_rows", "rows", SUM, "Number of rows in the updates (RL)."),
    MetricInfo(
        "data/share/<name>",
        "share",
        MEAN,
        "Share of the step's rows, in RL of its prompts, that come from this training source.",
    ),
    MetricInfo("data/micro_batches", "batches", MEAN, "Number of micro-batches in one update."),
    MetricInfo(
        "moe/aux_loss",
        "",
        MEAN,
        "Load-balancing loss of the routers before its coefficient; 1 is an even load.",
    ),
    MetricInfo("moe/z_loss", "", MEAN, "Loss on the routers' logits, before its coefficient."),
    MetricInfo(
        "moe/max_violation",
        "",
        MAX,
        "Tokens of the busiest expert of all layers over its layer's mean, less 1.",
    ),
    MetricInfo(
        "moe/load_max_share",
        "share",
        MAX,
        "Largest share of the tokens that one expert has, in any layer.",
    ),
    MetricInfo(
        "moe/load_min_share",
        "",
        MIN,
        "Tokens of the least used expert of all layers, relative to an even share (1).",
    ),
    MetricInfo(
        "moe/dead_experts", "share", MEAN, "Share of all experts that had no token in a step."
    ),
    MetricInfo(
        "moe/dropped_share",
        "share",
        MEAN,
        "Share of (token, slot) pairs for which the chosen expert had no room.",
    ),
    MetricInfo(
        "moe/bias_max", "", MAX, "Largest absolute expert bias of all layers before the update."
    ),
    MetricInfo(
        "memory/max_alloc",
        "bytes",
        MAX,
        "Peak device memory held by tensors; on a CPU, peak memory of the process.",
    ),
    MetricInfo("memory/max_reserved", "bytes", MAX, "Peak device memory reserved by torch."),
    MetricInfo("memory/host_rss", "bytes", LAST, "Host memory held by this process."),
    MetricInfo("gpu/<i>/memory_used", "bytes", LAST, "Memory in use on device i by all processes."),
    MetricInfo("gpu/<i>/utilization", "share", MEAN, "Share of time that device i was busy."),
    MetricInfo("gpu/<i>/temperature", "C", MAX, "Temperature of device i."),
)
