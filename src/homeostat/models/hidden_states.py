"""Collects the hidden states of chosen layers while a model computes.

Layers are numbered as transformers numbers them: 0 is the embedding, l what layer l hands on, and
the last one is taken after the final norm.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


class HiddenStates:
    """States [N, D] of the chosen layers, in the order of the batch's tokens."""

    def __init__(self, layers: Collection[int]) -> None:
        self.layers = frozenset(layers)
        self._parts: dict[int, list[Tensor]] = {layer: [] for layer in sorted(self.layers)}

    def add(self, layer: int, state_ND: Tensor) -> None:
        """Keep the state of the next tokens, where the layer was asked for."""
        if layer in self.layers:
            self._parts[layer].append(state_ND)

    def reorder(self, order_N: Tensor) -> None:
        """Put the tokens of all states into another order."""
        self._parts = {layer: [state[order_N]] for layer, state in self.found().items()}

    def found(self) -> dict[int, Tensor]:
        return {layer: torch.cat(parts) for layer, parts in self._parts.items()}
