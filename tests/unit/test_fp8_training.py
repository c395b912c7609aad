"""Linear maps and experts in FP8 against their formulas, and models that are rewritten to them."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import SIZES
from tests.support import tiny
from torch import Tensor

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.model import LoraConfig
from homeostat.errors import ConfigError, ModelError
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.lora import apply_lora, lora_modules
from homeostat.ops.attention import PackedLayout
from homeostat.ops.experts import experts_of
from homeostat.precision.fp8 import dequantise, quantise
from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.fp8_linear import Fp8Product, SharedInputs, WeightCopies
from homeostat.precision.fp8_model import Fp8Rewrite, rewrite_fp8
from homeostat.precision.history import AmaxHistory
from homeostat.precision.invariant import EmulatedTiles
from homeostat.precision.operands import Emulation
from homeostat.precision.recipe import E4M3, E5M2, Fp8Recipe
from homeostat.run.preflight.precision import precision_items
from homeostat.run.sizing.estimate import loss_of
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch

CPU = torch.device("cpu")
POLICY = Role.POLICY
QWEN3 = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False}
RECIPES = {
    "blockwise": Fp8Recipe("blockwise"),
    "blockwise, powers of two": Fp8Recipe("blockwise", power_of_two=True),
    "rowwise": Fp8Recipe("rowwise"),
    "tensorwise, e5m2": Fp8Recipe("tensorwise", gradients=E5M2),
    "bf16 gradients": Fp8Recipe("blockwise", gradients=None),
}


class Counting(Emulation):
    """Counts how often something is quantised."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def operands(self, x_RC: Tensor, recipe: Fp8Recipe, dtype: torch.dtype, **how) -> tuple:
        self.seen.append("weight" if how.get("is_weight") else "row")
        return super().operands(x_RC, recipe, dtype, **how)


def product(recipe: Fp8Recipe, arithmetic: Emulation | None = None, **parts) -> Fp8Product:
    arithmetic = arithmetic or Emulation()
    history = {"limit": 448.0, "device": CPU}
    return Fp8Product(
        name="map",
        recipe=recipe,
        arithmetic=arithmetic,
        weights=WeightCopies(recipe, arithmetic),
        shared=parts.get("shared", SharedInputs()),
        input_amax=AmaxHistory(recipe.history, **history),
        gradient_amax=AmaxHistory(recipe.history, **history),
    )


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def there(x: Tensor, block, recipe: Fp8Recipe, dtype: torch.dtype = E4M3) -> Tensor:
    found = quantise(x, block=block, dtype=dtype, power_of_two=recipe.power_of_two)
    return dequantise(found).double()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_all_three_products_are_those_of_the_dequantised_operands(recipe: Fp8Recipe) -> None:
    # No size divides by 128 or 16.
    x, weight, bias = drawn(37, 150, seed=0), drawn(70, 150, seed=1), drawn(70, seed=2)
    grad = drawn(37, 70, seed=3)
    x[5] = 0.0
    grad[6] = 0.0
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = product(recipe)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    rows, squares = recipe.rows, recipe.weights
    y = there(x, rows, recipe) @ there(weight, squares, recipe).t() + bias.double()
    if recipe.gradients is None:
        dx, dweight = grad.double() @ weight.double(), grad.double().t() @ x.double()
    else:
        turned = there(weight.t(), squares, recipe)
        dx = there(grad, rows, recipe, recipe.gradients) @ turned.t()
        dweight = there(grad.t(), rows, recipe, recipe.gradients) @ there(x.t(), rows, recipe).t()
    for ours, expected in zip(found, (y, dx, dweight, grad.double().sum(0)), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-4)
    assert not found[1][6].any()
    # Close to the exact map: e4m3 has 3 bits of mantissa.
    exact = x @ weight.t() + bias
    assert 1e-3 < float((found[0] - exact).norm() / exact.norm()) < 0.06


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_in_invariant_numerics_the_bits_of_a_row_do_not_depend_on_other_rows(recipe: str) -> None:
    x, weight = drawn(70, 700, seed=0), drawn(96, 700, seed=1)
    fixed = product(Fp8Recipe(scaling=recipe), EmulatedTiles())
    whole = fixed(x, weight, None)
    for count in (1, 2, 5, 9, 33):
        assert torch.equal(fixed(x[:count].clone(), weight, None), whole[:count])


