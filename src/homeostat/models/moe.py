"""A layer of experts: a router in fp32, the experts it chooses from, and shared experts.

    x_ND -> router -> experts of each token -> weighted sum (+ the shared expert)

All experts of a layer are two parameters, one matrix after the other, because grouped kernels
multiply them in one go. Checkpoints name each expert's matrices separately: models/hub_names.py
translates.

Suffixes: `_N` packed tokens, `_D` model dim, `_E` experts, `_K` slots, `_I` width of an expert,
`_J` twice that: gate, then up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from homeostat.config.moe import GroupedKernel
from homeostat.errors import ModelError
from homeostat.models.routing import Routing
from homeostat.ops.experts import ExpertsProduct, experts_of
from homeostat.ops.linear import Numerics
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.routing import best_experts, expert_weights, router_logits, scores_of


class Router(nn.Module):
    """Scores the experts. Its arithmetic is fp32 whatever the weights are stored in."""

    def __init__(self, shape: MoeShape, hidden_size: int, *, numerics: Numerics) -> None:
        super().__init__()
        self.shape = shape
        self.numerics: Numerics = numerics
        self.weight = nn.Parameter(torch.zeros(shape.num_experts, hidden_size))
        # Moved by its own rule and never by a gradient: it only decides who is chosen.
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(shape.num_experts), requires_grad=False)
            if shape.has_bias
            else None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        bias_E = self.e_score_correction_bias
        if bias_E is not None and bias_E.dtype != torch.float32:
            # It stays fp32 when the model is cast: steps of its rule are lost in bf16.
            bias_E.data = bias_E.data.float()
        return self

    def logits(self, x_ND: Tensor) -> Tensor:
        # Ranks may hold and gather the weight in fp32: its value is what x's dtype can hold.
        weight_ED = self.weight.to(x_ND.dtype)
        return router_logits(x_ND, weight_ED, numerics=self.numerics)

    def forward(self, x_ND: Tensor, layer: int, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, both [N, K]."""
        logits_NE = self.logits(x_ND)
        scores_NE = scores_of(logits_NE, self.shape, numerics=self.numerics)
        bias_E = self.e_score_correction_bias
        ids_NK = routing.experts(layer, lambda: best_experts(scores_NE, bias_E, self.shape))
        weights_NK = routing.weights(layer, expert_weights(scores_NE, ids_NK, self.shape))
        if routing.load is not None:
            router = {"logits_NE": logits_NE, "scores_NE": scores_NE}
            chosen = {"ids_NK": ids_NK, "weights_NK": weights_NK}
            weights_NK = routing.load.seen(layer, **router, **chosen)
        return ids_NK, weights_NK


class Experts(nn.Module):
    """The matrices of all experts of a layer."""

    def __init__(self, shape: MoeShape, hidden_size: int, *, numerics: Numerics) -> None:
        super().__init__()
        # Set by the decoder.
        self.kernel: GroupedKernel = "auto"
        self.numerics: Numerics = numerics
        # A rewrite to another precision (precision/) exchanges it and leaves the parameters.
        self.product: ExpertsProduct = experts_of
        num_experts, size = shape.num_experts, shape.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, size))
        if not self.down_proj.is_meta:
            for matrix in (self.gate_up_proj, self.down_proj):
                nn.init.normal_(matrix, std=0.02)

    def forward(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        return self.product(
            x_ND,
            ids_NK,
            weights_NK,
            self.gate_up_proj,
            self.down_proj,
            numerics=self.numerics,
            kernel=self.kernel,
        )


def require_even_experts(shape: MoeShape | None, *, ep: int) -> None:
    """Raise ModelError if `ep` ranks cannot have the same number of a model's experts each."""
    key = "trainer.backend.expert_parallel_size"
    if ep > 1 and shape is None:
        raise ModelError(
            f"{key} is {ep}, and the model of model.path has no experts, so it would have no "
            "effect. Remove it."
        )
    if shape is not None and shape.num_experts % ep:
        raise ModelError(
            f"{key} is {ep}, and the model has {shape.num_experts} experts: {shape.num_experts} % "
            f"{ep} = {shape.num_experts % ep}, so ranks cannot have equal shares. Set it to a "
            f"divisor of {shape.num_experts}."
        )
