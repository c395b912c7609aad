"""Write a chosen model for others to use: whole in Hugging Face format, or the adapter alone.

The files are written into a hidden folder beside the target and renamed when they are complete, so
that an interrupted export leaves no folder that looks whole.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from homeostat.config.int4 import Int4Config
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import ModelError, OutputError
from homeostat.generation.choice import Choice
from homeostat.generation.loading import load_weights, stored_dtype, trained_int4
from homeostat.generation.rounding import AsWritten, RoundingError, merging_error, percent
from homeostat.models.adapter_files import save_adapter
from homeostat.models.build import LoadedModel, open_source, read_configs
from homeostat.models.hf import save_hf
from homeostat.models.lora import merged_state
from homeostat.observe.durable import FileErrorsAsOsError, not_written
from homeostat.precision.int4 import GROUP_SIZES, fake_quantise
from homeostat.precision.int4_files import KEY
from homeostat.train.exporting import export_configs
from homeostat.train.int4_export import Int4Export

ExportDtype = Literal["auto", "fp32", "bf16", "fp16"]
# auto: as the model was trained. q8_0 is a format of GGUF files.
ExportQuantization = Literal["auto", "none", "int4", "q8_0"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARD_BYTES = 5 * 10**9


def export_model(
    choice: Choice,
    folder: Path,
    *,
    dtype: ExportDtype = "auto",
    adapter_only: bool = False,
    quantization: ExportQuantization = "auto",
    group_size: int | None = None,
) -> list[str]:
    """Write the model and its tokenizer to a new folder. `auto` keeps the precision of training.

    Returns lines for people on what is not as it was trained. Raises ModelError if the folder
    exists, so that nothing is overwritten.
    """
    if quantization == "q8_0":
        raise ModelError("--quantization q8_0 is a format of GGUF files. Add --format gguf.")
    int4 = _int4(choice, quantization, group_size)
    require_new(folder)
    if adapter_only and choice.adapter is None:
        raise ModelError(f"--adapter: {choice.describe()} has no adapter. Leave it out.")
    if adapter_only and int4 is not None:
        raise ModelError("--quantization int4 packs whole models. Leave out --adapter.")
    tokenizer = load_tokenizer(choice.model)
    how = {"device": torch.device("cpu"), "rounds": quantization != "none"}
    loaded = load_weights(choice, dtype=_compute_dtype(choice, dtype), **how)
    notes = base_notes(choice, is_merged=not adapter_only)
    with building(folder) as hidden:
        hidden.mkdir()
        if adapter_only:
            assert choice.adapter is not None, "checked above"
            save_adapter(loaded.module, hidden, choice.adapter, base=choice.model)
        else:
            is_trained = int4 == trained_int4(choice)
            notes += _save_whole(loaded, hidden, dtype, int4, is_trained=is_trained)
        tokenizer.save(hidden, scores=choice.scores)
    return notes


def base_notes(choice: Choice, *, is_merged: bool) -> list[str]:
    """Say which base an adapter belongs to, if it was quantised."""
    format = choice.model.quantization
    if format is None:
        return []
    if is_merged:
        return [f"the base was quantised to {format}: the values that it has there are written"]
    return [f"the adapter was trained over a base in {format}: over another one it differs"]


def merging_notes(loaded: LoadedModel, as_written: AsWritten, *, precision: str) -> list[str]:
    """Say how much of an adapter's update is lost where it is merged, if there is one."""
    share = merging_error(loaded.module, as_written)
    if share is None:
        return []
    return [
        f"merged: rounding to {precision} moves the weights by {percent(share)} of the adapter's "
        "update (root mean square)"
    ]


def require_new(path: Path) -> None:
    """Refuse to overwrite anything."""
    if path.exists():
        raise ModelError(f"{path} exists already. Choose a new name, or move it away.")


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a hidden path beside the target, which becomes the target when the block is done."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}_", dir=target.parent) as hidden:
            with FileErrorsAsOsError():
                yield Path(hidden) / target.name
            os.rename(Path(hidden) / target.name, target)
    except OSError as error:
        raise OutputError(not_written(target, error)) from None


def _compute_dtype(choice: Choice, dtype: ExportDtype) -> torch.dtype:
    """Return the dtype to load in: that of the files, or fp32 where weights are to be rounded."""
    if dtype != "auto":
        return torch.float32
    if choice.checkpoint is not None:
        return stored_dtype(choice.checkpoint.path)
    source = open_source(choice.model)
    config, _ = read_configs(source)
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return torch.bfloat16 if named == "bfloat16" else torch.float32


def _int4(
    choice: Choice, quantization: ExportQuantization, group_size: int | None
) -> Int4Config | None:
    """Return how INT4 weights are grouped; None if plain weights are written."""
    trained = trained_int4(choice)
    wanted = quantization == "int4" or (quantization == "auto" and trained is not None)
    if group_size is not None and not wanted:
        raise ModelError("--group-size is of INT4 weights. Add --quantization int4.")
    if not wanted:
        return None
    if trained is not None and group_size not in (None, trained.group_size):
        raise ModelError(
            f"--group-size {group_size}: the model was trained for INT4 groups of "
            f"{trained.group_size}, and other groups would round it anew. Leave it out."
        )
    try:
        return trained or Int4Config.model_validate({"group_size": group_size or 128})
    except ValidationError:
        raise ModelError(
            f"--group-size {group_size}: it can be {', '.join(map(str, GROUP_SIZES))}."
        ) from None


def _save_whole(
    loaded: LoadedModel,
    folder: Path,
    dtype: ExportDtype,
    int4: Int4Config | None,
    *,
    is_trained: bool,
) -> list[str]:
    stream = merged_state(loaded.module)
    source_config, generation_config = export_configs(loaded.sheet)
    names: frozenset[str] = frozenset()
    rounding: RoundingError | None = None
    config = {name: value for name, value in source_config.items() if name != KEY}
    if int4 is not None:
        export = Int4Export.of(loaded.module, int4)
        names = export.names
        if not is_trained:
            rounding = RoundingError(names, group_size=int4.group_size)
            stream = rounding.watched(stream)
        # Weights are rounded to INT4 before anything else is rounded.
        stream = export.tensors(stream, scale_dtype=_DTYPES.get(dtype))
        config = export.config(config)
    save_hf(
        _cast(stream, dtype),
        folder,
        source_config=config,
        generation_config=generation_config,
        max_shard_bytes=_SHARD_BYTES,
    )

    def as_written(name: str, tensor: Tensor) -> Tensor:
        if int4 is not None and name in names:
            return fake_quantise(tensor, group_size=int4.group_size)
        return tensor if dtype == "auto" else tensor.to(_DTYPES[dtype])

    kept = _DTYPES.get(dtype) or next(loaded.module.parameters()).dtype
    precision = "INT4" if names else str(kept).removeprefix("torch.")
    notes = merging_notes(loaded, as_written, precision=precision)
    if rounding is not None:
        notes.append(
            f"rounding to INT4 moves the packed weights by {percent(rounding.share)} of their "
            "norm: the model was not trained for it"
        )
    return notes


def _cast(stream: Iterator[tuple[str, Tensor]], dtype: ExportDtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stream:
        if dtype == "auto" or not tensor.is_floating_point():
            yield name, tensor
            continue
        cast = tensor.to(_DTYPES[dtype])
        if dtype == "fp16" and not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
            raise ModelError(
                f"--dtype fp16: {name} has values beyond fp16's largest number (65504). "
                "Use bf16 or fp32."
            )
        yield name, cast
