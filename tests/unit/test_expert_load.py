"""The load of experts: counts, losses that keep it even, biases, and room for tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe_runs, tiny_rl
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.loading.load import build_config
from homeostat.config.moe import MoeConfig
from homeostat.errors import ConfigError, ModelError
from homeostat.expert_load import ExpertLoad, RouterLoss
from homeostat.models.decoder import Decoder
from homeostat.models.expert_load import LoadWatch
from homeostat.ops import balance
from homeostat.ops.attention import PackedLayout
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.routing import best_experts, expert_weights, scores_of
from homeostat.run.evaluation.expert_load import load_metrics
from homeostat.train.build import local_trainer
from homeostat.train.local import LocalTrainer
from homeostat.train.router_loss import recorded_load, with_router_loss
from homeostat.train.runtime import resolve_runtime
from homeostat.types import (
    Outputs,
    Role,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

POLICY = Role.POLICY
CPU = torch.device("cpu")
AUX = ("model.moe.balancing=aux", "model.moe.aux_loss_coefficient=0.3")
SEQUENCE = ("model.moe.balancing=sequence_aux", "model.moe.aux_loss_coefficient=0.3")
Z = ("model.moe.z_loss_coefficient=0.02",)
LOSSES = {"aux": AUX, "sequence_aux": SEQUENCE, "z": Z, "aux and z": AUX + Z}


def rows_of(lengths: Sequence[int] = (9, 5, 12, 1, 7), *, seed: int = 0) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    # The first two rows begin with the same prompt of four tokens.
    prompt = rng.integers(3, 60, 4)
    found = []
    for number, length in enumerate(lengths):
        tokens = rng.integers(3, 60, length)
        if number < 2:
            tokens[:4] = prompt
        weights = (np.arange(length) > 3).astype(np.float32)
        found.append(TokenRow(number, tokens, weights))
    return found


def plan_of(rows: Sequence[TokenRow], split: Sequence[Sequence[int]]) -> StepPlan:
    batches = tuple(TrainBatch.of([rows[number] for number in part]) for part in split)
    return StepPlan(1, 0, batches, loss_spec(SftConfig(type="sft"), rows))


def trainer_of(folder: Path, *overrides: str, family: str = "qwen3_moe") -> LocalTrainer:
    config = tiny_moe_runs.config(folder, *overrides, family=family)
    return local_trainer(config.for_trainer, resolve_runtime(config))


def accumulated(
    folder: Path, split: Sequence[Sequence[int]], *overrides: str, family: str = "qwen3_moe"
) -> tuple[dict[str, Tensor], UpdateReport]:
    """The gradient of an update that is split like this, and its report."""
    config = tiny_moe_runs.config(folder, *overrides, family=family)
    trainer = local_trainer(config.for_trainer, resolve_runtime(config))
    assert trainer.sheet.moe is not None
    plan = with_router_loss(
        plan_of(rows_of(), split),
        config.model.moe,
        trainer=trainer,
        num_experts=trainer.sheet.moe.num_experts,
    )
    trainer.accumulate(POLICY, plan.micro_batches, plan.loss, step=1)
    training = trainer.roles[POLICY].training
    assert training is not None
    grads = {name: grad.clone() for name, grad in training.optimizer.gradients.present().items()}
    report = trainer.apply(POLICY, step=1, learning_rate=0.0)
    trainer.close()
    return grads, report


def logits_of_layers(model: Decoder, row: TokenRow) -> list[Tensor]:
    """The routers' logits of one row, by hooks."""
    found: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.layers if hasattr(layer.mlp, "gate")]
    hooks = [
        gate.register_forward_pre_hook(lambda gate, args: found.append(gate.logits(args[0])))
        for gate in gates
    ]
    tokens = torch.from_numpy(row.tokens_T)
    model.hidden(tokens, torch.arange(len(row)), PackedLayout.of([len(row)], CPU))
    for hook in hooks:
        hook.remove()
    return found


