"""Decide to which experts the tokens of a forward pass go: the choice is made, recorded or
replayed.

    Routing()                          every layer chooses
    Routing(records=True)              ... and what it chose can be read afterwards
    Routing(replayed_NLK, free_N)      recorded choices are repeated, except for tokens in `free_N`

Layers are numbered among those that have experts. A layer asks `experts` for its ids once in a
forward pass, and once more if the pass is recomputed for its gradient. Routing follows its tokens
where a pass reorders or selects them (`at`).

Replay (R3). The ids of the engine decide which experts compute; the weights of their outputs are
the trainer's own scores at those ids, so that the router learns. With `weights_NLK` the engine's
weights are the values, and the gradient is that of the trainer's own weights (straight-through).
Invariant: each layer reads its recorded choices exactly once in the pass, and exactly once in each
recomputation of the layer; `finish_pass` and `finish_backward` raise if one did not. What the
layer would have chosen is compared on the way: it is computed anyway, for the free tokens.

Suffixes: `_N` packed tokens, `_L` layers with experts, `_K` slots of a token, best expert first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from homeostat.errors import ReplayError
from homeostat.models.expert_load import LoadWatch


@dataclass(slots=True)
class Reads:
    """Counts of reads: how often each layer read its choices, and would have chosen the same."""

    in_pass: Counter[int] = field(default_factory=Counter)
    recomputing: Counter[int] = field(default_factory=Counter)
    recomputed: Counter[int] = field(default_factory=Counter)
    is_recomputing: bool = False
    # Device scalars over all layers: (token, layer) pairs, and those with the same set of experts.
    num_compared: Tensor | int = 0
    num_same: Tensor | int = 0

    def count(self, layer: int) -> None:
        (self.recomputing if self.is_recomputing else self.in_pass)[layer] += 1


@dataclass(slots=True)
class Routing:
    """The choices of one forward pass."""

    replayed_NLK: Tensor | None = None
    # Tokens that have no recorded choice: the last one of a row, which no engine ever ran.
    free_N: Tensor | None = None
    records: bool = False
    # Weights of the replayed experts, where those of the engine are used.
    weights_NLK: Tensor | None = None
    # How often each token of the pass occurs in the batch, where prompts are shared; None: once.
    copies_N: Tensor | None = None
    # Counts the load of experts and adds the routers' losses; None outside of training.
    load: LoadWatch | None = None
    _chosen: dict[int, Tensor] = field(default_factory=dict)
    _weights: dict[int, Tensor] = field(default_factory=dict)
    # Shared with what `at` returns: it is one pass.
    _reads: Reads = field(default_factory=Reads)

    @property
    def reads(self) -> Reads:
        return self._reads

    def experts(self, layer: int, choose: Callable[[], Tensor]) -> Tensor:
        """Return int64 [N, K]: the experts of each token in a layer."""
        ids_NK = choose()
        if self.replayed_NLK is not None:
            ids_NK = self._replayed(layer, ids_NK)
        if self.records:
            self._chosen[layer] = ids_NK
        return ids_NK

    def weights(self, layer: int, own_NK: Tensor) -> Tensor:
        """Return fp32 [N, K]: the weights of those experts; `own_NK` are the layer's own."""
        if self.records:
            self._weights[layer] = own_NK
        if self.weights_NLK is None:
            return own_NK
        # The difference is exactly 0, and carries the gradient.
        through_NK = self.weights_NLK[:, layer] + (own_NK - own_NK.detach())
        if self.free_N is None:
            return through_NK
        return torch.where(self.free_N[:, None], own_NK, through_NK)

    def at(self, index_M: Tensor) -> Routing:
        """Return the routing of tokens at these places. It keeps its own record."""

        def chosen(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index_M]

        return Routing(
            chosen(self.replayed_NLK),
            chosen(self.free_N),
            self.records,
            chosen(self.weights_NLK),
            chosen(self.copies_N),
            _reads=self._reads,
        )

    def copies(self, place_N: Tensor, *, count: int) -> Tensor | None:
        """Return how often each of `count` distinct tokens occurs: token n is number place_N[n].

        None where nothing is replayed, because only replayed tokens are compared.
        """
        if self.replayed_NLK is None:
            return None
        zeros_U = torch.zeros(count, dtype=torch.int64, device=place_N.device)
        return zeros_U.index_add_(0, place_N, torch.ones_like(place_N))

    def take_record(self, other: Routing, index_N: Tensor) -> None:
        """Take over what `other` recorded: token n is its token index_N[n]."""
        self._chosen = {layer: ids_MK[index_N] for layer, ids_MK in other._chosen.items()}
        self._weights = {layer: own_MK[index_N] for layer, own_MK in other._weights.items()}

    def recorded(self) -> Tensor:
        """Return int64 [N, L, K] of what all layers chose."""
        return _stacked(self._chosen)

    def recorded_weights(self) -> Tensor:
        """Return fp32 [N, L, K]: the weights of what all layers chose."""
        return _stacked(self._weights)

    @contextmanager
    def recomputation(self, layer: int | None) -> Iterator[None]:
        """Mark that a layer is computed again for its gradient; None if it has no experts."""
        if layer is not None:
            self._reads.recomputed[layer] += 1
        self._reads.is_recomputing = True
        try:
            yield
        finally:
            self._reads.is_recomputing = False

    def finish_pass(self, num_layers: int) -> None:
        """Raise ReplayError unless every layer read its recorded choices exactly once."""
        if self.replayed_NLK is not None:
            wanted = Counter(dict.fromkeys(range(num_layers), 1))
            _require(self._reads.in_pass, wanted, what="the forward pass")

    def finish_backward(self) -> None:
        """Raise ReplayError unless each recomputation of a layer read them exactly once."""
        if self.replayed_NLK is not None:
            reads = self._reads
            _require(reads.recomputing, reads.recomputed, what="the recomputation for gradients")

    def _replayed(self, layer: int, chosen_NK: Tensor) -> Tensor:
        assert self.replayed_NLK is not None, "routes are replayed"
        num_layers = self.replayed_NLK.shape[1]
        if layer >= num_layers:
            raise ReplayError(
                f"layer {layer} of those with experts has no recorded routes: {num_layers} layers "
                "were recorded."
            )
        recorded_NK = self.replayed_NLK[:, layer].long()
        if recorded_NK.shape != chosen_NK.shape:
            raise ReplayError(
                f"layer {layer} of those with experts routes {_shape(chosen_NK)}, and the recorded "
                f"routes are of {_shape(recorded_NK)}."
            )
        self._reads.count(layer)
        if not self._reads.is_recomputing:
            self._compare(recorded_NK, chosen_NK)
        if self.free_N is None:
            return recorded_NK
        return torch.where(self.free_N[:, None], chosen_NK, recorded_NK)

    def _compare(self, recorded_NK: Tensor, chosen_NK: Tensor) -> None:
        """Count the tokens whose set of experts is the one that the layer would have chosen.

        A token counts as often as it occurs in the batch, however often it is computed.
        """
        pair = (ids_NK.sort(dim=1).values for ids_NK in (recorded_NK, chosen_NK))
        same_N = torch.eq(*pair).all(dim=1)
        has_N = torch.ones_like(same_N) if self.free_N is None else ~self.free_N
        count_N = has_N.long() if self.copies_N is None else self.copies_N * has_N
        self._reads.num_same = self._reads.num_same + (count_N * same_N).sum()
        self._reads.num_compared = self._reads.num_compared + count_N.sum()


def _stacked(by_layer: dict[int, Tensor]) -> Tensor:
    assert by_layer, "nothing was recorded"
    return torch.stack([by_layer[layer] for layer in range(len(by_layer))], dim=1)


def _require(reads: Counter[int], wanted: Counter[int], *, what: str) -> None:
    for layer in sorted(reads.keys() | wanted.keys()):
        if reads[layer] != wanted[layer]:
            raise ReplayError(
                f"layer {layer} of those with experts read its recorded routes {reads[layer]} "
                f"times in {what}, which computed it {wanted[layer]} times: its tokens would not "
                "go to the experts that sampled them. The step was stopped, and nothing of it was "
                "applied. Set model.moe.router_replay=off to train without replay."
            )


def _shape(ids_NK: Tensor) -> str:
    return f"{ids_NK.shape[0]} tokens x {ids_NK.shape[1]} slots"


def smallest_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer type that holds the number of every expert."""
    return torch.uint8 if num_experts <= 256 else torch.int16
