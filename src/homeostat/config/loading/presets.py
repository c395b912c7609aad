"""Named sets of defaults. A key in the recipe or an override always wins over a preset.

If a key of a preset cannot work together with the recipe's own keys, the default is used instead.
What only helps a GPU is listed separately: a recipe that may run on a CPU does not get it.
"""

from __future__ import annotations

from typing import Any

from homeostat.config.loading.tree import fill

PRESETS: dict[str, dict[str, Any]] = {
    # For a small GPU: everything that costs speed but does not change the result.
    "low_memory": {
        "model": {"meta_init": True},
        "trainer": {
            "max_tokens_per_device": 2048,
            "gradient_checkpointing": True,
            "logits_chunk_bytes": 16 * 2**20,
        },
        "data": {"max_length": 2048},
    },
    # Log everything, and stop at the first problem.
    "debug": {
        "trainer": {"on_nonfinite": "halt", "on_oom": "halt"},
        "eval": {"interval_steps": 5},
        "checkpoint": {"interval_steps": 5},
        "observe": {"log_level": "debug", "profiler": {"steps": [1]}},
    },
}

# Merged as well where the recipe says that it runs on a GPU (trainer.device: cuda), or over ranks
# (trainer.backend.type: fsdp): the weights, gradients and Adam's state in host memory.
ON_A_GPU: dict[str, dict[str, Any]] = {
    "low_memory": {
        "trainer": {
            "backend": {"type": "local", "offload_optimizer": True, "offload_params": True},
        },
    },
}


def preset_of(name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that a preset gives a recipe."""
    trainer = recipe.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    backend = trainer.get("backend")
    is_sharded = isinstance(backend, dict) and backend.get("type") == "fsdp"
    if trainer.get("device") != "cuda" and not is_sharded:
        return PRESETS[name]
    return fill(PRESETS[name], ON_A_GPU.get(name, {}))
