"""The policy of a recipe on the meta device (without memory), to inspect its layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from homeostat.config.parts import PublicationSettings
from homeostat.config.run import RunConfig
from homeostat.models.shape_only import shape_decoder
from homeostat.models.transformers_model import TransformersModel, meta_transformers


def empty_model(config: RunConfig | PublicationSettings) -> nn.Module:
    """Return the policy on the meta device."""
    if config.model.implementation == "transformers":
        return TransformersModel(meta_transformers(Path(config.model.path)))
    how = {"dtype": torch.float32, "kernel": "sdpa", "gradient_checkpointing": False}
    has_head = config.head is not None
    return shape_decoder(config.model, config.lora, has_value_head=has_head, **how)
