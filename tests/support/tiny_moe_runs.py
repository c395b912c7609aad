"""A tiny model with experts for runs and trainers: the recipes of tests/support/tiny.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import tiny

from homeostat.config import RunConfig

EXPERTS = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "initializer_range": 0.1,
    },
    "dots1": {
        "model_type": "dots1",
        "architectures": ["Dots1ForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "sliding_window": None,
        "initializer_range": 0.1,
    },
}


def config(folder: Path, *overrides: str, family: str = "qwen3_moe", **sections: Any) -> RunConfig:
    """A recipe over a random model with experts."""
    model = folder / "model"
    if not model.exists():
        tiny.write_model(model, **EXPERTS[family])
    return tiny.config(folder, *overrides, **sections)
