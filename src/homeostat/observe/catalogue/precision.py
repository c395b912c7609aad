"""List the metrics of quantised layers (measured by train/inspection/precision_probe.py).

A group is attention, mlp, experts or head. What is counted are the numbers that one micro-batch
quantised: weights, activations and gradients in FP8, weights in INT4.
"""

from __future__ import annotations

from homeostat.observe.catalogue.info import LAST, MAX, MIN, MetricInfo


def _of(format: str, title: str) -> tuple[MetricInfo, ...]:
    return (
        MetricInfo(
            f"{format}/<name>/amax",
            "",
            MAX,
            f"Largest absolute number that was quantised to {title} in a group of layers.",
        ),
        MetricInfo(
            f"{format}/<name>/saturated_share",
            "share",
            MAX,
            f"Share of the numbers that are beyond the range of {title} and were clipped.",
        ),
        MetricInfo(
            f"{format}/<name>/flushed_share",
            "share",
            MAX,
            f"Share of the numbers that are not 0 and became 0 in {title}.",
        ),
        MetricInfo(f"{format}/<name>/scale_min", "", MIN, f"Smallest scale of {title}."),
        MetricInfo(f"{format}/<name>/scale_max", "", MAX, f"Largest scale of {title}."),
        MetricInfo(
            f"{format}/<name>/error",
            "share",
            MAX,
            f"Quantisation error of {title}: norm of the difference over norm of the numbers.",
        ),
        MetricInfo(
            f"{format}/grad_cosine",
            "",
            MIN,
            f"Cosine between the gradient of a micro-batch in {title} and without quantisation.",
        ),
    )


METRICS: tuple[MetricInfo, ...] = (
    *_of("fp8", "FP8"),
    *_of("int4", "INT4"),
    MetricInfo(
        "eval/bf16_shadow_loss",
        "nats",
        LAST,
        "Loss on the held-out rows, in RL on samples of the step, with the quantisation switched "
        "off.",
        own_step=True,
    ),
    MetricInfo(
        "eval/quantised_gap",
        "nats",
        LAST,
        "Loss on the same rows in low precision minus eval/bf16_shadow_loss: the loss that "
        "quantisation costs.",
        own_step=True,
    ),
)