def test_inputs_that_maps_share_are_quantised_once_and_weights_once_an_update() -> None:
    arithmetic, shared = Counting(), SharedInputs()
    maps = [product(RECIPES["blockwise"], arithmetic, shared=shared) for _ in range(3)]
    weights = [drawn(8, 16, seed=number).requires_grad_() for number in range(3)]
    for _ in range(2):
        x = drawn(4, 16, seed=9).requires_grad_()
        sum(one(x, w, None).sum() for one, w in zip(maps, weights, strict=True)).backward()
    # Of each of two micro-batches the inputs and three gradients; of each weight two copies.
    assert (arithmetic.seen.count("row"), arithmetic.seen.count("weight")) == (8, 6)
    with torch.no_grad():
        x.mul_(2.0)
        before = maps[0](x, weights[0], None)
        weights[0].mul_(3.0)
        assert torch.equal(maps[0](x, weights[0], None), before)
        maps[0].weights.changed()
        torch.testing.assert_close(maps[0](x, weights[0], None), 3 * before, rtol=0.1, atol=0.1)


def test_copies_of_inputs_are_freed_with_them() -> None:
    shared, x = SharedInputs(), drawn(4, 16, seed=0)
    product(RECIPES["blockwise"], shared=shared)(x, drawn(8, 16, seed=1), None)
    pair = shared.find(x, columns=False)
    assert pair is not None
    freed = weakref.ref(pair[0].values)
    del pair, x
    assert freed() is None


@pytest.mark.parametrize("scaling", ["blockwise", "rowwise", "tensorwise"])
def test_experts_are_near_the_exact_ones_and_exactly_those_of_dequantised_rows(scaling) -> None:
    recipe = Fp8Recipe(scaling)
    x, gate_up, down = drawn(20, 40, seed=0), drawn(4, 48, 40, seed=1), drawn(4, 40, 24, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, gate_up / 6, down / 5)]
    ids = drawn(20, 4, seed=3).index_fill(1, torch.tensor(2), -9.0).topk(2).indices
    weights = drawn(20, 2, seed=4).abs()
    how = {"numerics": "fast", "kernel": "auto"}

    def both(layer) -> list[Tensor]:
        out = layer(leaves[0], ids, weights, *leaves[1:], **how)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    found, exact = both(Fp8Experts("experts", recipe, device=CPU)), both(experts_of)
    for ours, theirs in zip(found, exact, strict=True):
        assert 1e-3 < float((ours - theirs).norm() / theirs.norm()) < 0.09
    # The forward pass by its formula, one token and one expert at a time.
    stacks = [there(leaf.detach(), recipe.weights, recipe) for leaf in leaves[1:]]
    pairs = [(token, slot, int(ids[token, slot])) for token in range(20) for slot in range(2)]
    order = sorted(pairs, key=lambda pair: pair[2])
    rows = there(torch.stack([x[token] for token, _, _ in order]), recipe.rows, recipe)
    gates = torch.stack([stacks[0][e] @ row for row, (_, _, e) in zip(rows, order, strict=True)])
    gate, up = gates.float().chunk(2, dim=1)
    gated = there(torch.nn.functional.silu(gate) * up, recipe.rows, recipe)
    expected = torch.zeros(20, 40, dtype=torch.float64)
    for row, (token, slot, expert) in zip(gated, order, strict=True):
        expected[token] += weights[token, slot] * (stacks[1][expert] @ row)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-4)


def decoder(*, checkpointing=False, **sizes) -> Decoder:
    torch.manual_seed(0)
    config = decoder_config({**SIZES, **QWEN3, **sizes})
    model = Decoder(config, kernel="sdpa", gradient_checkpointing=checkpointing)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def hidden(model: Decoder, lengths=(9, 5, 9)) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.hidden(tokens, positions, PackedLayout.of(lengths, CPU))


def rewritten(model: Decoder, **settings) -> Fp8Rewrite:
    return rewrite_fp8(model, Fp8Config(**settings), device=CPU)


