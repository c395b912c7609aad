"""Watch the routers of a training pass: count the load of experts, and add the routers' losses.

    lengths of the rows -> LoadWatch -> Routing.load -> every router calls `seen` -> `found`

A token counts as often as it occurs in the batch, also where the copies of a shared prompt are
computed once. The last token of a row does not count: nothing reads the model's output for it, and
no engine ever computed it, so counts of recorded routes and of a pass agree.

A layer's numbers are set, not added, so that a layer that is recomputed for its gradient is not
counted twice. Suffixes are those of ops/balance.py; `_L` are layers with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from homeostat.expert_load import RouterLoss
from homeostat.ops import balance
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.transfer import to_device

# Behind the load of a layer's experts: loss for an even load, loss on the logits, dropped pairs
# of counted tokens.
NUM_SUMS = 3


@dataclass(frozen=True, slots=True)
class LoadWatch:
    """The counted tokens of one pass: `place_C` in the pass, `row_C` of the batch.

    `number_N` is the place in the batch of each token of the pass. Without `loss` tokens are
    only counted.
    """

    shape: MoeShape
    place_C: Tensor
    row_C: Tensor
    number_N: Tensor
    num_rows: int
    loss: RouterLoss | None
    weight_N: Tensor
    # The share of all choices of the update that each expert has, where balancing is aux.
    share_LE: Tensor | None = None
    _found: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shape: MoeShape,
        lengths_B: Sequence[int] | np.ndarray,
        *,
        loss: RouterLoss | None,
        device: torch.device,
    ) -> LoadWatch:
        """Watch a batch whose rows have these lengths."""
        lengths = np.asarray(lengths_B, dtype=np.int64)
        ends_B, row_N = np.cumsum(lengths), np.repeat(np.arange(len(lengths)), lengths)
        is_counted_N = np.ones(int(lengths.sum()), dtype=bool)
        is_counted_N[ends_B - 1] = False
        place_C = np.flatnonzero(is_counted_N)
        arrays = (place_C, row_N[place_C], np.arange(len(row_N)), is_counted_N.astype(np.int64))
        place, row, number, weight = (to_device(torch.from_numpy(a), device) for a in arrays)
        share = None
        if loss is not None and loss.load_LE is not None:
            load_LE = np.array(loss.load_LE, dtype=np.float64)
            load_LE /= np.maximum(load_LE.sum(axis=1, keepdims=True), 1)
            share = to_device(torch.from_numpy(load_LE.astype(np.float32)), device)
        return cls(shape, place, row, number, len(lengths), loss, weight, share)

    def at(self, index_M: Tensor, place_N: Tensor) -> LoadWatch:
        """Follow the tokens to another pass: its token m was index_M[m], and n is at place_N[n]."""
        place_C = place_N[self.place_C]
        weight_M = torch.zeros(len(index_M), dtype=torch.int64, device=index_M.device)
        weight_M.index_add_(0, place_C, torch.ones_like(place_C))
        return replace(self, place_C=place_C, number_N=self.number_N[index_M], weight_N=weight_M)

    def part(self, index_X: Tensor, is_own_X: Tensor) -> LoadWatch:
        """Follow some of the tokens to a pass of this rank alone; the others are on other ranks.

        Only what is its own is counted. Losses over whole rows (sequence_aux) are not for parts.
        """
        return replace(
            self, number_N=self.number_N[index_X], weight_N=self.weight_N[index_X] * is_own_X
        )

    def seen(
        self,
        layer: int,
        *,
        logits_NE: Tensor,
        scores_NE: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
    ) -> Tensor:
        """Count what a layer chose. Return the weights, with the losses and room for tokens."""
        num_experts, loss = self.shape.num_experts, self.loss
        load_E = balance.token_load(ids_NK, self.weight_N, num_experts=num_experts)
        aux = z = dropped = weights_NK.new_zeros(())
        if loss is not None:
            aux, z = self._losses(layer, logits_NE, scores_NE, ids_NK, loss)
            total = (aux * loss.aux_coefficient + z * loss.z_coefficient) / len(self.shape.layers)
            if total.requires_grad:
                weights_NK = balance.with_loss(weights_NK, total)
        if loss is not None and loss.capacity_factor is not None:
            sizes = {"num_tokens": len(ids_NK), "shape": self.shape}
            capacity = balance.capacity_of(loss.capacity_factor, **sizes)
            rules = {"capacity": capacity, "num_experts": num_experts}
            room_NK = balance.has_room(ids_NK, self.number_N, **rules)
            weights_NK = weights_NK * room_NK
            dropped = (~room_NK * self.weight_N[:, None]).sum()
        sums = torch.stack([aux.detach(), z.detach(), dropped.to(aux.dtype)])
        self._found[layer] = torch.cat([load_E.to(sums.dtype), sums])
        return weights_NK

    @property
    def has_limit(self) -> bool:
        """Return whether experts take a bounded number of tokens."""
        return self.loss is not None and self.loss.capacity_factor is not None

    def load(self) -> Tensor:
        """Return fp32 [L, E]: the tokens of each layer's experts."""
        return self.found()[:, :-NUM_SUMS]

    def found(self) -> Tensor:
        """Return fp32 [L, E + NUM_SUMS]: each layer's load and sums, with the update's weights."""
        layers = range(len(self.shape.layers))
        return torch.stack([self._found[layer] for layer in layers])

    def _losses(
        self, layer: int, logits_NE: Tensor, scores_NE: Tensor, ids_NK: Tensor, loss: RouterLoss
    ) -> tuple[Tensor, Tensor]:
        """This pass's share of the update's losses of a layer, before their coefficients."""
        aux = z = logits_NE.new_zeros(())
        probs_NE = balance.probabilities(scores_NE, self.shape)
        if loss.balancing == "aux":
            assert self.share_LE is not None, "the update's load is counted before its passes"
            aux = balance.aux_sum(probs_NE, self.weight_N, self.share_LE[layer]) / loss.num_tokens
        elif loss.balancing == "sequence_aux":
            where = (self.place_C, self.row_C)
            aux = balance.sequence_aux_sum(probs_NE, ids_NK, *where, num_rows=self.num_rows)
            aux = aux / loss.num_rows
        if loss.z_coefficient > 0:
            z = balance.z_sum(logits_NE, self.weight_N) / loss.num_tokens
        return aux, z
