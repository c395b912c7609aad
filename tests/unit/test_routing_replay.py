"""Replayed routes decide where tokens go, exactly once in each pass, or the pass is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe
from tests.support.tiny_moe import with_routes

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.errors import ReplayError
from homeostat.models import float64
from homeostat.models.blocks import MoeBlock
from homeostat.models.decoder import Decoder
from homeostat.models.routing import Routing
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.train.scoring import score
from homeostat.types import LossSpec, Role, TokenRow, TrainBatch

POLICY = Role.POLICY
FAMILIES = {"qwen3_moe": tiny_moe.QWEN, "dots1": tiny_moe.DOTS}


def trainer_of(folder: Path, family: str = "qwen3_moe", **trainer: Any) -> LocalTrainer:
    model = folder / "model"
    if not model.exists():
        tiny.write_model(model, **FAMILIES[family])
    config = tiny.config(folder, trainer=trainer)
    return local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))


def model_of(trainer: LocalTrainer) -> Decoder:
    model = trainer.roles[POLICY].model
    assert isinstance(model, Decoder)
    return model


def group_rows(seed: int = 0, *, count: int = 4) -> list[TokenRow]:
    """Rows of two prompts, as of two groups, of different lengths."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, 90, (2, 7))
    rows = []
    for number in range(count):
        prompt_T = prompts[number % 2]
        tokens_T = np.concatenate([prompt_T, rng.integers(3, 90, rng.integers(2, 9))])
        weights_T = (np.arange(len(tokens_T)) >= len(prompt_T)).astype(np.float32)
        rows.append(TokenRow(number, tokens_T, weights_T))
    return rows


def spec_of(rows: list[TokenRow]) -> LossSpec:
    return loss_spec(SftConfig(), rows)


def gradients(trainer: LocalTrainer, rows: list[TokenRow]) -> dict[str, torch.Tensor]:
    trainer.accumulate(POLICY, [TrainBatch.of(rows)], spec_of(rows), step=1)
    trainer.hand_over(POLICY)
    training = trainer.roles[POLICY].training
    assert training is not None
    found = training.optimizer.gradients.present()
    copies = {name: grad.clone() for name, grad in found.items()}
    assert copies.keys() == training.params.keys()
    trainer.discard(POLICY)
    return copies


