"""The energy of samples: likeness of their features to the truth's, less likeness to each other's.

    phi_l     = h_l / ||h_l||                                  pooled hidden states of layer l of L
    phi       = [phi_1 ... phi_L] / sqrt(L)
    align_j   = 2 cos(phi_j, phi_truth)
    div_j     = 2 / (n - 1) sum_{i != j} phi_i . phi_j         0 for a single sample
    energy_j  = alignment_coefficient align_j - diversity_coefficient div_j
    cfm       = || mean_j phi_j - phi_truth ||^2               what the energy lowers (not whitened)
    spread    = (n + 1) / (n - 1) mean_j || phi_j - mean_i phi_i ||^2     cfm of one more sample

of the n samples of one prompt (arXiv:2603.12248, equations 2, 7 and 49). Without whitening all of
align and div lie in [-2, 2], and cfm in [0, 4]. Whitened samples are shorter the more copies they
have, so that div is at most 2 / n. What is logged as diversity is twice a cosine in both cases: 2
where all samples are the same.

Whitening takes the samples' features X [n, D] of a layer to W X, W = (X X^T)^(-1/2), which makes
them orthonormal: only copies are still alike. The truth of sample j is multiplied by row j of the
same W. Singular values below `CUT` of the largest are dropped, so that copies stay copies.

The baseline of div_j must not depend on sample j, or the gradient is biased. Its mean over the
others does: they were compared with j. The mean over all pairs without j does not:

    (sum_i div_i - 2 div_j) / (n - 2)                          0 for n = 2

Suffixes: `_G` samples of a prompt, `_D` features of a layer, `_P` prompts, `_S` samples of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.config.ebft import EbftConfig, Estimator

CUT = 1e-5
# Features of length 0 (a layer that gives nothing) stay 0.
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class GroupEnergy:
    """The energy of each sample of a prompt, in its parts.

    `likeness` is twice the mean cosine between two samples, `cfm` the distance of their mean from
    the truth, and `spread` what that distance would be if the truth were one more sample.
    """

    alignment_G: FloatArray64
    diversity_G: FloatArray64
    likeness: float
    cfm: float
    spread: float


@dataclass(frozen=True, slots=True)
class Energies:
    """The energies of a step's samples.

    `alignment_S` and `diversity_S` include their coefficients, and so does the baseline of the
    latter, `diversity_baseline_S`. `cfm_P` has one value per prompt.
    """

    estimator: Estimator
    alignment_S: FloatArray64
    diversity_S: FloatArray64
    diversity_baseline_S: FloatArray64
    cfm_P: FloatArray64
    # Means over all samples, without coefficients. Alignment and likeness are twice a cosine.
    alignment: float
    likeness: float
    spread: float

    @property
    def energy_S(self) -> FloatArray64:
        return self.alignment_S - self.diversity_S

    @classmethod
    def of(cls, groups: Sequence[GroupEnergy], config: EbftConfig) -> Energies:
        """Join the groups of a step, in order."""
        alignment_S = np.concatenate([group.alignment_G for group in groups])
        diversity_S = np.concatenate([group.diversity_G for group in groups])
        baseline_S = np.concatenate([pair_baseline(group.diversity_G) for group in groups])
        return cls(
            estimator=config.advantage_estimator,
            alignment_S=config.alignment_coefficient * alignment_S,
            diversity_S=config.diversity_coefficient * diversity_S,
            diversity_baseline_S=config.diversity_coefficient * baseline_S,
            cfm_P=np.array([group.cfm for group in groups]),
            alignment=float(alignment_S.mean()),
            likeness=float(np.mean([group.likeness for group in groups])),
            spread=float(np.mean([group.spread for group in groups])),
        )


def group_energy(
    samples: Sequence[FloatArray64], truth: Sequence[FloatArray64], *, whitening: bool
) -> GroupEnergy:
    """Compare the samples of a prompt with its truth.

    `samples` holds [G, D] per layer, `truth` holds [D] per layer: pooled hidden states.
    """
    layers = [(_unit(x_GD), _unit(y_D)) for x_GD, y_D in zip(samples, truth, strict=True)]
    root = np.sqrt(len(layers))
    plain_G = np.concatenate([x_GD for x_GD, _ in layers], axis=1) / root
    plain_truth = np.concatenate([y_D for _, y_D in layers]) / root
    compared = [whitened(x_GD, y_D) if whitening else (x_GD, y_D) for x_GD, y_D in layers]
    x_G = np.concatenate([x for x, _ in compared], axis=1) / root
    y_G = np.concatenate([np.broadcast_to(y, x.shape) for x, y in compared], axis=1) / root
    unit_G = _unit(x_G)
    return GroupEnergy(
        alignment_G=2.0 * (unit_G * _unit(y_G)).sum(axis=1),
        diversity_G=_with_others(x_G),
        likeness=float(_with_others(unit_G).mean()),
        cfm=float(((plain_G.mean(axis=0) - plain_truth) ** 2).sum()),
        spread=_distance_of_one_more(plain_G),
    )


def _distance_of_one_more(plain_G: FloatArray64) -> float:
    """Return the expected squared distance of another sample from the mean; 0 for a single one."""
    num = len(plain_G)
    around = float(((plain_G - plain_G.mean(axis=0)) ** 2).sum(axis=1).mean())
    return around * (num + 1) / max(1, num - 1)


def _with_others(x_G: FloatArray64) -> FloatArray64:
    """Return twice the mean product of each row with the others; 0 for a single one."""
    pairs_GG = x_G @ x_G.T
    return 2.0 * (pairs_GG.sum(axis=1) - np.diag(pairs_GG)) / max(1, len(x_G) - 1)


def whitened(x_GD: FloatArray64, truth_D: FloatArray64) -> tuple[FloatArray64, FloatArray64]:
    """Return the samples' features whitened among each other, and the truth for each of them."""
    u_GK, s_K, _ = np.linalg.svd(x_GD, full_matrices=False)
    kept_K = s_K > CUT * s_K.max(initial=0.0)
    inverse_K = np.where(kept_K, 1.0 / np.where(kept_K, s_K, 1.0), 0.0)
    w_GG = (u_GK * inverse_K) @ u_GK.T
    return w_GG @ x_GD, w_GG.sum(axis=1)[:, None] * truth_D


def pair_baseline(diversity_G: FloatArray64) -> FloatArray64:
    """Return, for each sample, the mean diversity of the others among themselves."""
    num = len(diversity_G)
    if num <= 2:
        return np.zeros(num)
    return (diversity_G.sum() - 2.0 * diversity_G) / (num - 2)


def _unit(x: FloatArray64) -> FloatArray64:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), _TINY)
