"""A tiny model with experts for runs and trainers: the recipes of tests/support/tiny.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import tiny, tiny_moe

from homeostat.config import RunConfig

EXPERTS = {
    "qwen3_moe": {
        **tiny_moe.QWEN,
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "initializer_range": 0.1,
    },
    "dots1": {
        **tiny_moe.DOTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "topk_group": 1,
        "layer_types": ["full_attention"] * 3,
        "initializer_range": 0.1,
    },
}


def config(folder: Path, *overrides: str, family: str = "qwen3_moe", **sections: Any) -> RunConfig:
    """A recipe over a random model with experts."""
    model = folder / "model"
    if not model.exists():
        tiny.write_model(model, **EXPERTS[family])
    return tiny.config(folder, *overrides, **sections)
