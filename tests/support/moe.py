"""Tiny decoders with experts, of every family, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.tiny_models import SIZES

from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.moe import Router

MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    # A dense first layer, sigmoid scores with a bias, groups and shared experts.
    "dots1": {
        "model_type": "dots1",
        "num_hidden_layers": 3,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "sliding_window": None,
        "head_dim": 16,
    },
}


def moe_settings(family: str, **changes: Any) -> dict[str, Any]:
    return {**SIZES, "rms_norm_eps": 1e-6, **MOE_FAMILIES[family], **changes}


def moe_decoder(family: str, *, seed: int = 0, numerics: str = "fast", **changes: Any) -> Decoder:
    """A decoder whose routers choose widely different experts for different tokens."""
    torch.manual_seed(seed)
    config = decoder_config(moe_settings(family, **changes))
    decoder = Decoder(config, kernel="sdpa", numerics=numerics)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 0.5, std=0.2)
    for module in decoder.modules():
        if isinstance(module, Router):
            torch.nn.init.normal_(module.weight, std=1.0)
    return decoder.requires_grad_(False)
