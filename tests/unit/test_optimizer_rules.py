"""AdamW, Muon and Adafactor against references in float64 that are written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from homeostat.config.optimizer import AdafactorConfig, AdamWConfig, AnyOptimizer, MuonConfig
from homeostat.train.optimizers.muon import matrix_shape, orthogonalised, update_scale
from homeostat.train.optimizers.optimizer import MasterOptimizer

Array = np.ndarray[Any, np.dtype[np.float64]]
NUM_STEPS = 6
RATE = 1e-2
SHAPES = {
    "model.embed_tokens.weight": (11, 6),
    "model.layers.0.q_proj.weight": (12, 6),
    "model.layers.0.down_proj.weight": (5, 9),
    "model.layers.1.experts.gate_up_proj": (3, 8, 6),
    "model.layers.1.experts.down_proj": (3, 6, 4),
    "model.layers.1.norm.weight": (6,),
    "lm_head.weight": (11, 6),
}


def some(step: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(step)
    # Columns of very different sizes, as gradients have.
    return {
        name: torch.tensor(rng.normal(size=shape) * 10 ** rng.uniform(-3, 0, shape[-1])).float()
        for name, shape in SHAPES.items()
    }


def trained(config: AnyOptimizer, *, rates: list[float] | None = None) -> dict[str, Tensor]:
    params = {name: value.requires_grad_() for name, value in some(100).items()}
    optimizer = MasterOptimizer(params.items(), config)
    for step in range(1, NUM_STEPS + 1):
        for name, grad in some(step).items():
            optimizer.gradients.add(name, grad)
        rate = RATE if rates is None else rates[step - 1]
        optimizer.step(learning_rate=rate, grad_norm=1.0, max_grad_norm=None)
        optimizer.zero_grad()
    return {name: param.detach() for name, param in params.items()}


def reference(update: Callable[..., Array], decay: float) -> dict[str, Array]:
    """`update(name, p, g, state, t)` returns what is taken off p; decay is decoupled."""
    params = {name: value.double().numpy() for name, value in some(100).items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in params}
    for step in range(1, NUM_STEPS + 1):
        for name, grad in some(step).items():
            p, g = params[name], grad.double().numpy()
            taken = update(name, p, g, states[name], step)
            params[name] = p * (1 - RATE * decay * (p.ndim > 1)) - taken
    return params


def compare(found: dict[str, Tensor], wanted: dict[str, Array], *, rtol: float) -> None:
    start = some(100)
    for name, value in found.items():
        moved = np.abs(wanted[name] - start[name].double().numpy()).max()
        assert moved > 1e-3, name
        np.testing.assert_allclose(
            value.double().numpy(), wanted[name], rtol=0, atol=rtol * moved, err_msg=name
        )


def adamw_update(name: str, p: Array, g: Array, state: dict[str, Any], t: int) -> Array:
    state["m"] = m = 0.8 * state.get("m", 0.0) + 0.2 * g
    state["v"] = v = 0.9 * state.get("v", 0.0) + 0.1 * g * g
    return RATE * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6)


ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}


def test_adamw_is_the_reference_and_torchs_own_to_the_bit() -> None:
    found = trained(AdamWConfig(**ADAM))
    compare(found, reference(adamw_update, 0.1), rtol=1e-5)
    params = {name: value.requires_grad_() for name, value in some(100).items()}
    groups = [
        {"params": [p for p in params.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=RATE, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for step in range(1, NUM_STEPS + 1):
        for name, grad in some(step).items():
            params[name].grad = grad
        theirs.step()
    for name, param in params.items():
        assert torch.equal(found[name], param.detach()), name


def newton_schulz(x: Array) -> Array:
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if is_tall else x


def muon_update(name: str, p: Array, g: Array, state: dict[str, Any], t: int) -> Array:
    if ".layers." not in name or p.ndim < 2:
        return adamw_update(name, p, g, state, t)
    state["b"] = b = 0.95 * state.get("b", 0.0) + 0.05 * g
    u = 0.05 * g + 0.95 * b
    # Each expert is a matrix, and so are gate and up.
    halves = 2 if name.endswith("gate_up_proj") else 1
    stack = u.reshape(-1, p.shape[-2] // halves, p.shape[-1])
    done = [0.2 * math.sqrt(max(x.shape)) * newton_schulz(x) for x in stack]
    return RATE * np.stack(done).reshape(p.shape)


def test_muon_is_the_reference_with_adamw_outside_of_layers() -> None:
    compare(trained(MuonConfig(type="muon", **ADAM)), reference(muon_update, 0.1), rtol=1e-4)


@pytest.mark.parametrize(("scale", "theirs"), [("match_rms", "match_rms_adamw"), ("original",) * 2])
def test_the_scale_and_the_momentum_are_those_of_torchs_muon(scale: Any, theirs: str) -> None:
    """Theirs iterates in bf16."""
    found = trained(MuonConfig(type="muon", scale=scale, nesterov=False, weight_decay=0.1))
    names = [name for name, shape in SHAPES.items() if ".layers." in name and len(shape) == 2]
    start = some(100)
    params = {name: start[name].clone().requires_grad_() for name in names}
    other = torch.optim.Muon(
        params.values(), lr=RATE, weight_decay=0.1, nesterov=False, adjust_lr_fn=theirs
    )
    for step in range(1, NUM_STEPS + 1):
        for name in names:
            params[name].grad = some(step)[name]
        other.step()
    for name in names:
        moved = (params[name].detach() - start[name]).norm()
        assert (found[name] - params[name].detach()).norm() < 0.03 * moved, name


def test_an_orthogonalised_matrix_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 40, 16), (2, 16, 40)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), iterations=5))
        assert values.min() > 0.6
        assert values.max() < 1.3
    assert not orthogonalised(torch.zeros(1, 3, 4), iterations=5).any()


def test_with_match_rms_an_update_is_as_large_as_adamws() -> None:
    """Root mean square 0.2, the one that Moonlight measured for AdamW."""
    torch.manual_seed(0)
    for shape in ((128, 32), (32, 128), (64, 64)):
        update = orthogonalised(torch.randn(1, *shape), iterations=5)
        rms = update.square().mean().sqrt() * update_scale(shape, "match_rms")
        assert float(rms) == pytest.approx(0.2, rel=0.25)


def test_gate_and_up_of_experts_are_two_matrices() -> None:
    assert matrix_shape("x.experts.gate_up_proj", torch.Size((4, 10, 3))) == (5, 3)
    assert matrix_shape("x.experts.down_proj", torch.Size((4, 10, 3))) == (10, 3)
    assert matrix_shape("x.gate_up_proj.weight", torch.Size((10, 3))) == (10, 3)


def adafactor_update(name: str, p: Array, g: Array, state: dict[str, Any], t: int) -> Array:
    share = t**-0.8
    square = g * g + 1e-30
    if p.ndim < 2:
        state["v"] = v = (1 - share) * state.get("v", 0.0) + share * square
    else:
        state["r"] = r = (1 - share) * state.get("r", 0.0) + share * square.mean(-1)
        state["c"] = c = (1 - share) * state.get("c", 0.0) + share * square.mean(-2)
        v = r[..., :, None] * c[..., None, :] / r.mean(-1)[..., None, None]
    u = g / np.sqrt(v)
    u /= max(1.0, np.sqrt((u * u).mean()) / 0.5)
    return RATE * u


def test_adafactor_is_the_reference() -> None:
    config = AdafactorConfig(type="adafactor", clip_threshold=0.5, weight_decay=0.1)
    compare(trained(config), reference(adafactor_update, 0.1), rtol=1e-4)


@pytest.mark.parametrize("scale_parameter", [False, True])
def test_adafactor_is_that_of_transformers(scale_parameter: bool) -> None:
    from transformers.optimization import Adafactor

    config = AdafactorConfig(type="adafactor", scale_parameter=scale_parameter, weight_decay=0.0)
    found = trained(config)
    params = {name: value.requires_grad_() for name, value in some(100).items()}
    theirs = Adafactor(
        params.values(), lr=RATE, relative_step=False, scale_parameter=scale_parameter
    )
    for step in range(1, NUM_STEPS + 1):
        for name, grad in some(step).items():
            params[name].grad = grad
        theirs.step()
    compare(found, {n: p.detach().double().numpy() for n, p in params.items()}, rtol=1e-4)


def test_adafactor_with_relative_steps_is_that_of_torch() -> None:
    config = AdafactorConfig(
        type="adafactor", relative_step=True, scale_parameter=True, weight_decay=0.0
    )
    # 1 / sqrt(t) is below the learning rate from the second step on.
    found = trained(config, rates=[0.8] * NUM_STEPS)
    params = {name: value.requires_grad_() for name, value in some(100).items()}
    theirs = torch.optim.Adafactor(params.values(), lr=0.8, eps=(1e-15, 1e-3), weight_decay=0.0)
    for step in range(1, NUM_STEPS + 1):
        for name, grad in some(step).items():
            params[name].grad = grad
        theirs.step()
    compare(found, {n: p.detach().double().numpy() for n, p in params.items()}, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(weight_decay=0.0),
        AdamWConfig(weight_decay=0.0, moments="8bit"),
        MuonConfig(type="muon", weight_decay=0.0),
        AdafactorConfig(type="adafactor", weight_decay=0.0),
    ],
    ids=lambda config: f"{config.type} {getattr(config, 'moments', '')}",
)
def test_the_rate_of_each_step_is_used_and_the_norms_of_updates_are_measured(
    config: AnyOptimizer,
) -> None:
    """Remedies change the learning rate between two steps."""
    params = {name: value.requires_grad_() for name, value in some(100).items()}
    optimizer = MasterOptimizer(params.items(), config)
    how = {"grad_norm": 1.0, "max_grad_norm": None, "measure": True}
    for step, rate in ((1, 1e-2), (2, 1e-2), (3, 1e-5)):
        before = {name: p.detach().clone() for name, p in params.items()}
        for name, grad in some(1).items():
            optimizer.gradients.add(name, grad.clone())
        optimizer.step(learning_rate=rate, **how)
        optimizer.zero_grad()
        moved = [float((p.detach() - before[n]).norm()) for n, p in params.items()]
        assert optimizer.update_norms().tolist() == pytest.approx(moved, rel=2e-2), step
        biggest = max(float((p.detach() - before[n]).abs().max()) for n, p in params.items())
        assert (biggest > 1e-3) == (rate == 1e-2)


def test_a_tensor_without_a_gradient_stays_and_is_not_counted() -> None:
    params = {name: value.requires_grad_() for name, value in some(100).items()}
    for config in (MuonConfig(type="muon", weight_decay=0.1), AdamWConfig(weight_decay=0.1)):
        optimizer = MasterOptimizer(params.items(), config)
        optimizer.gradients.add("lm_head.weight", torch.ones(11, 6))
        head = params["lm_head.weight"].detach().clone()
        optimizer.step(learning_rate=RATE, grad_norm=1.0, max_grad_norm=None, measure=True)
        optimizer.zero_grad()
        assert not torch.equal(head, params["lm_head.weight"].detach())
        for name in params.keys() - {"lm_head.weight"}:
            assert not optimizer.slots[name].state["step"]
        assert int((optimizer.update_norms() > 0).sum()) == 1
