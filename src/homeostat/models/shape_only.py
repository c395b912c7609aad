"""A model that computes only shapes, to find out how much memory a run would need.

It is the decoder itself on the meta device, except for attention and experts. Attention kernels
differ in what they keep between forward and backward, and few of them support meta tensors: what
they keep is written down here. Which experts tokens choose is not known without data: here all
experts get equally many, which holds as many bytes as any other choice.

Suffixes: `_N` packed tokens, `_H` heads, `_d` head dim, `_E` experts, `_K` slots, `_m` tokens of an
expert, `_D` model dim, `_I` width of an expert, `_J` twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.trainer import Checkpointing
from homeostat.models.blocks import MoeBlock
from homeostat.models.build import (
    HoldMaps,
    config_origin,
    open_source,
    read_configs,
    require_hold,
)
from homeostat.models.decoder import Decoder
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.families import decoder_config
from homeostat.models.lora import apply_lora
from homeostat.models.moe import Experts
from homeostat.models.value_head import add_value_head
from homeostat.ops.activations import gated_silu
from homeostat.ops.attention import (
    NO_LIMITS,
    AttentionContext,
    Limits,
    PackedLayout,
    needs_all_heads,
)
from homeostat.ops.expert_rows import combined
from homeostat.ops.experts import is_grouped


class ShapeDecoder(Decoder):
    """A decoder on the meta device. `kernel` decides how much memory attention takes.

    It is that of sdpa, or of varlen, as with rows.
    """

    def __init__(self, config: DecoderConfig, **flags: Any) -> None:
        super().__init__(config, **flags)
        for layer in self.layers:
            if isinstance(layer.mlp, MoeBlock):
                layer.mlp.experts = ShapeExperts(layer.mlp.experts)

    def packed_attention(
        self, layout: PackedLayout, *, num_kv_heads: int | None = None
    ) -> AttentionContext:
        return ShapeAttention(self.kernel)


@dataclass(frozen=True, slots=True)
class ShapeAttention:
    """Attention with the memory of flash kernels, which hold nothing quadratic."""

    kernel: str

    def attend(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        if needs_all_heads(q_NHd, k_NHd):
            repeats = q_NHd.shape[1] // k_NHd.shape[1]
            k_NHd, v_NHd = (x.repeat_interleave(repeats, dim=1) for x in (k_NHd, v_NHd))
        out_NHd = _Flash.apply(q_NHd, k_NHd, v_NHd, self.kernel)
        # sdpa computes document by document, and the results are concatenated.
        return torch.cat([out_NHd]) if self.kernel == "sdpa" else out_NHd


class _Flash(torch.autograd.Function):
    """Keep queries, keys, values, the result and one number per token and head."""

    @staticmethod
    def forward(ctx: Any, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, kernel: str) -> Tensor:
        out_NHd = torch.empty_like(q_NHd)
        lse_HN = q_NHd.new_empty((q_NHd.shape[1], q_NHd.shape[0]), dtype=torch.float32)
        ctx.kernel = kernel
        ctx.save_for_backward(q_NHd, k_NHd, v_NHd, out_NHd, lse_HN)
        return out_NHd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q_NHd, k_NHd, v_NHd, *_ = ctx.saved_tensors
        found = tuple(torch.empty_like(x) for x in (q_NHd, k_NHd, v_NHd))
        if ctx.kernel in ("varlen", "rows"):
            # The kernel sums the gradient of queries in fp32, and that of keys and values for all
            # heads.
            _ = [torch.empty_like(q_NHd, dtype=torch.float32)]
            if q_NHd.shape[1] != k_NHd.shape[1]:
                _ += [torch.empty_like(q_NHd) for _ in range(2)]
        return *found, None


class ShapeExperts(Experts):
    """Experts that all get equally many tokens, computed in one product each."""

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        self.numerics, self.kernel = experts.numerics, experts.kernel
        self.product = experts.product
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if is_grouped(x_ND, kernel=self.kernel, numerics=self.numerics):
            # It asks nobody how many tokens an expert has.
            return super().forward(x_ND, ids_NK, weights_NK)
        num_experts, num_pairs = len(self.down_proj), ids_NK.numel()
        per_expert = -(-num_pairs // num_experts)
        index_S = ids_NK.new_zeros(num_experts * per_expert)
        rows_EmD = x_ND[index_S].view(num_experts, per_expert, -1)
        both_EmJ = torch.bmm(rows_EmD, self.gate_up_proj.transpose(1, 2))
        gate_EmI, up_EmI = both_EmJ.chunk(2, dim=-1)
        gated_EmI = gated_silu(gate_EmI.flatten(0, 1), up_EmI.flatten(0, 1), numerics="fast")
        out_EmD = torch.bmm(gated_EmI.view(num_experts, per_expert, -1), self.down_proj.mT)
        # Back to the order of (token, slot) pairs.
        out_SD = out_EmD.flatten(0, 1)[index_S.new_zeros(num_pairs)]
        return combined(out_SD.view(*ids_NK.shape, -1), weights_NK)


def shape_decoder(
    model: ModelConfig,
    lora: LoraConfig | None,
    *,
    dtype: torch.dtype,
    kernel: str,
    gradient_checkpointing: Checkpointing,
    has_value_head: bool = False,
    hold: HoldMaps | None = None,
) -> ShapeDecoder:
    require_hold(model, hold)
    source = open_source(model)
    config, _ = read_configs(source)
    shape = decoder_config(config, origin=config_origin(source))
    with torch.device("meta"):
        module = ShapeDecoder(
            shape,
            kernel=kernel,
            gradient_checkpointing=gradient_checkpointing,
            grouped_kernel=model.moe.grouped_kernel,
        )
        if has_value_head:
            add_value_head(module)
    module = module.to(dtype)
    if hold is not None:
        hold(module, dtype)
    if lora is not None:
        apply_lora(module, lora, seed=0)
    return module.train()
