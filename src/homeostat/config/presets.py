"""Named sets of defaults. A preset fills in; a key in the recipe or an override always wins.

A preset's key that cannot work beside the recipe's own keys gives way to the default.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # The ladder of a small GPU: everything that costs speed but not science.
    "low_memory": {
        "model": {"meta_init": True},
        "trainer": {
            "max_tokens_per_device": 2048,
            "gradient_checkpointing": True,
            "logits_chunk_bytes": 16 * 2**20,
        },
        "data": {"max_length": 2048},
    },
    # Look at everything, stop at the first surprise.
    "debug": {
        "trainer": {"on_nonfinite": "halt", "on_oom": "halt"},
        "eval": {"interval_steps": 5},
        "checkpoint": {"interval_steps": 5},
        "observe": {"log_level": "debug", "profiler": {"steps": [1]}},
    },
}
