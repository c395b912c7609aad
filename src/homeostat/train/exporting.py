"""Writes a role's model in HF format: all ranks gather, the first one writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from homeostat.config.parts import ExportSettings
from homeostat.models.adapter_files import save_adapter
from homeostat.models.build import ModelSheet
from homeostat.models.hf import save_hf
from homeostat.models.lora import adapter_state, merged_state, saved_parameters
from homeostat.models.value_head import classifier_config
from homeostat.precision.int4_rewrite import Int4Rewrite
from homeostat.train.int4_export import Int4Export
from homeostat.train.roles import RoleState
from homeostat.train.sharding import Shards


def whole_weights(state: RoleState, shards: Shards) -> Iterator[tuple[str, Tensor]]:
    """All weights under canonical HF names, adapters merged in, gathered one at a time.

    Weights that are computed with in INT4 are the rounded ones: whoever gets them computes the same
    model, and packing them again changes nothing (precision/int4.py).
    """
    int4 = int4_of(state)
    rounded = {} if int4 is None else int4.computed_weights()
    by_parameter = {id(p): rounded[name] for name, p in state.named_parameters() if name in rounded}

    def whole(parameter: Tensor) -> Tensor:
        found = by_parameter.get(id(parameter))
        return shards.whole(parameter) if found is None else found

    with state.acting() as model:
        yield from merged_state(model, whole=whole)


def int4_of(state: RoleState) -> Int4Rewrite | None:
    """Return the INT4 layers of a role, if they are rounded now."""
    found = (rewrite for rewrite in state.rewrites if isinstance(rewrite, Int4Rewrite))
    return next((rewrite for rewrite in found if rewrite.is_active), None)


def sent_weights(state: RoleState, shards: Shards) -> Iterator[tuple[str, Tensor]]:
    """The tensors that engines in other processes are sent, gathered one at a time."""
    if not state.sends_adapter:
        yield from whole_weights(state, shards)
        return
    for name, tensor in adapter_state(state.model):
        yield name, shards.whole(tensor)


def export_role(state: RoleState, folder: Path, config: ExportSettings, *, shards: Shards) -> None:
    """All weights, packed if they are trained in INT4; or the adapter where lora.export says so."""
    with shards.naming_disk():
        if config.lora is not None and config.lora.export == "adapter":
            _export_adapter(state, folder, config, shards)
        else:
            _export_whole(state, folder, config, shards)


def _export_whole(state: RoleState, folder: Path, config: ExportSettings, shards: Shards) -> None:
    stream = whole_weights(state, shards)
    source_config, generation_config = export_configs(state.sheet)
    int4 = int4_of(state)
    if int4 is not None:
        export = Int4Export.of(state.model, int4.config)
        stream, source_config = export.tensors(stream), export.config(source_config)
    try:
        if shards.is_first:
            save_hf(
                stream,
                folder,
                source_config=source_config,
                generation_config=generation_config,
                max_shard_bytes=config.checkpoint.max_shard_bytes,
            )
    finally:
        # Also where writing failed: the others gather with this rank to the end.
        for _ in stream:
            pass


def export_configs(sheet: ModelSheet) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return both config files of an export; a model with a value head generates nothing."""
    if sheet.has_value_head:
        return classifier_config(sheet.source_config), None
    return sheet.source_config, sheet.generation_config


def _export_adapter(state: RoleState, folder: Path, config: ExportSettings, shards: Shards) -> None:
    assert config.lora is not None, "an adapter is exported where there is one"
    if shards.is_first:
        save_adapter(state.model, folder, config.lora, base=config.model, whole=shards.whole)
    else:
        for _, parameter in saved_parameters(state.model):
            shards.whole(parameter)
