"""Tiny transformers models with random weights, written as real checkpoint folders."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_wide_heads": {"model_type": "llama", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
}
ROPES = {
    "theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    },
    "yarn_full": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}


def random_model(settings: dict, *, seed: int = 0, attention: str = "eager") -> torch.nn.Module:
    """A model whose norms and biases are random too, so that none may be left out."""
    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **{**SIZES, **settings})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def save(model: torch.nn.Module, folder: Path, *, shard_bytes: int | None = None) -> Path:
    model.save_pretrained(folder, max_shard_size=shard_bytes or "5GB")
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Changes keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
