"""Tiny models of the families whose block differs from Llama's, as transformers builds them."""

from tests.parity.tiny_models import SIZES, random_model

# Rows are longer than this, so that windows hide something.
WINDOW = 5
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.3, 2.1],
    "long_factor": [2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}
BLOCKS = {
    "mistral_window": {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        # Small enough to matter at this size.
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"model_type": "phi3", "sliding_window": WINDOW, "pad_token_id": 0},
    "phi4_mini": {
        "model_type": "phi3",
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONG,
        "pad_token_id": 0,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},
    "glm": {"model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
}


def random_family(name: str, *, seed: int = 7):
    """Return a transformers model of a family, with random norms and biases."""
    assert SIZES["max_position_embeddings"] > 64, "longrope changes beyond its original length"
    return random_model(BLOCKS[name], seed=seed)
