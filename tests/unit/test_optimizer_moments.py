"""Moments in bf16 and in 8 bits: rounding, code book, and learning as with fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from homeostat.config.optimizer import AdamWConfig, AnyOptimizer, MuonConfig
from homeostat.ops.moments import code_book, encode, read_moment, write_moment, zero_moment
from homeostat.ops.stochastic import Noise, noise_at, random_bits, round_to_bf16, tensor_key
from homeostat.train.optimizers.optimizer import MasterOptimizer

CPU = torch.device("cpu")


def dettmers_map(*, signed: bool) -> np.ndarray:
    """The dynamic map as the paper's authors write it down, with 7 exponent bits of 8."""
    data: list[float] = []
    for i in range(7):
        items = int(2**i + 1 if signed else 2 ** (i + 1) + 1)
        boundaries = np.linspace(0.1, 1, items)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += ((10 ** (-6 + i)) * means).tolist()
        if signed:
            data += (-(10 ** (-6 + i)) * means).tolist()
    data += [0, 1.0]
    return np.sort(np.array(data))


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_book_is_the_published_one_and_the_nearest_value_is_taken(signed: bool) -> None:
    book = dettmers_map(signed=signed)
    assert len(book) == 256
    np.testing.assert_allclose(code_book(signed).numpy(), book, rtol=1e-6, atol=0)
    rng = np.random.default_rng(0)
    value = rng.normal(size=1000) * 10 ** rng.uniform(-6, 2, 1000)
    value[300:500] = 0.0
    value = value if signed else np.abs(value)
    codes, scales = encode(torch.tensor(value).float(), signed=signed)
    value = value.astype(np.float32).astype(np.float64)
    for block in range(4):
        here = slice(256 * block, min(256 * block + 256, 1000))
        largest = np.abs(value[here]).max()
        assert float(scales[block]) == np.float32(largest)
        distance = np.abs(value[here, None] / (largest or 1.0) - book[None])
        chosen = np.take_along_axis(distance, codes[here, None].numpy().astype(int), 1)[:, 0]
        np.testing.assert_allclose(chosen, distance.min(1), rtol=1e-4, atol=1e-7)
    # Zeros, and a block of nothing but zeros, stay zeros.
    moment = zero_moment(torch.empty(1000), "8bit", signed=signed, device=CPU)
    assert not read_moment(moment).any()
    write_moment(moment, torch.tensor(value).float(), noise=Noise(0))
    assert not read_moment(moment)[300:500].any()
    largest = np.abs(value).argmax()
    assert float(read_moment(moment)[largest]) == pytest.approx(value[largest], rel=1e-2)


