"""The shape of a model's experts: how many, which layers have them, and how tokens choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts of a decoder. Layers that are not in `layers` have an ordinary MLP.

    A router scores all experts (`scoring`), and a token goes to the `top_k` best of them. With
    `has_bias` a bias per expert is added to the scores for the choice alone. With groups, only
    experts of the `num_groups_kept` best groups can be chosen. The outputs of a token's experts are
    weighted by their scores, which are `normalised` to a sum of 1 or not, times `scaling`.
    `shared_size` is the width of an expert that all tokens go to; 0 if there is none. `names` is
    the spelling of the tensors in checkpoints.
    """

    num_experts: int
    top_k: int
    expert_size: int
    layers: tuple[int, ...]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    num_groups_kept: int = 1
    has_bias: bool = False
    shared_size: int = 0
    names: Literal["qwen", "mixtral"] = "qwen"

    def num_params(self, hidden_size: int) -> int:
        """Return the number of parameters of one layer's router and experts."""
        return self._num_params(hidden_size, num_experts=self.num_experts)

    def num_routed_params(self, hidden_size: int) -> int:
        """Return those of one layer's experts that tokens are routed to."""
        return 3 * hidden_size * self.num_experts * self.expert_size

    def num_active_params(self, hidden_size: int) -> int:
        """Return those of the router and of the experts that one token goes to."""
        return self._num_params(hidden_size, num_experts=self.top_k)

    def _num_params(self, hidden_size: int, *, num_experts: int) -> int:
        router = self.num_experts * (hidden_size + self.has_bias)
        experts = 3 * hidden_size * (num_experts * self.expert_size + self.shared_size)
        return router + experts

    def why_odd(self) -> str:
        """Return what of the shape cannot be; '' if nothing."""
        if self.top_k > self.num_experts:
            return f"num_experts_per_tok is {self.top_k}, and there are {self.num_experts} experts."
        if self.num_experts % self.num_groups:
            return (
                f"n_group is {self.num_groups}, which does not divide {self.num_experts} experts."
            )
        if self.num_groups_kept > self.num_groups:
            return f"topk_group is {self.num_groups_kept}, and n_group {self.num_groups}."
        group_size = self.num_experts // self.num_groups
        if self.top_k > group_size * self.num_groups_kept:
            return (
                f"num_experts_per_tok is {self.top_k}, and the {self.num_groups_kept} groups of "
                f"topk_group have {group_size * self.num_groups_kept} experts."
            )
        if self.has_bias and group_size < 2:
            return f"n_group is {self.num_groups}: a group needs two experts at least."
        return ""
