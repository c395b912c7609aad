"""Cases of the optimizers' keys.

The optimizer alone reads them, so it is asked: a few updates of tensors, with and without a key.
One run of each kind shows that a trainer updates with the optimizer that its recipe names.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from tests.support.every_key.workshop import (
    Case,
    Workshop,
    all_of,
    alters,
    assert_same,
    refuses,
)

from homeostat.config.optimizer import AnyOptimizer
from homeostat.config.run import RunConfig
from homeostat.models.weight_stream import WeightStream
from homeostat.train.optimizers.host_state import HostState
from homeostat.train.optimizers.optimizer import MasterOptimizer

# Each key with another value than its default, by the optimizers that have it.
ADAM = {"beta1": "0.5", "beta2": "0.5", "eps": "0.1", "moments": "8bit"}
KEYS: dict[str, dict[str, str]] = {
    "adamw": ADAM,
    "muon": {
        **ADAM, "momentum": "0.5", "nesterov": "false", "iterations": "2", "scale": "original",
    },
    "adafactor": {
        "decay_exponent": "0.5", "eps": "0.1", "clip_threshold": "0.1", "relative_step": "true",
        "scale_parameter": "true",
    },
}  # fmt: skip
SHAPES = {"model.embed_tokens.weight": (70, 64), "model.layers.0.up_proj.weight": (80, 64)}


def updated(config: AnyOptimizer, dtype: torch.dtype) -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for name, shape in SHAPES.items()
    }
    optimizer = MasterOptimizer(params.items(), config)
    for _ in range(3):
        for name, shape in SHAPES.items():
            optimizer.gradients.add(name, torch.randn(shape, generator=generator))
        # Above 1 / sqrt(3), the relative step of the third update.
        optimizer.step(learning_rate=0.7, grad_norm=1.0, max_grad_norm=None)
        optimizer.zero_grad()
    return [param.detach().float().numpy().tobytes() for param in params.values()]


def asks(
    of: Callable[[RunConfig], AnyOptimizer], place: str, kind: str, change: str, *base: str
) -> Case:
    """The optimizer of a recipe updates otherwise with a changed key."""
    dtype = torch.bfloat16 if "masters" in change else torch.float32

    def case(workshop: Workshop) -> None:
        named = (*base, "trainer.precision=bf16", f"{place}.type={kind}")
        before, after = workshop.config(*named), workshop.config(*named, f"{place}.{change}")
        assert updated(of(before), dtype) != updated(of(after), dtype), change

    return case


def cases_of(
    of: Callable[[RunConfig], AnyOptimizer], place: str, run: dict[str, Case], *base: str
) -> dict[str, Case]:
    """Cases of all keys of an optimizer; `run` is what shows the type, by its name."""
    found: dict[str, Case] = {}
    for kind, keys in KEYS.items():
        found[f"{place}.type ({kind})"] = run[kind]
        for name, value in {**keys, "weight_decay": "0.5", "masters": "bf16"}.items():
            found[f"{place}.{name} ({kind})"] = asks(of, place, kind, f"{name}={value}", *base)
    return found


def state_in_host_memory_gives_the_same_bits(workshop: Workshop) -> None:
    """Host and device are both the CPU, which `check` would refuse."""
    updates: list[int] = []
    update = HostState.update

    def counted(self: HostState, *args: object, **kwargs: object) -> object:
        updates.append(len(self.buckets))
        return update(self, *args, **kwargs)

    with (
        patch.object(HostState, "update", counted),
        patch("homeostat.train.runtime.find_device_conflicts", return_value=[]),
    ):
        away = workshop.again("trainer.backend.offload_optimizer=true")
    assert len(updates) == 3
    assert_same(workshop.run(), away, "bits")


def layers_in_host_memory_give_the_same_bits(workshop: Workshop) -> None:
    copied: list[int] = []
    fill = WeightStream._fill

    def counted(self: WeightStream, layer: int) -> None:
        copied.append(layer)
        fill(self, layer)

    with (
        patch.object(WeightStream, "_fill", counted),
        patch("homeostat.train.runtime.find_device_conflicts", return_value=[]),
    ):
        away = workshop.again(
            "trainer.backend={offload_optimizer: true, offload_params: true}",
        )
    # Two layers, which both have a slot: once in each of three updates,
    # and before each of them for a row that is scored by itself.
    assert copied == [0, 1] * 6
    assert_same(workshop.run(), away, "bits")


TYPES: dict[str, Case] = {
    "adamw": refuses("trainer.optimizer.type=sgd", r"optimizer\.type"),
    "muon": alters("trainer.optimizer.type=muon"),
    "adafactor": alters("trainer.optimizer.type=adafactor"),
}
CASES: dict[str, Case] = {
    **cases_of(lambda config: config.trainer.optimizer, "trainer.optimizer", TYPES),
    "trainer.backend.offload_optimizer (local)": all_of(
        refuses("trainer.backend.offload_optimizer=true", "already in host memory"),
        state_in_host_memory_gives_the_same_bits,
    ),
    "trainer.backend.offload_params (local)": all_of(
        refuses("trainer.backend.offload_params=true", "must be in host memory too"),
        layers_in_host_memory_give_the_same_bits,
    ),
}
