"""Optimizer state in host memory: the same bits, whenever copies happen to be done.

Here host and device are both the CPU. `LateStream` copies as a GPU's side stream may at worst: only
when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from homeostat.config.optimizer import AdafactorConfig, AdamWConfig, AnyOptimizer, MuonConfig
from homeostat.ops.host_memory import HostMemory
from homeostat.train.optimizers import host_state, muon
from homeostat.train.optimizers.catalogue import rule_of
from homeostat.train.optimizers.host_state import HostState
from homeostat.train.optimizers.optimizer import MasterOptimizer, make_slot

CPU = torch.device("cpu")
SHAPES = {
    "model.embed_tokens.weight": (90, 64),
    "model.layers.0.up_proj.weight": (96, 64),
    "model.layers.0.experts.down_proj": (6, 32, 64),
    "model.layers.0.norm.weight": (64,),
    "lm_head.weight": (90, 64),
}


class LateEvent:
    """The end of a copy; all copies before it on its stream are done by then."""

    def __init__(self, stream: LateStream, number: int) -> None:
        self.stream, self.number = stream, number

    def synchronize(self) -> None:
        while self.stream.done <= self.number:
            copy, after = self.stream.copies[self.stream.done]
            self.stream.done += 1
            if after is not None:
                after.synchronize()
            copy()


class LateStream:
    """Stands for `SideStream`."""

    waits = 0

    def __init__(self, device: torch.device) -> None:
        self.copies: list[tuple[Callable[[], None], Any]] = []
        self.done = 0

    def run(self, copy: Callable[[], None], *, after: Any = None) -> LateEvent:
        self.copies.append((copy, after))
        return LateEvent(self, len(self.copies) - 1)

    def wait(self, event: LateEvent) -> None:
        LateStream.waits += 1
        event.synchronize()

    def finish(self, event: LateEvent | None) -> None:
        if event is not None:
            event.synchronize()

    def uses(self, tensor: Tensor) -> None:
        pass


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "SideStream", LateStream)
    # Many buckets, of which some tensors have several.
    monkeypatch.setattr(host_state, "BUCKET_BYTES", 24 * 1024)
    monkeypatch.setattr(muon, "_GROUP_ELEMENTS", 2 * 32 * 64)


def some(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(s, generator=generator).to(dtype) for name, s in SHAPES.items()}


def optimizer_of(
    config: AnyOptimizer, dtype: torch.dtype, *, offload: bool, on_host: bool = False
) -> MasterOptimizer:
    params = {name: value.requires_grad_() for name, value in some(100, dtype).items()}
    made = MasterOptimizer(params.items(), config, seed=3, offload_to=CPU if offload else None)
    if on_host:
        slots = [(slot, params[name]) for name, slot in made.slots.items()]
        made.host = HostState(slots, made.rule, device=CPU, on_host=params.keys())
    return made


def update(optimizer: MasterOptimizer, step: int) -> list[float]:
    for name, grad in some(step).items():
        if name != "lm_head.weight" or step != 2:
            optimizer.gradients.add(name, grad)
    optimizer.step(learning_rate=1e-2, grad_norm=2.0, max_grad_norm=1.0, measure=True)
    optimizer.zero_grad()
    return optimizer.update_norms().tolist()


def everything(optimizer: MasterOptimizer) -> dict[str, Tensor]:
    params = {f"param.{name}": param.detach() for name, param in optimizer.params.items()}
    return {**params, **optimizer.state()}


CONFIGS: dict[str, AnyOptimizer] = {
    "adamw": AdamWConfig(weight_decay=0.1),
    "adamw bf16": AdamWConfig(weight_decay=0.1, moments="bf16"),
    "adamw 8bit": AdamWConfig(weight_decay=0.1, moments="8bit"),
    "adamw bf16 masters": AdamWConfig(weight_decay=0.1, moments="8bit", masters="bf16"),
    "muon": MuonConfig(type="muon", weight_decay=0.1),
    "muon 8bit": MuonConfig(type="muon", weight_decay=0.1, moments="8bit"),
    "adafactor": AdafactorConfig(type="adafactor", weight_decay=0.1),
}


@pytest.mark.parametrize("on_host", [False, True], ids=["", "weights too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_updates_have_the_bits_of_state_on_the_device(
    name: str, dtype: torch.dtype, on_host: bool
) -> None:
    plain = optimizer_of(CONFIGS[name], dtype, offload=False)
    away = optimizer_of(CONFIGS[name], dtype, offload=True, on_host=on_host)
    assert away.host is not None
    for step in (1, 2, 3):
        assert update(away, step) == pytest.approx(update(plain, step), rel=1e-5)
        wanted, found = everything(plain), everything(away)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), (step, key)
        # What a probe asks for between two updates.
        sums = zip(away.checksums().items(), plain.checksums().items(), strict=True)
        assert all(int(a) == int(b) and n == m for (n, a), (m, b) in sums)
        torch.testing.assert_close(away.master_norms(), plain.master_norms(), rtol=1e-5, atol=0)


def test_weights_in_host_memory_are_there_when_the_update_returns() -> None:
    """Whoever copies them for the next pass does not know of the streams here."""
    config, name = AdamWConfig(weight_decay=0.0), "model.layers.0.up_proj.weight"
    rule = rule_of(config)
    found = []
    for on_host in ((), (name,)):
        param = some(0)[name].clone()
        slot = make_slot(name, param, config, rule, seed=0, memory=HostMemory(pinned=False))
        state = HostState([(slot, param)], rule, device=CPU, on_host=on_host)
        grads = {name: some(1)[name].clone()}
        rule.count([slot])
        state.update(grads, learning_rate=0.1, measure=False)
        # The gradient's memory is free for the next one, too.
        grads[name].zero_()
        found.append(param)
    assert torch.equal(*found)
    assert not torch.equal(found[0], some(0)[name])


def test_the_first_buckets_are_loaded_before_the_next_update_asks() -> None:
    optimizer = optimizer_of(CONFIGS["adamw"], torch.bfloat16, offload=True)
    update(optimizer, 1)
    state = optimizer.host
    assert state is not None
    assert len(state.buckets) > host_state.NUM_BUFFERS
    assert [state._held[n][0] for n in range(host_state.NUM_BUFFERS)] == [0, 1, 2]
    begun = len(state._inward.copies)
    assert begun == len(state.buckets) + host_state.NUM_BUFFERS
    update(optimizer, 2)
    assert len(state._inward.copies) == begun + len(state.buckets)


def test_what_was_read_from_a_checkpoint_is_what_the_next_update_begins_with() -> None:
    first, second = (
        optimizer_of(CONFIGS["adamw 8bit"], torch.bfloat16, offload=True) for _ in "ab"
    )
    for step in (1, 2):
        update(first, step)
    update(second, 5)
    saved = {key: tensor.clone() for key, tensor in first.state().items()}
    for key, tensor in second.state().items():
        tensor.copy_(saved[key])
    second.loaded()
    for optimizer in (first, second):
        update(optimizer, 3)
    wanted, found = everything(first), everything(second)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_a_device_holds_buffers_only() -> None:
    optimizer = optimizer_of(CONFIGS["adamw"], torch.bfloat16, offload=True)
    assert optimizer.host is not None
    assert optimizer.host.device_bytes <= host_state.NUM_BUFFERS * host_state.BUCKET_BYTES
    assert optimizer.host.device_bytes < sum(t.nbytes for t in optimizer.state().values()) / 3


def test_host_memory_keeps_values_and_shapes_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty

    def counted(size: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            made.append(size)
        return empty(size, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    memory = HostMemory(pinned=True, block_bytes=4096)
    tensors = [torch.randn(10, 3), torch.arange(5, dtype=torch.uint8), torch.randn(2000)]
    kept = [memory.keep(tensor) for tensor in tensors]
    assert made == [4096, 8192]
    assert all(torch.equal(a, b) and a is not b for a, b in zip(kept, tensors, strict=True))