def plain_losses(model: Decoder, rows: Sequence[TokenRow]) -> dict[str, Tensor]:
    """The losses as their definitions say, row by row, in a few plain lines."""
    shape = model.moe
    assert shape is not None
    by_row = [logits_of_layers(model, row) for row in rows if len(row) > 1]
    biases = [layer.mlp.gate.e_score_correction_bias for layer in model.layers
              if hasattr(layer.mlp, "gate")]  # fmt: skip
    total = {"aux": 0.0, "sequence_aux": 0.0, "z": 0.0}
    num_layers = len(shape.layers)
    for layer in range(num_layers):
        # All tokens of a row but its last.
        logits = [found[layer][:-1] for found in by_row]
        probs, chosen = [], []
        for part in logits:
            scores = scores_of(part, shape)
            probs.append(scores / scores.sum(1, keepdim=True))
            ids = best_experts(scores, biases[layer], shape)
            chosen.append(torch.nn.functional.one_hot(ids, shape.num_experts).sum(1).float())
        f, p = torch.cat(chosen).mean(0) / shape.top_k, torch.cat(probs).mean(0)
        total["aux"] += shape.num_experts * (f * p).sum() / num_layers
        per_row = [
            shape.num_experts * (c.mean(0) / shape.top_k * q.mean(0)).sum()
            for c, q in zip(chosen, probs, strict=True)
        ]
        total["sequence_aux"] += torch.stack(per_row).mean() / num_layers
        total["z"] += torch.cat(logits).logsumexp(1).square().mean() / num_layers
    return total


