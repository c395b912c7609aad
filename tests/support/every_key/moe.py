"""Keys of a model's experts. The model is `experts`, a tiny dots.llm1."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.support.every_key.workshop import (
    Case,
    Workshop,
    all_of,
    alters,
    assert_same,
    metric,
    refuses,
)
from torch.utils._python_dispatch import TorchDispatchMode

from homeostat.models.weight_stream import WeightStream

EXPERTS = ("model.path=experts",)
ROWS = (*EXPERTS, "model.moe={balancing: sequence_aux, aux_loss_coefficient: 0.1}")
# bf16 is slow on a processor without units for it.
BRIEF = ("trainer.precision=bf16", "trainer.max_steps=1")
MOVED = (*EXPERTS, "model.moe={balancing: bias, router_bias_update_rate: 0.1}")


class GroupedProducts(TorchDispatchMode):
    """Counts torch's grouped products, which take bf16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def all_experts_are_one_product(workshop: Workshop) -> None:
    counts, losses = [], []
    for kernel in ("plain", "grouped"):
        with GroupedProducts() as products:
            run = workshop.again(*EXPERTS, *BRIEF, f"model.moe.grouped_kernel={kernel}")
        counts.append(products.count)
        losses.append(run.metric("train/loss"))
    assert counts[0] == 0 < counts[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def experts_are_streamed_to_the_same_bits(workshop: Workshop) -> None:
    """Host and device are both the CPU, which `check` would refuse."""
    copied: list[int] = []
    fill = WeightStream._fill

    def counted(self: WeightStream, layer: int) -> None:
        copied.append(layer)
        fill(self, layer)

    change = (*EXPERTS, "trainer.backend.offload_experts=true")
    with (
        patch.object(WeightStream, "_fill", counted),
        patch("homeostat.train.runtime.find_device_conflicts", return_value=[]),
    ):
        streamed = workshop.again(*change)
    # Two layers with experts, which both have a slot: once in each of three updates,
    # and before each of them for a row that is scored by itself.
    assert copied == [0, 1] * 6
    assert_same(workshop.run(*EXPERTS), streamed, "bits")


CASES: dict[str, Case] = {
    "trainer.backend.offload_experts (local)": all_of(
        refuses("trainer.backend.offload_experts=true", "already in host memory", base=EXPERTS),
        experts_are_streamed_to_the_same_bits,
    ),
    "trainer.backend.offload_experts (fsdp)": refuses(
        "trainer.backend.offload_experts=true",
        "ranks split every tensor",
        base=("cluster={type: torchrun, processes: 1}", "trainer.backend={type: fsdp}"),
    ),
    "model.moe.grouped_kernel": all_experts_are_one_product,
    "model.moe.balancing": all_of(
        alters("model.moe.balancing=aux", metric("moe/aux_loss"), base=ROWS),
        refuses("model.moe.balancing=none", "adds no loss", base=ROWS),
    ),
    "model.moe.aux_loss_coefficient": alters("model.moe.aux_loss_coefficient=2.0", base=ROWS),
    "model.moe.z_loss_coefficient": alters("model.moe.z_loss_coefficient=0.5", base=EXPERTS),
    "model.moe.router_bias_update_rate": alters(
        "model.moe.router_bias_update_rate=0.3", metric("moe/bias_max"), base=MOVED
    ),
    "model.moe.capacity_factor": alters("model.moe.capacity_factor=0.4", base=EXPERTS),
}
