"""unsloth: TRL's trainers, patched for speed; prints a table in notebooks."""

from __future__ import annotations

from homeostat.health.frameworks import transformers, trl
from homeostat.health.frameworks.table import Framework

METRICS: dict[str, str] = {
    **trl.METRICS,
    "Training Loss": "train/loss",
    "Validation Loss": "eval/loss",
}
SETTINGS: dict[str, tuple[str, ...]] = {
    **trl.SETTINGS,
    "data.max_length": ("max_seq_length", "max_length"),
    "lora.rank": ("r", "lora_r"),
    "engine.memory_share": ("gpu_memory_utilization",),
    "engine.name": ("fast_inference",),
    "trainer.gradient_checkpointing": ("use_gradient_checkpointing",),
}
TABLE = Framework(
    name="unsloth",
    title="unsloth",
    base="trl",
    metrics=METRICS,
    settings=SETTINGS,
    flags=transformers.FLAGS,
    marks=("Unsloth:", "Unsloth 2", "==((====))==", "unsloth_zoo/", "unsloth/", "from unsloth"),
)
