"""Named sets of defaults. A key in the recipe or an override always wins over a preset.

If a key of a preset cannot work together with the recipe's own keys, the default is used instead.
"""

from __future__ import annotations

from typing import Any

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
