"""What quantising a tensor does to it: how much is cut, flushed to zero and rounded away.

    amax              the largest number
    saturated_share   share of numbers beyond the largest that their scale allows
    flushed_share     share of numbers that are not 0 and become 0
    scale_min, _max   the range of the scales
    error             norm of what rounding changed, divided by the norm of the tensor

Everything is computed by the reference quantisation on a sample of rows, so that it costs little
and has the numbers of every device. Nothing waits for the device before `as_floats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from homeostat.precision.fp8 import dequantise, largest_of, quantise
from homeostat.precision.fp8_linear import Watched
from homeostat.precision.fp8_model import Fp8Rewrite
from homeostat.precision.recipe import BLOCK, E4M3, Block, Fp8Recipe

# Rows of a tensor that are looked at: whole blocks of 128, from its beginning on.
SAMPLE_ROWS = 8 * BLOCK


@dataclass(frozen=True, slots=True)
class QuantisationStatistics:
    """Scalars on the tensor's device."""

    amax: Tensor
    saturated_share: Tensor
    flushed_share: Tensor
    scale_min: Tensor
    scale_max: Tensor
    error: Tensor


@torch.no_grad()
def statistics_of(
    x_RC: Tensor,
    *,
    block: Block,
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    sample_rows: int = SAMPLE_ROWS,
) -> QuantisationStatistics:
    """Measure what quantising the first rows of a matrix does to them.

    `amax` is the largest number that a delayed scale expects. Only then can numbers be cut.
    """
    sample = x_RC[:sample_rows].float()
    found = quantise(sample, block=block, dtype=dtype, power_of_two=power_of_two, amax=amax)
    there = dequantise(found)
    limit = found.scales.amax() * largest_of(dtype)
    is_cut = sample.abs() > limit * (1 + 2**-20) if amax is not None else sample.new_zeros(1)
    is_flushed = (sample != 0) & (there == 0)
    return QuantisationStatistics(
        amax=sample.abs().amax(),
        saturated_share=is_cut.float().mean(),
        flushed_share=is_flushed.float().mean(),
        scale_min=found.scales.amin(),
        scale_max=found.scales.amax(),
        error=(there - sample).norm() / sample.norm().clamp_min(torch.finfo(torch.float32).tiny),
    )


class LayerWatch:
    """Gathers the statistics of every tensor that a model quantises, by layer."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self._recipe = recipe
        self.found: dict[tuple[str, Watched], QuantisationStatistics] = {}

    def __call__(self, name: str, what: Watched, x: Tensor, amax: Tensor | None = None) -> None:
        """Measure a tensor; of several with one name, such as micro-batches, the first."""
        if (name, what) in self.found:
            return
        recipe = self._recipe
        dtype = recipe.gradients if what == "gradient" else E4M3
        if dtype is not None:
            block = recipe.weights if what == "weight" else recipe.rows
            how = {"block": block, "dtype": dtype, "power_of_two": recipe.power_of_two}
            self.found[name, what] = statistics_of(x.detach(), **how, amax=amax)


@contextmanager
def watching(rewrite: Fp8Rewrite) -> Iterator[LayerWatch]:
    """Measure what the model quantises inside the block, such as one micro-batch of an update."""
    watch = LayerWatch(rewrite.recipe)
    with rewrite.watched(watch):
        yield watch


def by_group(
    found: Mapping[tuple[str, Watched], QuantisationStatistics], groups: Mapping[str, str]
) -> dict[str, float]:
    """Return the worst numbers of each group of layers, as `<group>/<statistic>`, in one transfer.

    `groups` names the group of each layer. The smallest scale is the worst of its kind.
    """
    names, values = [], []
    for group in dict.fromkeys(groups.values()):
        own = [stats for (name, _), stats in found.items() if groups.get(name) == group]
        for field in fields(QuantisationStatistics) if own else ():
            scalars = torch.stack([getattr(stats, field.name) for stats in own])
            is_min = field.name == "scale_min"
            names.append(f"{group}/{field.name}")
            values.append(scalars.amin() if is_min else scalars.amax())
    return dict(zip(names, torch.stack(values).tolist(), strict=True)) if values else {}
