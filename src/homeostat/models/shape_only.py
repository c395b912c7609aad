"""A model that computes only shapes, to find out how much memory a run would need.

It is the decoder itself on the meta device, except for attention: kernels differ in what they keep
between forward and backward, and few of them support meta tensors. What they keep is written down
here.

Suffixes: `_N` packed tokens, `_H` heads, `_d` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.trainer import Checkpointing
from homeostat.models.build import config_origin, open_source, read_configs
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.lora import apply_lora
from homeostat.ops.attention import AttentionContext, PackedLayout, needs_all_heads


class ShapeDecoder(Decoder):
    """A decoder on the meta device. `kernel` decides how much memory attention takes.

    It is that of sdpa, or of varlen, as with rows.
    """

    def _packed_attention(self, layout: PackedLayout) -> AttentionContext:
        return ShapeAttention(self.kernel)


@dataclass(frozen=True, slots=True)
class ShapeAttention:
    """Attention with the memory of flash kernels, which hold nothing quadratic."""

    kernel: str

    def attend(
        self, layer: int, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, *, scale: float
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


def shape_decoder(
    model: ModelConfig,
    lora: LoraConfig | None,
    *,
    dtype: torch.dtype,
    kernel: str,
    gradient_checkpointing: Checkpointing,
) -> ShapeDecoder:
    source = open_source(model)
    config, _ = read_configs(source)
    shape = decoder_config(config, origin=config_origin(source))
    with torch.device("meta"):
        module = ShapeDecoder(shape, kernel=kernel, gradient_checkpointing=gradient_checkpointing)
    module = module.to(dtype)
    if lora is not None:
        apply_lora(module, lora, seed=0)
    return module.train()
