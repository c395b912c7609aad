"""Tiny models with experts, random, of every family that the native decoder knows."""

from pathlib import Path

import torch
from tests.parity.tiny_models import random_model
from tests.support.moe import MOE_FAMILIES

_COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}
_QWEN, _MIXTRAL, _DOTS = (
    MOE_FAMILIES[name] | _COMMON for name in ("qwen3_moe", "mixtral", "dots1")
)
MOE = {
    "qwen3_moe": _QWEN | {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "qwen3_moe_plain": _QWEN
    | {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "mixtral": _MIXTRAL | {"num_local_experts": 4, "intermediate_size": 24},
    "dots1": _DOTS
    | {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "layer_types": ["full_attention"] * 3,
    },
}


def random_moe(family: str, *, seed: int = 0) -> torch.nn.Module:
    """A model whose expert biases differ, so that they decide some choices."""
    model = random_model(MOE[family], seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def saved_moe(family: str, folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """Write a model under the hub's names and return it."""
    model = random_moe(family, seed=seed)
    model.save_pretrained(folder)
    return model
