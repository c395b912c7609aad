"""Changes expert biases after each update, without a gradient, to balance the load (DeepSeek-V3).

    b_e += rate * sign(mean load - load of e)      load over all tokens and ranks of the update

A bias only decides which experts are chosen; it is fp32 and part of checkpoints and exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from homeostat.arrays import FloatArray64
from homeostat.train.sharding import Shards

_NAME = "mlp.gate.e_score_correction_bias"


def is_expert_bias(name: str) -> bool:
    """Return whether the parameter of this name is an expert bias."""
    return name.endswith(_NAME)


def expert_biases(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the expert biases of a model by name, in the order of its layers."""
    return {name: param for name, param in named if is_expert_bias(name)}


@torch.no_grad()
def move_biases(
    biases: Mapping[str, nn.Parameter], load_LE: FloatArray64, *, rate: float, shards: Shards
) -> None:
    """Move every bias one step, of which a rank takes the rows that it holds."""
    for bias, load_E in zip(biases.values(), load_LE, strict=True):
        step_E = torch.from_numpy(np.sign(load_E.mean() - load_E) * rate)
        rows = shards.rows(shards.part(bias), bias)
        mine = slice(rows.start, rows.start + len(rows.tensor))
        rows.tensor.add_(step_E[mine].to(rows.tensor))


@torch.no_grad()
def largest_bias(biases: Sequence[Tensor], shards: Shards) -> Tensor | None:
    """Return the largest absolute value in this rank's parts, on the device; None if it has none.

    A rank may hold no row of a bias.
    """
    parts = [shards.part(bias) for bias in biases]
    found = [part.abs().amax() for part in parts if part.numel()]
    return torch.stack(found).amax() if found else None