def test_stochastic_rounding_has_no_bias_and_rounds_to_neighbours() -> None:
    """Mean over many draws: its error is far below half a unit in the last place."""
    exact = torch.tensor([1.001, -1.001, 3.14159, 1e-20, -255.4])
    below = torch.tensor([1.0, -1.0, 3.140625, 0.0, -255.0])
    draws, count = 20_000, len(exact)
    sums = torch.zeros(count, dtype=torch.float64)
    spacing = (exact.abs().log2().floor() - 7).exp2().double()
    for step in range(4):
        bits = random_bits(noise_at(step, key=7), draws // 4 * count, device=CPU)
        values = exact.repeat(draws // 4)
        rounded = round_to_bf16(values, bits).double().view(-1, count)
        assert ((rounded - exact.double()).abs() < spacing).all()
        sums += rounded.sum(0)
    assert len(torch.unique(rounded[:, 0])) == 2
    assert below[0] in rounded[:, 0]
    # The standard deviation of the mean is at most half a unit / sqrt(draws).
    assert ((sums / draws - exact.double()).abs() < 4 * 0.5 * spacing / draws**0.5).all()


def test_the_random_bits_are_a_function_of_key_step_and_element_alone() -> None:
    noise = noise_at(3, key=tensor_key(0, "a.weight"))
    whole = random_bits(noise, 1000, device=CPU)
    parts = [random_bits(noise.shifted(start), 250, device=CPU) for start in range(0, 1000, 250)]
    assert torch.equal(whole, torch.cat(parts))
    others = [
        noise_at(4, key=tensor_key(0, "a.weight")),
        noise_at(3, key=tensor_key(1, "a.weight")),
        noise_at(3, key=tensor_key(0, "b.weight")),
        noise.other(),
    ]
    for other in others:
        agree = (random_bits(other, 1000, device=CPU) ^ whole) & 1
        assert 400 < int(agree.sum()) < 600
    # Every bit is fair, and neighbours are not alike.
    many = random_bits(Noise(123), 2**15, device=CPU)
    ones = torch.stack([((many >> place) & 1).double().mean() for place in range(32)])
    assert ((ones - 0.5).abs() < 4 * 0.5 / 2**7.5).all()
    shifted = ((many[1:] ^ many[:-1])[:, None] >> torch.arange(32)) & 1
    assert abs(float(shifted.double().mean()) - 0.5) < 0.01


def test_what_is_not_finite_stays_so() -> None:
    value = torch.tensor([float("inf"), float("-inf"), float("nan")])
    full_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    bits = torch.full((4,), -1, dtype=torch.int32)
    rounded = round_to_bf16(torch.cat([value, full_nan]), bits).float()
    assert rounded[:2].tolist() == [float("inf"), float("-inf")]
    assert rounded[2:].isnan().all()


def losses(config: AnyOptimizer, *, dtype: torch.dtype = torch.float32) -> list[float]:
    """A small network learns to copy another one."""
    torch.manual_seed(0)
    sizes = {"layers.0.weight": (96, 64), "layers.1.weight": (48, 96), "layers.0.bias": (96,)}
    params = {
        name: (torch.randn(size) / 8).to(dtype).requires_grad_() for name, size in sizes.items()
    }
    teacher = {name: torch.randn(size) / 8 for name, size in sizes.items()}
    optimizer, found = MasterOptimizer(params.items(), config, seed=1), []

    def output(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = x @ weights["layers.0.weight"].float().T + weights["layers.0.bias"].float()
        return hidden.relu() @ weights["layers.1.weight"].float().T

    for step in range(120):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
        loss = (output(params, x) - output(teacher, x)).square().mean()
        loss.backward()
        optimizer.step(learning_rate=5e-3, grad_norm=1.0, max_grad_norm=None)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_moments_of_fewer_bits_learn_as_fp32_does() -> None:
    plain = losses(AdamWConfig(weight_decay=0.01))
    assert plain[-1] < 0.1 * plain[0]
    for moments in ("bf16", "8bit"):
        found = losses(AdamWConfig(weight_decay=0.01, moments=moments))
        assert found != plain
        assert np.mean(found[-20:]) == pytest.approx(np.mean(plain[-20:]), rel=0.1), moments
    plain = losses(MuonConfig(type="muon", weight_decay=0.01))
    assert plain[-1] < 0.1 * plain[0]
    for moments in ("bf16", "8bit"):
        found = losses(MuonConfig(type="muon", weight_decay=0.01, moments=moments))
        assert np.mean(found[-20:]) == pytest.approx(np.mean(plain[-20:]), rel=0.15), moments


def test_bf16_weights_without_masters_take_small_updates_on_average() -> None:
    """Steps of 1e-4 on weights near 1, whose spacing in bf16 is 2**-8: none would be seen."""
    param = torch.ones(64, 128, dtype=torch.bfloat16).requires_grad_()
    optimizer = MasterOptimizer(
        [("layers.0.weight", param)], AdamWConfig(weight_decay=0.0, masters="bf16")
    )
    for _ in range(20):
        optimizer.gradients.add("layers.0.weight", torch.ones(64, 128))
        optimizer.step(learning_rate=1e-4, grad_norm=1.0, max_grad_norm=None)
        optimizer.zero_grad()
    assert optimizer.masters["layers.0.weight"].dtype == torch.bfloat16
    assert not any(key.startswith("master.") for key in optimizer.state())
    moved = 1.0 - float(param.detach().double().mean())
    assert moved == pytest.approx(20 * 1e-4, rel=0.05)


@pytest.mark.parametrize(
    ("config", "each"),
    [
        ({"moments": "fp32"}, 12),
        ({"moments": "bf16"}, 8),
        ({"moments": "8bit"}, 6 + 2 * 4 / 256),
        ({"moments": "bf16", "masters": "bf16"}, 4),
    ],
)
def test_an_element_takes_the_bytes_that_it_should(config: dict[str, Any], each: float) -> None:
    params = [("layers.0.weight", torch.zeros(64, 128, dtype=torch.bfloat16).requires_grad_())]
    state = MasterOptimizer(params, AdamWConfig(weight_decay=0.0, **config)).state()
    assert sum(t.nbytes for t in state.values()) == 64 * 128 * each + 4


def test_small_tensors_keep_fp32_moments_beside_8_bit_ones() -> None:
    params = [
        (name, torch.zeros(size).requires_grad_()) for name, size in (("a", 4095), ("b", 4096))
    ]
    state = MasterOptimizer(params, AdamWConfig(weight_decay=0.0, moments="8bit")).state()
    assert {"exp_avg.a", "exp_avg_8bit.b", "exp_avg_absmax.b"} <= state.keys()
    assert "exp_avg.b" not in state