def logp_of(trainer: LocalTrainer, rows: list[TokenRow]) -> np.ndarray:
    return np.concatenate(score(trainer, POLICY, [TrainBatch.of(rows)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_its_own_routes_changes_nothing(tmp_path: Path, family: str) -> None:
    trainer = trainer_of(tmp_path, family)
    free = group_rows()
    for names in (("routed_experts",), ("routed_experts", "routed_weights")):
        replayed = with_routes(model_of(trainer), free, *names)
        np.testing.assert_allclose(logp_of(trainer, replayed), logp_of(trainer, free), atol=2e-6)
        expected, found = gradients(trainer, free), gradients(trainer, replayed)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_routes_give_what_float64_computes_with_them(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, family)
    model = model_of(trainer)
    (row,) = with_routes(model, group_rows(count=1), shift=1)
    routes_NLK = np.asarray(row.columns["routed_experts"]).astype(int)
    given = iter(routes_NLK[:, layer].tolist() for layer in range(routes_NLK.shape[1]))
    pending: list[list[int]] = []

    def best(moe: Any, wanted: list[float]) -> list[int]:
        if not pending:
            pending.extend(next(given))
        return pending.pop(0)

    monkeypatch.setattr(float64, "_best", best)
    weights = dict(model.named_parameters())
    expected_T = float64.reference_logprobs(model.config, weights, row.tokens_T)
    found_M = logp_of(trainer, [row])
    np.testing.assert_allclose(found_M, expected_T[-len(found_M) :], atol=1e-5)
    assert np.abs(found_M - logp_of(trainer, [replace(row, columns={})])).max() > 0.1


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_recomputed_layers_replay_the_same_routes(
    tmp_path: Path, checkpointing: bool | str
) -> None:
    plain = trainer_of(tmp_path)
    recomputed = trainer_of(tmp_path, gradient_checkpointing=checkpointing)
    rows = with_routes(model_of(plain), group_rows(), shift=1)
    expected = gradients(plain, rows)
    for name, grad in gradients(recomputed, rows).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_lanes_replay_their_own_rows(tmp_path: Path) -> None:
    one, two = trainer_of(tmp_path), trainer_of(tmp_path, lanes=2)
    rows = with_routes(model_of(one), group_rows(), shift=1)
    try:
        expected = gradients(one, rows)
        for name, grad in gradients(two, rows).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    finally:
        two.close()


def test_weights_of_the_engine_are_the_values_and_the_trainers_have_the_gradient() -> None:
    own_NK = torch.rand(5, 3, requires_grad=True)
    recorded_NLK = torch.rand(5, 2, 3)
    free_N = torch.tensor([False, False, True, False, True])
    routing = Routing(torch.zeros(5, 2, 3, dtype=torch.uint8), free_N, weights_NLK=recorded_NLK)
    used_NK = routing.weights(1, own_NK)
    assert torch.equal(used_NK[~free_N], recorded_NLK[~free_N, 1])
    assert torch.equal(used_NK[free_N], own_NK[free_N])
    upstream_NK = torch.rand(5, 3)
    used_NK.backward(upstream_NK)
    assert torch.equal(own_NK.grad, upstream_NK)


def test_recorded_weights_change_log_probs_and_reach_the_router(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    rows = with_routes(model_of(trainer), group_rows(), "routed_experts", "routed_weights")
    flat = [
        replace(row, columns={**row.columns, "routed_weights": np.full_like(weights, 0.5)})
        for row in rows
        for weights in [np.asarray(row.columns["routed_weights"])]
    ]
    assert np.abs(logp_of(trainer, flat) - logp_of(trainer, rows)).max() > 0.01
    router = next(name for name in gradients(trainer, flat) if name.endswith("mlp.gate.weight"))
    assert gradients(trainer, flat)[router].norm() > 0


def damaged(row: TokenRow, how: str) -> TokenRow:
    routes = np.asarray(row.columns["routed_experts"])
    changed = {
        "layers": routes[:, :1],
        "slots": np.repeat(routes, 2, axis=2),
        "experts": np.where(routes == routes[2, 1, 0], 8, routes).astype(np.uint8),
        "int16": np.where(routes == routes[2, 1, 0], -1, routes.astype(np.int16)),
    }[how]
    return replace(row, columns={**row.columns, "routed_experts": changed})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("layers", "they cover 1 layers, but 2 layers have experts"),
        ("slots", "4 experts for each token, but the model chooses 2"),
        ("experts", "expert 8 in layer . of those with experts, which has 8"),
        ("int16", "expert -1 in layer"),
    ],
)
def test_routes_that_do_not_fit_the_model_are_refused(tmp_path: Path, how: str, says: str) -> None:
    trainer = trainer_of(tmp_path)
    rows = with_routes(model_of(trainer), group_rows(count=1))
    with pytest.raises(ReplayError, match=says):
        logp_of(trainer, [damaged(rows[0], how)])


def test_a_dense_model_refuses_routes(tmp_path: Path) -> None:
    routed = with_routes(model_of(trainer_of(tmp_path / "moe")), group_rows(count=1))
    config = tiny.config(tmp_path)
    dense = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))
    with pytest.raises(ReplayError, match="no experts"):
        logp_of(dense, routed)


def block(trainer: LocalTrainer, number: int) -> MoeBlock:
    found = [layer.mlp for layer in model_of(trainer).layers if isinstance(layer.mlp, MoeBlock)]
    return found[number]


