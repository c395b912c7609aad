"""Check the energy of a run before the first step: its features, and what they compare."""

from __future__ import annotations

from typing import Any

from homeostat.config.ebft import EbftConfig
from homeostat.data.prompts import PromptSet
from homeostat.data.strided import StridedSet
from homeostat.models.preview import ModelPreview
from homeostat.run.preflight.item import Item, Level


def energy_item(ebft: EbftConfig, prompts: PromptSet, *, preview: ModelPreview | None) -> Item:
    """Report which layers provide the features, and with what a sample is compared."""
    text, facts = _compared(ebft, prompts)
    level: Level = "ok"
    if preview is not None and preview.decoder is not None:
        layers = ebft.layers(preview.decoder.num_layers)
        facts["layers"] = list(layers)
        named = ", ".join(map(str, layers))
        text += f"; features of layers {named} of {preview.decoder.num_layers}"
        if len(layers) < len(ebft.feature_layers):
            level = "warning"
            text += (
                f": {len(ebft.feature_layers)} depths (ebft.feature_layers) fall on so few layers"
            )
    return Item("energy", level, text, facts)


def _compared(ebft: EbftConfig, prompts: PromptSet) -> tuple[str, dict[str, Any]]:
    if isinstance(prompts, StridedSet):
        text = (
            f"{len(prompts)} texts are continued at {prompts.num_asked} places, by "
            f"{ebft.generate_length} tokens at every {ebft.stride}th from token "
            f"{ebft.context_length} on, and compared with themselves"
        )
        return text, {"anchors": prompts.num_asked}
    lengths = [len(prompt.reference_T) for prompt in prompts if prompt.reference_T is not None]
    mean = sum(lengths) / len(lengths)
    text = (
        f"samples are compared with the references in column {ebft.reference_column!r}, "
        f"{mean:.0f} tokens on average"
    )
    return text, {"mean_reference_tokens": round(mean, 1)}
