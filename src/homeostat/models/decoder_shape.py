"""The shape of a native decoder: sizes, and how its block differs from Llama's.

One block serves all families (models/decoder.py). A family is a set of values of `BlockForm`, read
from a config.json by models/families.py; the names of its parameters are part of the form, so that
`state_dict` has the Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from homeostat.config.cluster import OnHost
from homeostat.ops.activations import Activation
from homeostat.ops.attention import Limits
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms; None where the family has none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def count(self) -> int:
        """Return the number of norms of a layer."""
        return sum(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The differences of a family's block from Llama's, which is the default of every field.

    `centred_norms`: norms multiply by 1 + weight. `fused_qkv`, `fused_gate_up`: the checkpoint has
    one matrix for these maps. `wide_qk_norm`: queries and keys are normed over all heads at once.
    `embedding_scale` multiplies embeddings, `residual_scale` what a block adds to the residual
    stream, `logit_scale` the logits. `windows` has an entry per layer (None: no window), or is
    empty; `local_rope` is the rotation of layers that have one. Caps are soft.
    """

    norms: NormNames = NormNames()
    centred_norms: bool = False
    activation: Activation = "silu"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    wide_qk_norm: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None

    @property
    def is_windowed(self) -> bool:
        """Return whether some layer attends over a window."""
        return any(window is not None for window in self.windows)

    def beyond_llama(self, rope: RopeConfig) -> tuple[str, ...]:
        """Name what the block has that Llama's has not, apart from sliding windows."""
        default = LLAMA_BLOCK
        found = {
            "norms in other places": self.norms != default.norms,
            "norms that multiply by 1 + weight": self.centred_norms,
            "GELU": self.activation != default.activation,
            "fused qkv or gate and up matrices": self.fused_qkv or self.fused_gate_up,
            "norms over all heads": self.wide_qk_norm,
            "its own scale of attention scores": self.attention_scale is not None,
            "soft caps": self.attention_cap is not None or self.logit_cap is not None,
            "scaled embeddings, residuals or logits": self.scales != default.scales,
            "two rotations": self.local_rope is not None,
            "rotation of a part of a head or of neighbouring pairs": rope.is_unusual,
        }
        return tuple(name for name, is_there in found.items() if is_there)

    @property
    def scales(self) -> tuple[float, float, float]:
        """Return the factors of embeddings, residual updates and logits."""
        return self.embedding_scale, self.residual_scale, self.logit_scale


LLAMA_BLOCK = BlockForm()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a native decoder; the flags are the differences between families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    initializer_range: float
    # None in a dense model.
    moe: MoeShape | None = None
    block: BlockForm = LLAMA_BLOCK

    @property
    def attention_scale(self) -> float:
        """Return the factor of attention scores."""
        return self.block.attention_scale or self.head_dim**-0.5

    @property
    def is_llama_like(self) -> bool:
        """Return whether its block has nothing that Llama's has not."""
        return not self.block.is_windowed and not self.block.beyond_llama(self.rope)

    def limits(self, layer: int) -> Limits:
        """Return the limits of a layer's attention."""
        windows = self.block.windows
        return Limits(windows[layer] if windows else None, self.block.attention_cap)

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the rotary settings of a layer."""
        local = self.block.local_rope
        return local if local is not None and self.limits(layer).window is not None else self.rope

    @property
    def num_params(self) -> int:
        """Return the number of parameters, computed from the sizes alone."""
        return self._num_params(lambda moe: moe.num_params(self.hidden_size))

    @property
    def num_routed_params(self) -> int:
        """Return the number of parameters of experts that tokens are routed to."""
        moe = self.moe
        return 0 if moe is None else len(moe.layers) * moe.num_routed_params(self.hidden_size)

    def num_on_host(self, part: OnHost | None) -> int:
        """Return the number of parameters that are kept in host memory."""
        if part == "layers":
            return self.num_params - self._num_outer_params
        return self.num_routed_params if part == "experts" else 0

    @property
    def _num_outer_params(self) -> int:
        """Return the number of parameters of embedding, output matrix and final norm."""
        matrices = 1 if self.tie_embeddings else 2
        return matrices * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_active_params(self) -> int:
        """Return the number of parameters that one token is multiplied by."""
        return self._num_params(lambda moe: moe.num_active_params(self.hidden_size))

    def _num_params(self, of_experts: Callable[[MoeShape], int]) -> int:
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q_width + kv_width)
        biases = self.qkv_bias * (q_width + 2 * kv_width) + self.o_bias * self.hidden_size
        norms = self.block.norms.count * self.hidden_size
        if self.qk_norm:
            norms += q_width + kv_width if self.block.wide_qk_norm else 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        all_mlp = self.num_layers * mlp
        if self.moe is not None:
            num_moe = len(self.moe.layers)
            all_mlp = (self.num_layers - num_moe) * mlp + num_moe * of_experts(self.moe)
        return self._num_outer_params + self.num_layers * (attention + biases + norms) + all_mlp
