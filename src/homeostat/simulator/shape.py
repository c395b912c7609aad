"""The sizes of a decoder that its memory and its arithmetic follow from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. `experts` is 0 in a dense model; norms and biases are not counted."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    # Layers with experts; the others have one block of `intermediate`.
    moe_layers: int = 0

    @property
    def attention_params(self) -> int:
        """Number of weights of one layer's attention."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_params(self) -> int:
        """Number of weights of one expert."""
        return 3 * self.hidden * self.expert_width

    @property
    def routed_params(self) -> int:
        """Number of weights of all experts that tokens are routed to."""
        return self.moe_layers * self.experts * self.expert_params

    @property
    def head_params(self) -> int:
        """Number of weights of the output matrix."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """Number of all weights."""
        tables = self.head_params * (1 if self.tied else 2)
        return tables + round(self._body(self.experts))

    @property
    def body_params(self) -> int:
        """Number of weights that a token is multiplied with, without the output matrix."""
        return round(self._body(self.active_experts))

    @property
    def active_params(self) -> int:
        """Number of weights that a sampled token is multiplied with."""
        return self.body_params + self.head_params

    @property
    def kv_elements(self) -> int:
        """Cached numbers of one token: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def read_params(self, batch: float) -> float:
        """Return the number of weights that a decoding step of `batch` tokens reads.

        With experts, those that at least one token is routed to, if routing is uniform.
        """
        if not self.experts:
            return self._body(0) + self.head_params
        missed = (1 - self.active_experts / self.experts) ** batch
        return self._body(self.experts * (1 - missed)) + self.head_params

    def _body(self, experts: float) -> float:
        """Weights of all layers, with so many routed experts a layer."""
        dense = (self.layers - self.moe_layers) * 3 * self.hidden * self.intermediate
        router = self.hidden * self.experts
        shared = 3 * self.hidden * self.shared_width
        mixed = self.moe_layers * (experts * self.expert_params + router + shared)
        return self.layers * self.attention_params + dense + mixed

    def attention_flops(self, pairs: float) -> float:
        """Return the forward FLOPs of attention over so many pairs of tokens, in all layers."""
        return 4.0 * self.layers * self.heads * self.head_dim * pairs
