"""Write a chosen model and its tokenizer as one GGUF file, for llama.cpp and other readers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from homeostat.data.tokenizer import load_tokenizer
from homeostat.data.tokenizer_gguf_write import add_tokenizer, require_writable_tokenizer
from homeostat.errors import ModelError
from homeostat.generation.choice import Choice
from homeostat.generation.exporting import (
    ExportDtype,
    ExportQuantization,
    base_notes,
    building,
    merging_notes,
    require_new,
)
from homeostat.generation.loading import load_weights
from homeostat.models.build import open_source, read_configs
from homeostat.models.gguf_write import (
    GgufType,
    Written,
    gguf_library,
    require_writable,
    write_gguf,
)
from homeostat.models.lora import merged_state

_DTYPES: dict[GgufType, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_TYPES: dict[str, GgufType] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def export_gguf(
    choice: Choice,
    file: Path,
    *,
    dtype: ExportDtype = "auto",
    quantization: ExportQuantization = "auto",
) -> Written:
    """Write the file. `auto` keeps bf16 weights as they are and writes any others in fp16.

    Raises ModelError if the file exists, or if the model or tokenizer cannot be written as GGUF.
    """
    if file.suffix.lower() != ".gguf":
        raise ModelError(f"{file}: the name of a GGUF file ends with .gguf.")
    if quantization == "int4":
        raise ModelError("--quantization int4 is a format of HF folders. A GGUF file has q8_0.")
    if quantization == "q8_0" and dtype != "auto":
        raise ModelError(f"--dtype {dtype} and --quantization q8_0 exclude each other.")
    choice.require_writer()
    require_new(file)
    gguf_library()
    source, _ = read_configs(open_source(choice.model))
    require_writable(source)
    tokenizer = load_tokenizer(choice.model)
    require_writable_tokenizer(tokenizer)
    how = {"device": torch.device("cpu"), "rounds": quantization != "none"}
    loaded = load_weights(choice, dtype=torch.float32, **how)
    kind: GgufType = "Q8_0" if quantization == "q8_0" else _type(dtype, source)
    vocab_size = loaded.sheet.vocab_size
    with building(file) as hidden:
        written = write_gguf(
            hidden,
            lambda: merged_state(loaded.module),
            source_config=loaded.sheet.source_config,
            name=file.stem,
            kind=kind,
            add_tokenizer=lambda writer: add_tokenizer(writer, tokenizer, vocab_size=vocab_size),
        )
    notes = base_notes(choice, is_merged=True)
    if (rounded := _DTYPES.get(kind)) is not None:
        precision = str(rounded).removeprefix("torch.")
        notes += merging_notes(loaded, lambda _, tensor: tensor.to(rounded), precision=precision)
    return replace(written, notes=tuple(notes))


def _type(dtype: ExportDtype, source: dict) -> GgufType:
    if dtype != "auto":
        return _TYPES[dtype]
    named = str(source.get("dtype") or source.get("torch_dtype") or "")
    return "BF16" if named.removeprefix("torch.") == "bfloat16" else "F16"