@pytest.mark.parametrize("times", [0, 2])
def test_a_layer_that_reads_its_routes_more_or_less_than_once_stops_the_step(
    tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    rows = with_routes(model_of(trainer), group_rows())
    gate = block(trainer, 1).gate
    original = gate.forward

    def wrong(x_ND: torch.Tensor, layer: int, routing: Routing) -> Any:
        for _ in range(times - 1):
            original(x_ND, layer, routing)
        return original(x_ND, layer, routing if times else Routing())

    monkeypatch.setattr(gate, "forward", wrong)
    with pytest.raises(ReplayError, match=f"layer 1 .* read its recorded routes {times} times"):
        logp_of(trainer, rows)
    with pytest.raises(ReplayError, match="the forward pass"):
        gradients(trainer, rows)


def test_a_recomputation_that_chooses_for_itself_stops_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, gradient_checkpointing=True)
    rows = with_routes(model_of(trainer), group_rows())
    gate = block(trainer, 0).gate
    original = gate.forward

    def forgetful(x_ND: torch.Tensor, layer: int, routing: Routing) -> Any:
        return original(x_ND, layer, Routing() if routing.reads.is_recomputing else routing)

    monkeypatch.setattr(gate, "forward", forgetful)
    with pytest.raises(ReplayError, match=r"layer 0 .* 0 times in the recomputation"):
        gradients(trainer, rows)


def test_prompts_are_computed_once_only_where_their_routes_are_equal(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    rows = with_routes(model_of(trainer), group_rows())
    batch = TrainBatch.of(rows)
    routes = np.asarray(batch.columns["routed_experts"]).copy()
    prompts = np.full(4, 7)
    find = {"device": torch.device("cpu")}
    args = (batch.tokens_N, batch.lengths_B, prompts)
    shared = SharedPrompts.find(*args, **find, alike=(routes,))
    assert shared is not None
    assert len(shared.copies_C) == 14
    # Row 3 went to other experts at one token of its prompt.
    start = int(batch.lengths_B[:3].sum())
    routes[start + 2, 1] = (routes[start + 2, 1] + 1) % 8
    shared = SharedPrompts.find(*args, **find, alike=(routes,))
    assert shared is not None
    assert len(shared.copies_C) == 7
    # And what is computed is what each row's own routes give.
    changed = [
        replace(row, columns={"routed_experts": part})
        for row, part in zip(rows, np.split(routes, np.cumsum(batch.lengths_B)[:-1]), strict=True)
    ]
    apart = np.concatenate([logp_of(trainer, [row]) for row in changed])
    np.testing.assert_allclose(logp_of(trainer, changed), apart, atol=2e-6)


def test_agreement_counts_sets_of_experts(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    rows = with_routes(model_of(trainer), group_rows())
    # The order of slots does not count; another expert does.
    first = rows[0]
    routes = np.asarray(first.columns["routed_experts"])[..., ::-1].copy()
    routes[0, 0, 0] = next(e for e in range(8) if e not in routes[0, 0])
    rows[0] = replace(first, columns={"routed_experts": routes})
    trainer.accumulate(POLICY, [TrainBatch.of([row]) for row in rows], spec_of(rows), step=1)
    stats = trainer.apply(POLICY, step=1, learning_rate=0.0).stats
    tokens = sum(map(len, rows))
    assert stats["replay_tokens"] == tokens
    assert stats["replay_replayed"] == tokens - len(rows)
    assert stats["replay_compared"] == 2 * (tokens - len(rows))
    # What follows a token that went elsewhere may go elsewhere as well, in its own row only.
    assert 1 <= stats["replay_compared"] - stats["replay_same"] <= 2 * len(first)


def test_agreement_counts_every_copy_of_a_shared_prompt(tmp_path: Path) -> None:
    """As often as it occurs: the split of an update over micro-batches changes no share."""
    trainer = trainer_of(tmp_path)
    rows = with_routes(model_of(trainer), group_rows())
    # All rows recorded the same other expert at a token of their prompt.
    for number, row in enumerate(rows):
        routes = np.asarray(row.columns["routed_experts"]).copy()
        routes[2, 0, 0] = next(e for e in range(8) if e not in routes[2, 0])
        rows[number] = replace(row, columns={"routed_experts": routes})
    found = []
    for parts in ([rows], [[row] for row in rows]):
        trainer.accumulate(POLICY, [TrainBatch.of(part) for part in parts], spec_of(rows), step=1)
        stats = trainer.apply(POLICY, step=1, learning_rate=0.0).stats
        found.append([stats[f"replay_{name}"] for name in ("tokens", "compared", "same")])
    assert found[0] == found[1]
    assert found[0][1] == 2 * (sum(map(len, rows)) - len(rows))
