"""The batch sizes of an update, as other frameworks count them.

A trainer that splits by rows has `mini` rows for an update over all devices, `micro` rows in one
forward pass of one device. Where a device's share of `mini` is smaller than `micro`, it accumulates
mini / micro = 0 times.
"""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.health.rules.readings import raw_number
from homeostat.health.view import RunView


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a device's share of an update, and of a micro-batch."""

    share: float
    micro: float
    devices: float


def micro_exceeds_mini(view: RunView) -> Batch | None:
    """The sizes, where a micro-batch is larger than what a device has to do; None otherwise, and
    where a size is not known. The mini batch counts prompts: each has several samples."""
    mini = raw_number(view, "actor.ppo_mini_batch_size", "ppo_mini_batch_size", "mini_batch_size")
    micro = raw_number(
        view,
        "actor.ppo_micro_batch_size_per_gpu",
        "ppo_micro_batch_size_per_gpu",
        "micro_batch_size_per_gpu",
    )
    devices = raw_number(view, "trainer.n_gpus_per_node", "n_gpus_per_node")
    if mini is None or micro is None or devices is None:
        return None
    devices *= raw_number(view, "trainer.nnodes", "nnodes") or 1.0
    samples = view.number("rollout.samples_per_prompt") or raw_number(view, "rollout.n") or 1.0
    share = mini * samples / devices
    return Batch(share, micro, devices) if share < micro else None