def test_a_rewrite_keeps_every_parameter_and_its_place() -> None:
    model = decoder()
    before = {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()}
    state = list(model.state_dict())
    plain = hidden(model)
    rewrite = rewritten(model, start_step=3)
    assert torch.equal(hidden(model), plain)
    rewrite.begin_step(3)
    close = hidden(model)
    assert 1e-3 < float((close - plain).detach().norm() / plain.detach().norm()) < 0.1
    assert {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == state
    # The switch is a function of the step, in both directions.
    rewrite.begin_step(2)
    assert torch.equal(hidden(model), plain)


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_packed_rows_are_those_computed_alone(recipe: str) -> None:
    model = decoder()
    rewritten(model, recipe=recipe)
    packed = hidden(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], (23,), generator=generator)
    alone = [
        model.hidden(part, torch.arange(len(part)), PackedLayout.of([len(part)], CPU))
        for part in tokens.split([9, 5, 9])
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_recomputed_layers_have_the_same_gradients(checkpointing) -> None:
    found = []
    for how in (False, checkpointing):
        model = decoder(checkpointing=how)
        rewritten(model, recipe="tensorwise", scaling="delayed")
        hidden(model).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_adapters_stay_as_they_are_over_maps_in_fp8() -> None:
    model = decoder()
    apply_lora(model, LoraConfig(rank=2), seed=0)
    exact = hidden(model).detach()
    rewrite = rewritten(model)
    assert {layer.name for layer in rewrite.layers()} == {name for name, _ in lora_modules(model)}
    close = hidden(model)
    assert 1e-3 < float((close.detach() - exact).norm() / exact.norm()) < 0.1
    close.square().sum().backward()
    adapted = dict(lora_modules(model))["model.layers.0.mlp.up_proj"]
    assert adapted.lora_B.weight.grad.any()
    assert adapted.weight.grad is None


def test_what_cannot_be_in_fp8_is_named() -> None:
    with pytest.raises(ModelError, match=r"model\.embed_tokens cannot.*lm_head cannot"):
        rewritten(decoder(), skip_layers=())
    moe = {"model_type": "mixtral", "num_local_experts": 2}
    with pytest.raises(ModelError, match=r"experts cannot have e5m2 gradients"):
        rewritten(decoder(**moe), recipe="tensorwise")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fp8": {"scaling": "delayed"}}, "many"),
        ({"fp8": {"amax_history": 4}}, "no history"),
        ({"fp8": {"start_step": 9}, "max_steps": 8}, "no step would be in FP8"),
        ({"fp8": {}, "backend": {"type": "fsdp"}}, "ranks gather a layer's weights"),
        ({"fp8": {}, "backend": {"type": "local", "offload_experts": True}}, "streams experts"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings, match) -> None:
    with pytest.raises(ConfigError, match=match):
        tiny.config(tmp_path, trainer=settings)


def trainer_of(folder: Path, **fp8) -> LocalTrainer:
    config = tiny.config(folder, trainer={"device": "cpu", "fp8": fp8})
    return local_trainer(config, resolve_runtime(config, kept=PLAIN))


def updates(trainer: LocalTrainer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rng = np.random.default_rng(step)
        rows = [TokenRow(n, rng.integers(3, 90, 12), np.ones(12, np.float32)) for n in range(3)]
        trainer.begin_step(step)
        spec = loss_spec(SftConfig(), rows)
        trainer.accumulate(
            POLICY, [TrainBatch.of(rows[:2]), TrainBatch.of(rows[2:])], spec, step=step
        )
        losses.append(trainer.apply(POLICY, step=step, learning_rate=1e-2).loss)
    return losses


@pytest.mark.parametrize(
    "fp8", [{"start_step": 3}, {"recipe": "tensorwise", "scaling": "delayed", "amax_history": 3}]
)
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path, fp8) -> None:
    whole = trainer_of(tmp_path, **fp8)
    losses = updates(whole, range(1, 6))
    first = trainer_of(tmp_path, **fp8)
    before = updates(first, range(1, 4))
    folder = tmp_path / "saved"
    folder.mkdir()
    first.save(folder)
    second = trainer_of(tmp_path, **fp8)
    second.load(folder)
    assert before + updates(second, range(4, 6)) == losses
    assert second.checksums(POLICY) == whole.checksums(POLICY)
    # It is not the run without FP8.
    assert updates(trainer_of(tmp_path, **{**fp8, "start_step": 6}), range(1, 6)) != losses


@pytest.mark.parametrize("changed", [{"amax_history": 5}, {"amax_history": 2}, {"skip_last": 1}])
def test_delayed_scaling_is_resumed_with_settings_that_may_change(tmp_path: Path, changed) -> None:
    delayed = {"recipe": "tensorwise", "scaling": "delayed", "amax_history": 3}
    first, second = trainer_of(tmp_path, **delayed), trainer_of(tmp_path, **{**delayed, **changed})
    updates(first, range(1, 3))
    first.save(tmp_path)
    second.load(tmp_path)
    own, saved = (trainer._rewrites[0].state() for trainer in (second, first))
    assert all(torch.equal(own[name][:2], saved[name][:2]) for name in own.keys() & saved.keys())


def test_an_update_that_is_discarded_leaves_no_trace_in_the_history(tmp_path: Path) -> None:
    delayed = {"recipe": "tensorwise", "scaling": "delayed"}
    plain, retried = trainer_of(tmp_path, **delayed), trainer_of(tmp_path, **delayed)
    updates(plain, range(1, 3))
    updates(retried, range(1, 2))
    rows = [TokenRow(0, np.arange(3, 30), np.ones(27, np.float32))]
    retried.accumulate(POLICY, [TrainBatch.of(rows)], loss_spec(SftConfig(), rows), step=2)
    retried.discard(POLICY)
    updates(retried, range(2, 3))
    assert plain.checksums(POLICY) == retried.checksums(POLICY)


def test_a_watched_pass_shows_every_layer_and_changes_no_bit() -> None:
    model = decoder()
    rewrite = rewritten(model)
    plain, shown = hidden(model), set()
    with rewrite.watched(lambda name, what, tensor, expected: shown.add((name, what))):
        seen = hidden(model)
        seen.square().sum().backward()
    assert torch.equal(seen, plain)
    names = {layer.name for layer in rewrite.layers()}
    assert shown == {(name, what) for name in names for what in ("input", "weight", "gradient")}


def test_check_says_what_is_in_fp8_and_that_a_cpu_emulates_it(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, trainer={"device": "cpu", "fp8": {"skip_last": 1}})
    (item,) = precision_items(config, CPU)
    assert item.level == "warning"
    assert "emulated on this CPU: for correctness only" in item.text
    assert "padded with zeros to multiples of 128" in item.text
    assert "embed" in item.text
    assert item.facts["fp8_layers"] == 7 * (item.facts["fp8_layers"] // 7)
    assert list(precision_items(tiny.config(tmp_path), CPU)) == []
    wrong = tiny.config(tmp_path, trainer={"device": "cpu", "fp8": {"skip_layers": ["lm_head"]}})
    with pytest.raises(ModelError, match=r"embed_tokens cannot be computed in FP8"):
        list(precision_items(wrong, CPU))


def test_the_estimate_counts_the_copies_of_weights(tmp_path: Path) -> None:
    found = {}
    rows = [TokenRow(0, np.arange(3, 30), np.ones(27, np.float32))]
    for name, fp8 in (("plain", None), ("fp8", {}), ("forward", {"format": "bf16_gradients"})):
        config = tiny.config(tmp_path, trainer={"device": "cpu", "fp8": fp8})
        runtime = resolve_runtime(config, kept=PLAIN)
        batch = TrainBatch.of(rows)
        update = estimate_update(config.for_trainer, runtime, batch, loss_of(config, batch))
        found[name] = update.weights
    matrices = sum(
        weight.numel()
        for layer in trainer_of(tmp_path).roles[POLICY].rewrites[0].layers()
        for weight in layer.weights.values()
    )
    # An emulation holds its copies in fp32.
    assert found["fp8"] - found["plain"] == 2 * 4 * matrices
    assert found["forward"] - found["plain"] == 4 * matrices


def test_a_transformers_model_is_rewritten_to_the_same_maps(tmp_path: Path) -> None:
    start = tiny.config(tmp_path, trainer={"device": "cpu"})
    path = tmp_path / "pretrained"
    local_trainer(start, resolve_runtime(start, kept=PLAIN)).export(POLICY, path, start)
    found, names = [], []
    for implementation in ("native", "transformers"):
        model = {"path": str(path), "init": "pretrained", "implementation": implementation}
        config = tiny.config(tmp_path, model=model, trainer={"device": "cpu", "fp8": {}})
        trainer = local_trainer(config, resolve_runtime(config, kept=PLAIN))
        (rewrite,) = trainer.roles[POLICY].rewrites
        names.append({layer.name for layer in rewrite.layers()})
        found.append(updates(trainer, range(1, 3)))
    assert names[0] == names[1]
    assert found[1] == pytest.approx(found[0], rel=5e-3)