@pytest.mark.parametrize("family", tiny_moe_runs.EXPERTS)
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_their_gradients_are_those_of_their_definitions(kind, family, tmp_path):
    with_loss, report = accumulated(tmp_path, [[0, 1, 2, 3, 4]], *LOSSES[kind], family=family)
    without, _ = accumulated(tmp_path, [[0, 1, 2, 3, 4]], family=family)
    trainer = trainer_of(tmp_path, family=family)
    model = trainer.roles[POLICY].model
    wanted = plain_losses(model, rows_of())
    weights = {"aux": 0.3, "sequence_aux": 0.3, "z": 0.02}
    kinds = kind.split(" and ")
    sum(weights[one] * wanted[one] for one in kinds).backward()
    assert report.load is not None
    if kinds[0] != "z":
        assert report.load.aux_loss == pytest.approx(float(wanted[kinds[0]].detach()), rel=1e-5)
    if "z" in kinds:
        assert report.load.z_loss == pytest.approx(float(wanted["z"].detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in with_loss:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(with_loss[name] - without[name], grad, atol=2e-6, rtol=1e-4)
    router = next(name for name in with_loss if name.endswith("mlp.gate.weight"))
    assert (with_loss[router] - without[router]).abs().max() > 1e-4


SPLITS = {
    "three micro-batches": ([[0, 3], [2], [4, 1]], ()),
    "lanes": ([[0, 1, 2], [3, 4]], ("trainer.lanes=2",)),
    "recomputed": ([[4, 3], [0, 1, 2]], ("trainer.gradient_checkpointing=true",)),
    "recomputed in part": ([[1, 2], [0, 3, 4]], ("trainer.gradient_checkpointing=selective",)),
    "prompts apart": ([[0, 1, 2, 3, 4]], ("trainer.share_prompts=false",)),
    "eager": ([[0, 1, 2, 3, 4]], ("model.attention=eager",)),
}


@pytest.mark.parametrize("kind", ["aux and z", "sequence_aux"])
@pytest.mark.parametrize("how", SPLITS)
def test_the_gradient_does_not_depend_on_the_split(how, kind, tmp_path):
    split, overrides = SPLITS[how]
    whole, report = accumulated(tmp_path, [[0, 1, 2, 3, 4]], *LOSSES[kind])
    parts, other = accumulated(tmp_path, split, *LOSSES[kind], *overrides)
    for name, grad in whole.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(parts[name], grad, atol=1e-5 * max(scale, 0.1), rtol=0, msg=name)
    assert report.load is not None
    assert other.load is not None
    assert np.array_equal(report.load.load_LE, other.load.load_LE)
    assert other.load.aux_loss == pytest.approx(report.load.aux_loss, rel=1e-5)
    # Every token counts but the last one of each row, in both of its slots.
    assert report.load.load_LE.sum(axis=1).tolist() == [2 * (8 + 4 + 11 + 0 + 6)] * 2


def test_aux_of_one_layer_is_that_of_transformers_over_the_number_of_slots():
    shape = MoeShape(num_experts=5, top_k=2, expert_size=4, layers=(0,))
    logits_NE = torch.randn(40, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    probs_NE = logits_NE.softmax(dim=1)
    ids_NK = probs_NE.topk(2).indices
    weight_N = torch.ones(40, dtype=torch.int64)
    load_E = balance.token_load(ids_NK, weight_N, num_experts=5)
    share_E = load_E.double() / load_E.sum()
    ours = balance.aux_sum(probs_NE, weight_N, share_E) / 40
    theirs = load_balancing_loss_func((logits_NE,), 5, 2)
    # Their counts are means in fp32.
    assert float(ours) == pytest.approx(float(theirs) / shape.top_k, rel=1e-6)
    even = torch.full((40, 5), 0.2, dtype=torch.float64)
    assert float(balance.aux_sum(even, weight_N, even[0]) / 40) == pytest.approx(1.0)


def test_aux_balances_each_layer_where_transformers_lets_layers_cancel():
    """Two layers that prefer different experts are even together, and each of them is not."""
    skewed = torch.tensor([[3.0, 0.0]], dtype=torch.float64).repeat(8, 1)
    layers = (skewed, skewed.flip(1))
    theirs = float(load_balancing_loss_func(layers, 2, 1))
    ours = np.mean(
        [
            float(balance.aux_sum(one.softmax(1), torch.ones(8).long(), share.double()) / 8)
            for one, share in zip(layers, torch.eye(2), strict=True)
        ]
    )
    assert theirs == pytest.approx(1.0)
    assert ours > 1.8


def test_ties_go_to_the_lower_number_and_groups_limit_the_choice():
    shape = MoeShape(num_experts=8, top_k=3, expert_size=4, layers=(0,))
    even = torch.zeros(2, 8).softmax(dim=1)
    assert best_experts(even, None, shape).tolist() == [[0, 1, 2]] * 2
    grouped = replace(shape, num_groups=4, num_groups_kept=2, scoring="sigmoid", has_bias=True)
    scores = torch.zeros(1, 8)
    # The best expert alone is in group 0; groups 2 and 3 have the two best pairs.
    scores[0] = torch.tensor([0.9, 0.0, 0.1, 0.1, 0.6, 0.5, 0.5, 0.6])
    assert best_experts(scores, torch.zeros(8), grouped).tolist() == [[4, 7, 5]]
    bias = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0])
    assert best_experts(scores, bias, grouped).tolist() == [[0, 1, 4]]
    ids = torch.tensor([[0, 1, 4]])
    # The bias decides who is chosen, and not the weights.
    want = scores[0, [0, 1, 4]] / (scores[0, [0, 1, 4]].sum() + 1e-20)
    torch.testing.assert_close(expert_weights(scores, ids, grouped)[0], want)


def with_routes(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Rows whose experts were recorded: two different ones in each of two layers."""
    rng = np.random.default_rng(7)
    found = []
    for row in rows:
        picked = rng.random((len(row), 2, 6)).argsort(axis=2)[..., :2].astype(np.uint8)
        picked[-1] = 0
        found.append(replace(row, columns={"routed_experts": picked}))
    return found


def test_recorded_routes_count_as_a_pass_does(tmp_path):
    rows = with_routes(rows_of())
    batch = TrainBatch.of(rows)
    trainer = trainer_of(tmp_path)
    (found,) = trainer.forward(POLICY, [batch], Outputs(load=True))
    recorded = recorded_load(batch, num_experts=6)
    assert found.load_LE is not None
    assert np.array_equal(found.load_LE, recorded)
    grads = []
    for split in ([[0, 1, 2, 3, 4]], [[4, 2], [0], [3, 1]]):
        plan = plan_of(rows, split)
        config = MoeConfig(balancing="aux", aux_loss_coefficient=0.3)
        plan = with_router_loss(plan, config, trainer=trainer, num_experts=6)
        assert plan.loss.router is not None
        assert np.array_equal(plan.loss.router.load_LE, recorded)
        trainer.accumulate(POLICY, plan.micro_batches, plan.loss, step=1)
        training = trainer.roles[POLICY].training
        assert training is not None
        grads.append({n: g.clone() for n, g in training.optimizer.gradients.present().items()})
        report = trainer.apply(POLICY, step=1, learning_rate=0.0)
        assert report.load is not None
        assert np.array_equal(report.load.load_LE, recorded)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_an_expert_takes_the_first_tokens_up_to_its_capacity():
    ids_NK = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1], [1, 2]])
    # The pass computes the tokens in another order than the batch has them.
    number_N = torch.tensor([4, 3, 2, 1, 0])
    room = balance.has_room(ids_NK, number_N, capacity=2, num_experts=3)
    assert room.tolist() == [[False, False], [False, False], [True, True], [True, True],
                             [True, True]]  # fmt: skip
    shape = MoeShape(num_experts=3, top_k=2, expert_size=4, layers=(0,))
    assert balance.capacity_of(0.5, num_tokens=5, shape=shape) == 2


def test_dropped_slots_have_no_output_and_are_counted(tmp_path):
    limited = ("model.moe.capacity_factor=0.5",)
    _, report = accumulated(tmp_path, [[0, 1, 2, 3, 4]], *limited)
    _, apart = accumulated(tmp_path, [[0, 1, 2, 3, 4]], *limited, "model.attention=eager")
    assert report.load is not None
    assert apart.load is not None
    # What is dropped depends on places in the micro-batch, not on the order of computation.
    assert report.load.num_dropped == apart.load.num_dropped > 0
    trainer = trainer_of(tmp_path)
    config = tiny_moe_runs.config(tmp_path, *limited)
    found = load_metrics([report], config.model.moe, sheet=trainer.sheet)
    assert found["moe/dropped_share"] == report.load.num_dropped / report.load.load_LE.sum()
    free, _ = accumulated(tmp_path, [[0, 1, 2, 3, 4]])
    roomy, full = accumulated(tmp_path, [[0, 1, 2, 3, 4]], "model.moe.capacity_factor=6")
    assert full.load is not None
    assert full.load.num_dropped == 0
    name = "model.layers.0.mlp.experts.down_proj"
    torch.testing.assert_close(roomy[name], free[name], atol=1e-6, rtol=1e-5)


def test_metrics_of_the_load():
    trainer_sheet = type("Sheet", (), {"moe": MoeShape(4, 2, 8, (0, 1))})()
    load = np.array([[4.0, 4, 4, 4], [10, 6, 0, 0]])
    report = UpdateReport(1, True, 0.0, 0.0, 0.0, 1, np.zeros(0, np.int64), np.zeros(0, np.float32))
    report = replace(report, load=ExpertLoad(load, 1.5, 2.5, 0.0, 0.25))
    found = load_metrics([report, report], MoeConfig(), sheet=trainer_sheet)
    assert found == pytest.approx(
        {
            "moe/max_violation": 1.5,
            "moe/load_max_share": 1.25,
            "moe/load_min_share": 0.0,
            "moe/dead_experts": 0.25,
            "moe/bias_max": 0.25,
        }
    )


def test_the_bias_moves_towards_an_even_load_and_resumes_exactly(tmp_path):
    moves = ("model.moe.balancing=bias", "model.moe.router_bias_update_rate=0.01")
    trainer = trainer_of(tmp_path, *moves, family="dots1")
    model = trainer.roles[POLICY].model
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    bias = dict(model.named_parameters())[name]
    plan = plan_of(rows_of(), [[0, 1], [2, 3, 4]])
    trainer.accumulate(POLICY, plan.micro_batches, plan.loss, step=1)
    report = trainer.apply(POLICY, step=1, learning_rate=1e-3)
    assert report.load is not None
    load_E = report.load.load_LE[1]
    want = torch.from_numpy(0.01 * np.sign(load_E.mean() - load_E)).float()
    assert torch.equal(bias, want)
    assert bias.abs().max() > 0
    assert report.probes["probe/frozen_changed"] == 0
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    hub = dict(trainer.weights(POLICY))
    assert torch.equal(hub[name], bias)
    resumed = trainer_of(tmp_path, *moves, family="dots1")
    resumed.load(tmp_path / "saved")
    for one in (trainer, resumed):
        one.accumulate(POLICY, plan.micro_batches, plan.loss, step=2)
        one.apply(POLICY, step=2, learning_rate=1e-3)
    for key, rows in trainer.state()["model"].items():
        assert torch.equal(rows.tensor, resumed.state()["model"][key].tensor), key
    assert name in trainer.state()["model"]


def test_a_frozen_bias_stays_and_is_reported(tmp_path):
    trainer = trainer_of(tmp_path, family="dots1")
    plan = plan_of(rows_of(), [[0, 1, 2, 3, 4]])
    trainer.accumulate(POLICY, plan.micro_batches, plan.loss, step=1)
    report = trainer.apply(POLICY, step=1, learning_rate=1e-3)
    assert report.load is not None
    assert report.load.bias_max == 0.0
    biases = [p for name, p in trainer.roles[POLICY].model.named_parameters() if "e_score" in name]
    assert not any(bias.any() for bias in biases)


REFUSED = [
    (("model.moe.balancing=aux",), r"model.moe.aux_loss_coefficient\) is 0"),
    (("model.moe.aux_loss_coefficient=0.1",), "adds no loss"),
    (("model.moe.balancing=bias",), "router_bias_update_rate, which is 0"),
    (("model.moe.router_bias_update_rate=0.1",), "does not change the expert bias"),
    (("model.moe.capacity_factor=1.0", "model.numerics=invariant"), "must not depend on them"),
    (("model.moe.capacity_factor=1.0", "trainer.lanes=2"), "the capacity of experts"),
    (("model.moe.z_loss_coefficient=0.1", "model.implementation=transformers"), "themselves"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_settings_that_cannot_work_are_refused(overrides, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        tiny_moe_runs.config(tmp_path, *overrides)


def test_a_capacity_is_refused_in_rl(tmp_path):
    with pytest.raises(ConfigError, match="depends on the other tokens of the micro-batch"):
        build_config(tiny_rl.recipe(tmp_path), ["model.moe.capacity_factor=1.5"], file=None)


def test_settings_of_experts_are_refused_for_models_that_cannot_follow_them(tmp_path):
    (tmp_path / "dense").mkdir()
    dense = tiny.config(tmp_path / "dense", *Z)
    with pytest.raises(ModelError, match=r"model\.moe\.z_loss_coefficient is set.*no experts"):
        local_trainer(dense.for_trainer, resolve_runtime(dense))
    moves = ("model.moe.balancing=bias", "model.moe.router_bias_update_rate=0.01")
    with pytest.raises(ModelError, match="this model family has none"):
        trainer_of(tmp_path, *moves)


def test_a_loss_of_routers_needs_no_router_that_is_trained():
    """A frozen router passes the gradient on to what is before it."""
    loss = RouterLoss("sequence_aux", 1.0, 0.0, None, 3, 1)
    shape = MoeShape(num_experts=3, top_k=1, expert_size=4, layers=(0,))
    watch = LoadWatch.of(shape, [4], loss=loss, device=CPU)
    # Two of the three tokens that count have the same expert: an even load has no gradient.
    x = torch.tensor([[1.0, 0.2], [0.8, -0.1], [-1.0, 0.5], [0.3, 0.3]], requires_grad=True)
    logits = x @ torch.tensor([[1.0, -1.0, 0.1], [0.2, 0.4, -0.3]])
    scores = scores_of(logits, shape)
    ids = best_experts(scores, None, shape)
    weights = expert_weights(scores, ids, shape)
    watched = watch.seen(0, logits_NE=logits, scores_NE=scores, ids_NK=ids, weights_NK=weights)
    assert torch.equal(watched, weights)
    (watched.sum() * 0.0).backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
