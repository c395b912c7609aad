"""What can be asked of any role of a trainer, and that no role is special."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_rl
from transformers import AutoModelForCausalLM

from homeostat.algorithms.losses import LOSSES
from homeostat.algorithms.policy import policy_spec
from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.errors import LossInputError, ModelError
from homeostat.train.build import load, local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import resolve_runtime
from homeostat.train.scoring import score
from homeostat.types import LossSpec, Outputs, Role, TokenRow, TrainBatch

POLICY, REFERENCE = Role.POLICY, Role.REFERENCE
VOCABULARY = 90


def random_rows(seed: int = 0, num: int = 5) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    made = []
    for row_id in range(num):
        length = int(rng.integers(4, 20))
        weights_T = (rng.random(length) < 0.6).astype(np.float32)
        weights_T[0], weights_T[-1] = 0.0, 1.0
        made.append(TokenRow(row_id, rng.integers(3, VOCABULARY, length), weights_T))
    return made


def pretrained(folder: Path) -> Path:
    """A folder with random weights, which transformers can read, too."""
    start = tiny.config(folder)
    path = folder / "pretrained"
    trainer = local_trainer(start.for_trainer, resolve_runtime(start, kept=PLAIN))
    trainer.export(POLICY, path, start.for_export)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("roles")
    pretrained(made)
    return made


def make_config(folder: Path, implementation: str = "native") -> RunConfig:
    path = {"path": str(folder / "pretrained"), "init": "pretrained"}
    return tiny.config(folder, model={**path, "implementation": implementation})


def make_trainer(folder: Path, implementation: str = "native") -> LocalTrainer:
    config = make_config(folder, implementation)
    return local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))


# Outputs of a forward pass.


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_hidden_states_are_those_of_transformers(folder: Path, implementation: str) -> None:
    trainer, rows = make_trainer(folder, implementation), random_rows(1)
    outside = AutoModelForCausalLM.from_pretrained(folder / "pretrained", dtype=torch.float32)
    layers = tuple(range(outside.config.num_hidden_layers + 1))
    batches = [TrainBatch.of(rows[:3]), TrainBatch.of(rows[3:])]
    for reducer in ("mean_of_trained", "last_of_row"):
        found = trainer.forward(POLICY, batches, Outputs(hidden=layers, reducer=reducer))
        assert all(one.logp_M is None and one.entropy_M is None for one in found)
        for layer in layers:
            rows_found = np.concatenate([one.hidden[layer] for one in found])
            assert rows_found.dtype == np.float32
            for row, reduced_D in zip(rows, rows_found, strict=True):
                tokens = torch.from_numpy(row.tokens_T)[None]
                with torch.no_grad():
                    states = outside(tokens, output_hidden_states=True).hidden_states[layer][0]
                is_mean = reducer == "mean_of_trained"
                expected = states[row.weights_T > 0].mean(0) if is_mean else states[-1]
                np.testing.assert_allclose(reduced_D, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_entropy_and_log_probs_come_together_and_are_those_of_full_logits(folder: Path) -> None:
    trainer, rows = make_trainer(folder), random_rows(2)
    batch, temperature = TrainBatch.of(rows), 0.7
    asked = Outputs(logp=True, entropy=True, temperature=temperature)
    (found,) = trainer.forward(POLICY, [batch], asked)
    outside = AutoModelForCausalLM.from_pretrained(folder / "pretrained", dtype=torch.float64)
    logp, entropy = [], []
    for row in rows:
        tokens = torch.from_numpy(row.tokens_T)
        with torch.no_grad():
            full = (outside(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        is_trained = torch.from_numpy(row.weights_T[1:] > 0)
        logp.append(full.gather(1, tokens[1:, None])[is_trained, 0])
        entropy.append(-(full.exp() * full).sum(-1)[is_trained])
    np.testing.assert_allclose(found.logp_M, torch.cat(logp), rtol=1e-4)
    np.testing.assert_allclose(found.entropy_M, torch.cat(entropy), rtol=1e-4)
    (alone,) = score(trainer, POLICY, [batch], temperature=temperature)
    np.testing.assert_allclose(alone, found.logp_M, rtol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        (Outputs(value=True), "values were requested from the policy, .* no value head"),
        (Outputs(hidden=(9,), reducer="last_of_row"), "layer 9 .* layers 0 .* to 2"),
        (Outputs(hidden=(1,), reducer="median"), "no reducer 'median'. Known reducers: .*last_of"),
    ],
)
def test_what_a_model_cannot_give_is_refused(folder: Path, outputs: Outputs, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        make_trainer(folder).forward(POLICY, [TrainBatch.of(random_rows())], outputs)


# Losses and the columns that they need.


def test_a_batch_without_a_column_of_its_loss_is_refused_before_it_is_computed(
    tmp_path: Path,
) -> None:
    config = tiny_rl.config(tmp_path, algorithm={"type": "grpo", "kl": {"coefficient": 0.1}})
    trainer = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))
    spec = policy_spec(config.algorithm, denominator=1.0, temperature=1.0, kl_coefficient=0.1)
    names = sorted(LOSSES["policy"].required(spec))
    assert {"advantage", "ref_logp"} <= set(names)
    for missing in names:
        rows = [
            replace(row, tokens_T=row.tokens_T % 12,
                    columns={n: np.zeros(len(row), np.float32) for n in names if n != missing})
            for row in random_rows()
        ]  # fmt: skip
        for use in (trainer.measure, lambda *a: trainer.accumulate(*a, step=1)):
            with pytest.raises(LossInputError, match=f"'policy' needs the column '{missing}'"):
                use(POLICY, [TrainBatch.of(rows)], spec)
    training = trainer.roles[POLICY].training
    assert training is not None
    assert not training.pending
    with pytest.raises(LossInputError, match=r"no loss 'mse'\. Known losses: .*policy, .*sft"):
        trainer.accumulate(POLICY, [TrainBatch.of(random_rows())], LossSpec("mse", 1.0), step=1)


# Roles.


def two_trained(folder: Path) -> LocalTrainer:
    """The second role is trained, as a critic or a second policy would be, at another rate."""
    config = make_config(folder)
    runtime = resolve_runtime(config, kept=PLAIN)
    trainings = {POLICY: config.trainer, REFERENCE: config.trainer.model_copy(update={"lr": 0.1})}
    models = {
        role: RoleModel(load(config.model, None, config=config, runtime=runtime), training)
        for role, training in trainings.items()
    }
    return LocalTrainer(models, config.trainer, runtime=runtime, seed=0)


def test_a_second_role_is_trained_saved_and_resumed_as_the_first(
    folder: Path, tmp_path: Path
) -> None:
    trainer, rows = two_trained(folder), random_rows(4)
    spec, batch = loss_spec(SftConfig(), rows), TrainBatch.of(rows)
    start = trainer.checksums(POLICY)
    trainer.accumulate(POLICY, [batch], spec, step=1)
    trainer.accumulate(REFERENCE, [batch], spec, step=1)
    trainer.discard(POLICY)
    report = trainer.apply(REFERENCE, step=1, learning_rate=1e-2)
    assert (report.role, report.applied) == (REFERENCE, True)
    assert trainer.checksums(POLICY) == start
    assert trainer.checksums(REFERENCE) != start
    trainer.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "reference.safetensors",
        "reference_optimizer.safetensors",
    ]
    again = two_trained(folder)
    again.load(tmp_path)
    for one in (trainer, again):
        one.accumulate(REFERENCE, [batch], spec, step=2)
        one.apply(REFERENCE, step=2, learning_rate=1e-2)
    assert trainer.checksums(REFERENCE) == again.checksums(REFERENCE)
    assert trainer.checksums(POLICY) == again.checksums(POLICY) == start


def test_a_frozen_role_is_scored_and_never_trained(folder: Path) -> None:
    config = make_config(folder)
    runtime = resolve_runtime(config, kept=PLAIN)
    models = {
        POLICY: RoleModel(load(config.model, None, config=config, runtime=runtime), config.trainer),
        REFERENCE: RoleModel(
            load(config.model, None, config=config, runtime=runtime, trained=False)
        ),
    }
    trainer = LocalTrainer(models, config.trainer, runtime=runtime, seed=0)
    rows = random_rows(5)
    batch, spec = TrainBatch.of(rows), loss_spec(SftConfig(), rows)
    (before,) = score(trainer, REFERENCE, [batch])
    with pytest.raises(AssertionError, match="the reference is frozen"):
        trainer.accumulate(REFERENCE, [batch], spec, step=1)
    trainer.discard(REFERENCE)
    trainer.accumulate(POLICY, [batch], spec, step=1)
    trainer.apply(POLICY, step=1, learning_rate=1e-2)
    (after,) = score(trainer, REFERENCE, [batch])
    np.testing.assert_array_equal(before, after)
    with pytest.raises(AssertionError, match="stay as they were loaded"):
        trainer.refresh(REFERENCE)
    names = [name for name, _ in trainer.weights(REFERENCE)]
    assert names == [name for name, _ in trainer.weights(POLICY)]
