"""Tiny models with experts, random, of every family that the native decoder knows."""

from pathlib import Path

import torch
from tests.parity.tiny_models import random_model

_COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}
MOE = {
    "qwen3_moe": _COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe_plain": _COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "mixtral": _COMMON
    | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": None,
    },
    "dots1": _COMMON
    | {
        "model_type": "dots1",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention"] * 3,
        "sliding_window": None,
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
