"""Preference losses against formulas in float64 numpy, and their gradients against differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from homeostat.algorithms.losses import loss_of
from homeostat.algorithms.preference import preference_metrics, preference_spec
from homeostat.algorithms.terms import LossInputs
from homeostat.config.preference import (
    AnyPreference,
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    PreferenceConfig,
    SimpoConfig,
)
from homeostat.types import LossSpec, TokenRow

CASES: list[tuple[AnyPreference, float]] = [
    (DpoConfig(type="dpo"), 0.3),
    (DpoConfig(type="dpo", label_smoothing=0.2, sft_weight=0.7), 0.1),
    (DpoConfig(type="dpo", length_normalised=True), 2.0),
    (IpoConfig(type="ipo"), 0.4),
    (OrpoConfig(type="orpo"), 0.25),
    (SimpoConfig(type="simpo", target_margin=0.6, label_smoothing=0.1, sft_weight=0.2), 2.5),
    (KtoConfig(type="kto", desirable_weight=1.3, undesirable_weight=0.6), 0.5),
]


class Update:
    """Rows with random log-probs: what a trainer would give to the loss."""

    def __init__(self, seed: int, *, num_rows: int = 8) -> None:
        noise = np.random.default_rng(seed)
        self.lengths = noise.integers(1, 7, num_rows)
        self.logp = [-noise.exponential(0.8, n) - 0.01 for n in self.lengths]
        self.ref = [-noise.exponential(0.8, n) - 0.01 for n in self.lengths]
        self.labels = np.where(np.arange(num_rows) % 2 == 0, 1.0, -1.0)

    def rows(self) -> list[TokenRow]:
        # One token of context, then the completion.
        return [
            TokenRow(i, np.zeros(n + 1, np.int64), np.r_[0, np.ones(n)].astype(np.float32))
            for i, n in enumerate(self.lengths)
        ]

    def inputs(self, chosen: list[int], logp_M: torch.Tensor | None = None) -> LossInputs:
        def joined(parts: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([parts[i] for i in chosen]))

        counts = self.lengths[chosen]
        labels = [np.full(n, label) for n, label in zip(self.lengths, self.labels, strict=True)]
        return LossInputs(
            logp_M=joined(self.logp) if logp_M is None else logp_M,
            entropy_M=None,
            weights_M=torch.ones(int(counts.sum()), dtype=torch.float64),
            columns_M={"ref_logp": joined(self.ref), "label": joined(labels)},
            row_of_M=torch.repeat_interleave(torch.arange(len(chosen)), torch.from_numpy(counts)),
            num_rows=len(chosen),
        )


def spec_of(config: AnyPreference, beta: float, update: Update, *, kl: float = 0.4) -> LossSpec:
    spec = preference_spec(config, PreferenceConfig(beta=beta), update.rows())
    params = {**spec.params, "kl": kl} if "kl" in spec.params else spec.params
    return LossSpec(spec.name, spec.denominator, params)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def expected(config: AnyPreference, beta: float, update: Update, logp: list[Any]) -> float:
    """The loss of the whole update, written down from the papers."""
    total, ref = (np.array([part.sum() for part in parts]) for parts in (logp, update.ref))
    ratio, length = total - ref, update.lengths
    mean = total / length
    (good, bad), (good_n, bad_n) = (ratio[::2], ratio[1::2]), (length[::2], length[1::2])
    sft = -total[::2].sum() / good_n.sum()
    if isinstance(config, DpoConfig):
        by = (good_n, bad_n) if config.length_normalised else (1, 1)
        margin = beta * (good / by[0] - bad / by[1])
        e = config.label_smoothing
        losses = -(1 - e) * np.log(sigmoid(margin)) - e * np.log(sigmoid(-margin))
        return losses.mean() + config.sft_weight * sft
    if isinstance(config, IpoConfig):
        return ((good / good_n - bad / bad_n - 1 / (2 * beta)) ** 2).mean()
    if isinstance(config, OrpoConfig):
        odds = np.exp(mean) / (1 - np.exp(mean))
        return sft - beta * np.log(sigmoid(np.log(odds[::2] / odds[1::2]))).mean()
    if isinstance(config, SimpoConfig):
        margin = beta * (mean[::2] - mean[1::2]) - config.target_margin
        e = config.label_smoothing
        losses = -(1 - e) * np.log(sigmoid(margin)) - e * np.log(sigmoid(-margin))
        return losses.mean() + config.sft_weight * sft
    weight = np.where(update.labels > 0, config.desirable_weight, config.undesirable_weight)
    return (weight * (1 - sigmoid(update.labels * beta * (ratio - 0.4)))).mean()


@pytest.mark.parametrize(("config", "beta"), CASES)
def test_a_loss_and_its_gradient_are_those_of_the_paper(config: AnyPreference, beta: float) -> None:
    update = Update(seed=int(beta * 100))
    inputs = update.inputs(list(range(8)))
    inputs.logp_M.requires_grad_()
    terms = loss_of(spec := spec_of(config, beta, update)).terms(inputs, spec)
    wanted = expected(config, beta, update, update.logp)
    assert float(terms.loss.detach()) == pytest.approx(wanted, rel=1e-9)
    terms.loss.backward()
    flat, ends = np.concatenate(update.logp), np.cumsum(update.lengths)[:-1]
    assert inputs.logp_M.grad is not None
    for place in range(0, len(flat), 5):
        step = 1e-6 * np.eye(1, len(flat), place)[0]
        up, down = (
            expected(config, beta, update, np.split(flat + sign * step, ends)) for sign in (1, -1)
        )
        slope = float(inputs.logp_M.grad[place])
        assert slope == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("config", "beta"), CASES)
def test_any_split_of_an_update_gives_the_same_loss_and_sums(
    config: AnyPreference, beta: float
) -> None:
    update = Update(seed=3)
    loss = loss_of(spec := spec_of(config, beta, update))
    whole = loss.terms(update.inputs(list(range(8))), spec)
    parts = [loss.terms(update.inputs(some), spec) for some in ([4, 5], [0, 1, 6, 7], [2, 3])]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-12)
    for name, value in whole.sums.items():
        assert float(sum(part.sums[name] for part in parts)) == pytest.approx(float(value))


def test_metrics_are_means_over_the_examples() -> None:
    update = Update(seed=5)
    spec = spec_of(DpoConfig(type="dpo"), 0.1, update)
    sums = loss_of(spec).terms(update.inputs(list(range(8))), spec).sums
    found = preference_metrics({name: float(value) for name, value in sums.items()})
    total, ref = (np.array([p.sum() for p in parts]) for parts in (update.logp, update.ref))
    reward = 0.1 * (total - ref)
    assert found["preference/chosen_reward"] == pytest.approx(reward[::2].mean())
    assert found["preference/margin"] == pytest.approx((reward[::2] - reward[1::2]).mean())
    assert found["preference/accuracy"] == (reward[::2] > reward[1::2]).mean()
    assert found["preference/rejected_logp"] == pytest.approx(total[1::2].mean())


def test_kto_measures_no_margin_where_one_kind_is_missing() -> None:
    update = Update(seed=6)
    update.labels[:] = 1.0
    spec = spec_of(KtoConfig(type="kto"), 0.1, update)
    sums = loss_of(spec).terms(update.inputs(list(range(8))), spec).sums
    found = preference_metrics({name: float(value) for name, value in sums.items()})
    assert "preference/margin" not in found
    assert "preference/rejected_reward" not in found
    assert math.isfinite(found["preference/chosen_reward"])


def test_beta_of_an_algorithm_holds_unless_the_recipe_says_otherwise() -> None:
    rows = Update(seed=1).rows()
    simpo = SimpoConfig(type="simpo")
    assert preference_spec(simpo, PreferenceConfig(), rows).params["beta"] == 2.0
    assert preference_spec(simpo, PreferenceConfig(beta=0.5), rows).params["beta"] == 0.5
