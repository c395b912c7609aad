"""Energies are what the paper's formulas say, and their baseline does not depend on the sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.catalogue import advantages
from homeostat.algorithms.energy import Energies, group_energy, pair_baseline, whitened
from homeostat.algorithms.losses import loss_of
from homeostat.algorithms.policy import policy_spec
from homeostat.algorithms.terms import LossInputs
from homeostat.config.algorithm import AnyAlgorithm
from homeostat.config.ebft import EbftConfig

LAYERS, WIDTH = 3, 6


def random_group(seed: int, num: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    samples = [rng.normal(size=(num, WIDTH)) + 1.0 for _ in range(LAYERS)]
    return samples, [rng.normal(size=WIDTH) + 1.0 for _ in range(LAYERS)]


def phi(layers: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x / math.sqrt(float(x @ x)) for x in layers]) / math.sqrt(len(layers))


@pytest.mark.parametrize("num", [1, 2, 5])
def test_alignment_diversity_and_distance_follow_their_formulas(num: int) -> None:
    samples, truth = random_group(num, num)
    found = group_energy(samples, truth, whitening=False)
    x = [phi([layer[j] for layer in samples]) for j in range(num)]
    y = phi(truth)
    assert found.alignment_G == pytest.approx([2 * float(one @ y) for one in x])
    want = [
        2 / max(1, num - 1) * sum(float(x[i] @ x[j]) for i in range(num) if i != j)
        for j in range(num)
    ]
    assert found.diversity_G == pytest.approx(want)
    assert found.likeness == pytest.approx(np.mean(want))
    assert found.cfm == pytest.approx(float(((np.mean(x, axis=0) - y) ** 2).sum()))
    variance = np.var(x, axis=0, ddof=1).sum() if len(x) > 1 else 0.0
    assert found.spread == pytest.approx(float(variance * (1 + 1 / len(x))))


def test_copies_of_the_truth_have_the_largest_values() -> None:
    _, truth = random_group(0, 1)
    copies = [np.stack([layer] * 4) for layer in truth]
    found = group_energy(copies, truth, whitening=False)
    assert found.alignment_G == pytest.approx([2.0] * 4)
    assert found.diversity_G == pytest.approx([2.0] * 4)
    assert found.cfm == pytest.approx(0.0, abs=1e-12)


def test_whitened_samples_are_orthonormal_and_copies_stay_copies() -> None:
    samples, truth = random_group(3, 4)
    white_GD, truth_GD = whitened(samples[0], truth[0])
    assert white_GD @ white_GD.T == pytest.approx(np.eye(4), abs=1e-9)
    gram = samples[0] @ samples[0].T
    values, vectors = np.linalg.eigh(gram)
    root = (vectors / np.sqrt(values)) @ vectors.T
    assert white_GD == pytest.approx(root @ samples[0], abs=1e-9)
    assert truth_GD == pytest.approx(root @ np.stack([truth[0]] * 4), abs=1e-9)
    doubled = np.stack([samples[0][0], samples[0][0], samples[0][1]])
    white_GD, _ = whitened(doubled, truth[0])
    assert white_GD[0] == pytest.approx(white_GD[1], abs=1e-6)
    assert float(white_GD[0] @ white_GD[1]) == pytest.approx(0.5, abs=1e-6)
    assert float(white_GD[0] @ white_GD[2]) == pytest.approx(0.0, abs=1e-6)


def test_the_diversity_of_whitened_samples_counts_copies_alone() -> None:
    samples, truth = random_group(4, 4)
    assert group_energy(samples, truth, whitening=True).diversity_G == pytest.approx(0, abs=1e-9)
    copied = [np.concatenate([layer[:1], layer[:3]]) for layer in samples]
    alike = group_energy(copied, truth, whitening=True).diversity_G
    assert alike == pytest.approx([2 / 3 * 0.5] * 2 + [0.0] * 2, abs=1e-6)
    # By cosines, copies are the same however many there are.
    same = [np.repeat(layer[:1], 4, axis=0) for layer in samples]
    assert group_energy(same, truth, whitening=True).likeness == pytest.approx(2.0)


def batch_of(groups: list, ebft: EbftConfig, *, other_S: np.ndarray | None = None) -> RewardBatch:
    energies = Energies.of(groups, ebft)
    num = len(energies.energy_S)
    rewards_S = energies.energy_S + (0.0 if other_S is None else other_S)
    sizes = [len(group.alignment_G) for group in groups]
    return RewardBatch(
        rewards_S=rewards_S,
        group_S=np.repeat(np.arange(len(groups)), sizes),
        lengths_S=np.full(num, 2),
        trained_S=np.ones(num, dtype=bool),
        penalty_ST=None,
        energies=energies,
    )


def advantages_S(batch: RewardBatch) -> np.ndarray:
    config = TypeAdapter(AnyAlgorithm).validate_python({"type": "ebft"})
    found = advantages(config, batch)
    assert all(values_T[0] == values_T[1] for values_T in found)
    return np.array([values_T[0] for values_T in found])


@pytest.mark.parametrize("changed", range(4))
def test_the_baseline_of_a_sample_does_not_depend_on_it(changed: int) -> None:
    ebft = EbftConfig(alignment_coefficient=0.7, diversity_coefficient=1.4)
    samples, truth = random_group(5, 4)
    baselines = []
    for _ in range(2):
        batch = batch_of([group_energy(samples, truth, whitening=False)], ebft)
        baselines.append(batch.rewards_S[changed] - advantages_S(batch)[changed])
        samples = [layer.copy() for layer in samples]
        for layer in samples:
            layer[changed] = np.random.default_rng(9).normal(size=WIDTH)
    assert baselines[0] == pytest.approx(baselines[1])
    # A plain mean of the others' energies does depend on it: they were compared with the sample.
    assert pair_baseline(np.array([1.0, 2.0])) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "reinforce"])
def test_advantages_follow_their_estimator_and_other_rewards_count(estimator: str) -> None:
    ebft = EbftConfig(
        alignment_coefficient=0.5, diversity_coefficient=2.0, advantage_estimator=estimator
    )
    groups = [group_energy(*random_group(seed, 4), whitening=False) for seed in (1, 2)]
    other_S = np.random.default_rng(0).normal(size=8)
    # A reward that failed: the sample enters no statistic but those of the energy.
    other_S[2] = np.nan
    batch = batch_of(groups, ebft, other_S=other_S)
    found_S = advantages_S(batch)
    energies = batch.energies
    assert energies is not None
    for j in range(8):
        own = [i for i in range(8) if i // 4 == j // 4 and i != 2]
        if j == 2:
            assert found_S[j] == 0
            continue
        if estimator == "reinforce":
            assert found_S[j] == pytest.approx(batch.rewards_S[j])
            continue
        single = {i: energies.alignment_S[i] + other_S[i] for i in own}
        want = single[j] - np.mean([single[i] for i in own if i != j])
        div_G = energies.diversity_S[4 * (j // 4) :][:4]
        want -= div_G[j % 4] - (div_G.sum() - 2 * div_G[j % 4]) / 2
        if estimator == "group_norm":
            want /= np.std([batch.rewards_S[i] for i in own], ddof=1) + 1e-4
        assert found_S[j] == pytest.approx(want)


def test_equal_samples_have_no_advantage() -> None:
    samples, truth = random_group(6, 1)
    copies = [np.repeat(layer, 4, axis=0) for layer in samples]
    batch = batch_of([group_energy(copies, truth, whitening=False)], EbftConfig())
    assert not advantages_S(batch).any()


def test_the_loss_of_the_truth_is_its_weighted_cross_entropy() -> None:
    config = TypeAdapter(AnyAlgorithm).validate_python({"type": "ebft", "correction": None})
    plain = policy_spec(config, denominator=4.0, temperature=1.0, kl_coefficient=None)
    spec = type(plain)("policy_and_truth", plain.denominator, plain.params)
    logp_M = torch.tensor([-1.0, -2.0, -0.5, -0.25], dtype=torch.float64, requires_grad=True)
    is_truth_M = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    inputs = LossInputs(
        logp_M=logp_M,
        entropy_M=torch.zeros(4, dtype=torch.float64),
        weights_M=torch.tensor([1.0, 0.3, 1.0, 0.3], dtype=torch.float64),
        columns_M={
            "advantage": torch.tensor([2.0, 0.0, -1.0, 0.0], dtype=torch.float64),
            "truth": is_truth_M,
        },
        row_of_M=torch.tensor([0, 1, 2, 1]),
        num_rows=3,
    )
    terms = loss_of(spec).terms(inputs, spec)
    assert float(terms.loss.detach()) == pytest.approx((-2.0 + 1.0 + 0.3 * 2.25) / 4)
    terms.loss.backward()
    assert logp_M.grad is not None
    assert logp_M.grad.tolist() == pytest.approx([-2 / 4, -0.3 / 4, 1 / 4, -0.3 / 4])
    assert float(terms.sums["truth_nll"]) == pytest.approx(2.25)
    assert float(terms.sums["truth_tokens"]) == 2
    assert float(terms.sums["tokens"]) == 2
    assert terms.row_losses_B.tolist() == pytest.approx([-2.0, 1.125, 1.0])


def test_depths_are_layers_and_anchors_leave_room_for_a_block() -> None:
    assert EbftConfig().layers(32) == (8, 16, 24)
    assert EbftConfig().layers(2) == (1, 2)
    assert EbftConfig(feature_layers=(1.0, 0.01)).layers(10) == (1, 10)
    ebft = EbftConfig(mode="strided", stride=3, context_length=2, generate_length=4)
    assert list(ebft.anchors(12)) == [2, 5, 8]
    assert not ebft.anchors(5)
