"""What every Trainer must hold. A new backend is one more entry in TRAINERS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny

from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.ops.attention import PackedLayout
from homeostat.train.local import LocalTrainer, predicted_positions
from homeostat.train.runtime import Runtime
from homeostat.types import LossSpec, Role, TokenRow, TrainBatch

POLICY = Role.POLICY


def local(config: RunConfig, dtype: torch.dtype = torch.float32) -> LocalTrainer:
    runtime = Runtime(device=torch.device("cpu"), dtype=dtype, threads=1, pin_memory=False)
    loaded = load_model(
        config.model,
        config.lora,
        dtype=dtype,
        device=runtime.device,
        seed=config.seed,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
    )
    return LocalTrainer(loaded, config.trainer, runtime=runtime, seed=config.seed)


TRAINERS: dict[str, Callable[..., LocalTrainer]] = {"local": local}


@pytest.fixture(params=sorted(TRAINERS))
def build(request: pytest.FixtureRequest) -> Callable[..., LocalTrainer]:
    return TRAINERS[request.param]


def rows(num: int = 9, seed: int = 0) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    made = []
    for row_id in range(num):
        length = int(rng.integers(2, 40))
        weights = (rng.random(length) < 0.6).astype(np.float32) * rng.choice([0.5, 1.0, 2.0])
        weights[-1] = 1.0
        made.append(TokenRow(row_id, rng.integers(0, 299, length), weights))
    return made


def grads(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    named = trainer.optimizer.masters.items()
    return {name: m.grad.clone() for name, m in named if m.grad is not None}


def accumulate(
    trainer: LocalTrainer, split: list[list[TokenRow]], spec: LossSpec, *, step: int = 1
) -> None:
    for part in split:
        trainer.accumulate(POLICY, [TrainBatch.of(part)], spec, step=step)


@pytest.mark.parametrize("normalise", ["token", "row"])
@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.3}])
def test_the_gradient_does_not_depend_on_the_split(
    build: Callable[..., LocalTrainer], tmp_path: Path, normalise: str, lora: dict | None
) -> None:
    model = {"path": str(pretrained(tmp_path)), "init": "pretrained"}
    config = tiny.config(tmp_path, model=model, lora=lora)
    trainer, data = build(config), rows()
    spec = loss_spec(SftConfig(normalise=normalise), data)
    found = []
    for split in ([data], [[row] for row in data], [data[5:], data[:2], data[2:5]]):
        accumulate(trainer, split, spec)
        found.append((float(trainer.pending_loss()), grads(trainer)))
        trainer.discard(POLICY)
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        for name, tensor in gradient.items():
            torch.testing.assert_close(tensor, found[0][1][name], rtol=1e-4, atol=1e-7)


def pretrained(folder: Path) -> Path:
    """A folder with weights: adapters are refused on a random start."""
    target = folder / "pretrained"
    if not target.exists():
        trainer = local(tiny.config(folder))
        tiny.write_model(target)
        save_hf(trainer.weights(POLICY), target, source_config=trainer.loaded.sheet.source_config)
    return target


def test_the_loss_is_that_of_full_logits_in_float64(
    build: Callable[..., LocalTrainer], tmp_path: Path
) -> None:
    trainer, data = build(tiny.config(tmp_path)), rows()
    spec = loss_spec(SftConfig(), data)
    accumulate(trainer, [data], spec)
    total = 0.0
    for row in data:
        batch = TrainBatch.of([row])
        tokens = torch.from_numpy(batch.tokens_N)
        layout = PackedLayout.of([len(row)], torch.device("cpu"))
        hidden = trainer.model.hidden(tokens, torch.from_numpy(batch.positions_N), layout)
        logits = hidden.double() @ trainer.model.output_weight().double().T
        logp = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        total -= float((logp.detach() * torch.from_numpy(row.weights_T[1:])).sum())
    weights = sum(float(row.weights_T[1:].sum()) for row in data)
    assert float(trainer.pending_loss()) == pytest.approx(total / weights, rel=1e-6)


def test_discard_undoes_what_was_begun(build: Callable[..., LocalTrainer], tmp_path: Path) -> None:
    first, second = (build(tiny.config(tmp_path)) for _ in range(2))
    data = rows()
    spec = loss_spec(SftConfig(), data)
    accumulate(first, [data[:3]], replace(spec, denominator=0.1))
    first.discard(POLICY)
    for trainer in (first, second):
        accumulate(trainer, [data], spec)
        trainer.apply(POLICY, step=1, learning_rate=1e-2)
    same_state(first, second)


def same_state(left: LocalTrainer, right: LocalTrainer) -> None:
    for stem, group in left.state().items():
        for name, tensor in group.items():
            assert torch.equal(tensor, right.state()[stem][name]), (stem, name)


def test_what_is_not_finite_is_never_applied(
    build: Callable[..., LocalTrainer], tmp_path: Path
) -> None:
    trainer, untouched = (build(tiny.config(tmp_path)) for _ in range(2))
    data = rows()
    spec = loss_spec(SftConfig(), data)
    accumulate(trainer, [data], replace(spec, denominator=1e-45))
    report = trainer.apply(POLICY, step=1, learning_rate=1e-2)
    assert not report.applied
    same_state(trainer, untouched)
    accumulate(trainer, [data], spec)
    assert trainer.apply(POLICY, step=2, learning_rate=1e-2).applied


def test_state_put_back_goes_on_to_the_same_bits(
    build: Callable[..., LocalTrainer], tmp_path: Path
) -> None:
    config, data = tiny.config(tmp_path), rows()
    spec = loss_spec(SftConfig(), data)
    straight, resumed = build(config), build(config)
    for step in (1, 2, 3):
        if step == 2:
            resumed = build(config)
            kept = {k: {n: t.clone() for n, t in g.items()} for k, g in straight.state().items()}
            resumed.load_state(kept)
        for trainer in (straight, resumed) if step > 1 else (straight,):
            accumulate(trainer, [data], spec, step=step)
            trainer.apply(POLICY, step=step, learning_rate=1e-2)
    same_state(straight, resumed)


def test_the_update_is_torchs_adamw_with_clipping(
    build: Callable[..., LocalTrainer], tmp_path: Path
) -> None:
    config, data = tiny.config(tmp_path, "trainer.max_grad_norm=0.5"), rows()
    trainer, reference = build(config), build(config)
    spec = loss_spec(SftConfig(), data)
    named = dict(reference.model.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    )
    for step in range(1, 4):
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * step
        accumulate(trainer, [data], spec)
        report = trainer.apply(POLICY, step=step, learning_rate=1e-2 * step)
        accumulate(reference, [data], spec)
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), 0.5)
        adamw.step()
        reference.discard(POLICY)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, param in trainer.model.named_parameters():
        torch.testing.assert_close(param, named[name], rtol=1e-5, atol=1e-6)


def test_bf16_keeps_fp32_masters_gradients_and_moments(
    build: Callable[..., LocalTrainer], tmp_path: Path
) -> None:
    trainer, data = build(tiny.config(tmp_path), torch.bfloat16), rows()
    spec = loss_spec(SftConfig(), data)
    before = {name: param.data_ptr() for name, param in trainer.model.named_parameters()}
    start = trainer.optimizer.masters["model.norm.weight"].clone()
    for step in range(1, 9):
        accumulate(trainer, [[row] for row in data], spec, step=step)
        assert trainer.apply(POLICY, step=step, learning_rate=1e-4).applied
    for name, param in trainer.model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert param.data_ptr() == before[name]
        master = trainer.optimizer.masters[name]
        assert master.dtype == torch.float32
        assert torch.equal(param, master.bfloat16())
    # Eight steps of 1e-4 are lost in bf16 near 1.0 (spacing 2**-8) and kept by the master.
    moved = (trainer.optimizer.masters["model.norm.weight"] - start).abs().max()
    assert 1e-4 < float(moved) < 2**-8


def test_row_losses_name_their_rows(build: Callable[..., LocalTrainer], tmp_path: Path) -> None:
    trainer, data = build(tiny.config(tmp_path)), rows()
    batch = TrainBatch.of(data)
    (logp_M,) = trainer.score(POLICY, [batch])
    index_M, row_of_M = map(torch.from_numpy, predicted_positions(batch))
    accumulate(trainer, [data[4:], data[:4]], loss_spec(SftConfig(), data))
    report = trainer.apply(POLICY, step=1, learning_rate=0.0)
    by_id = dict(zip(report.row_ids_B.tolist(), report.row_losses_B.tolist(), strict=True))
    weights_M = torch.from_numpy(batch.weights_N)[index_M]
    zeros = torch.zeros(len(data))
    nll_B = zeros.index_add(0, row_of_M, -torch.from_numpy(logp_M) * weights_M)
    expected = (nll_B / zeros.index_add(0, row_of_M, weights_M)).tolist()
    logp_by_id = dict(zip(report.row_ids_B.tolist(), report.row_logp, strict=True))
    for number, (row, loss) in enumerate(zip(data, expected, strict=True)):
        assert by_id[row.row_id] == pytest.approx(loss, rel=1e-5)
        own_M = logp_M[row_of_M.numpy() == number]
        assert logp_by_id[row.row_id] == pytest.approx(own_M, rel=1e-5)
