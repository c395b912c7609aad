"""Measure how far the written weights of a model are from those that were evaluated.

An adapter is trained beside its base. Merged into it, its update is rounded to the precision of the
weights, and weights that are packed in INT4 after training are rounded to that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor

from homeostat.models.build import Model
from homeostat.models.lora import lora_modules
from homeostat.precision.int4 import fake_quantise

# Turns a merged weight, by its name, into the one that readers of the file compute with.
AsWritten = Callable[[str, Tensor], Tensor]


def merging_error(model: Model, as_written: AsWritten) -> float | None:
    """Return the error of merged weights as a share of the adapter's update (root mean squares).

    None if nothing is merged, or if the adapter changes nothing.
    """
    error = update = 0.0
    for name, adapted in lora_modules(model):
        base = adapted.weight.float()
        exact = adapted.merged_exactly()
        written = as_written(f"{name}.weight", exact.to(adapted.weight.dtype)).float()
        error += float((written - exact).square().sum(dtype=torch.float64))
        update += float((exact - base).square().sum(dtype=torch.float64))
    return (error / update) ** 0.5 if update > 0 else None


class RoundingError:
    """The error of weights that are rounded to INT4, as a share of their norm."""

    def __init__(self, names: Collection[str], *, group_size: int) -> None:
        self.names, self.group_size = names, group_size
        self._error = self._norm = 0.0

    def watched(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights on unchanged."""
        for name, tensor in stream:
            if name in self.names:
                apart = fake_quantise(tensor, group_size=self.group_size).float() - tensor.float()
                self._error += float(apart.square().sum(dtype=torch.float64))
                self._norm += float(tensor.float().square().sum(dtype=torch.float64))
            yield name, tensor

    @property
    def share(self) -> float:
        """Return the error of all weights that were passed on."""
        return (self._error / self._norm) ** 0.5 if self._norm > 0 else 0.0


def percent(share: float) -> str:
    """Write a share for people, with two significant digits."""
    return "less than 0.1 %" if share < 1e-3 else f"{100 * share:.2g} %"
