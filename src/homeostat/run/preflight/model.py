"""Report what `check` finds about a model beside its own files: its adapter, and its length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from homeostat.config.run import RunConfig
from homeostat.models.adapter_files import differing_base
from homeostat.models.preview import ModelPreview
from homeostat.run.preflight.item import Item


def model_items(config: RunConfig, preview: ModelPreview) -> Iterator[Item]:
    """Yield a warning if the adapter names another base, and one if rows are too long."""
    adapter = None if config.lora is None else config.lora.path
    named = None if adapter is None else differing_base(Path(adapter), config.model)
    if named is not None:
        yield Item(
            "adapter",
            "warning",
            f"lora.path: {adapter} names {named} as its base model, and model.path is "
            f"{config.model.path}. Over other weights the adapter is another model: go on only if "
            "both hold the same ones",
            {"named_base": named},
        )
    longest = preview.max_positions
    if longest is not None and config.data.max_length > longest:
        yield Item(
            "model",
            "warning",
            f"data.max_length={config.data.max_length} is more than the {longest} "
            "positions in the model's config",
        )
