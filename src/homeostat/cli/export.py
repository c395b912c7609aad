"""`homeostat export`: write a model that other tools can load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from homeostat.cli import generation_options as opts
from homeostat.errors import ModelError
from homeostat.observe.safe_text import safe_text


class DtypeName(StrEnum):
    """The precision of the written weights."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class QuantizationName(StrEnum):
    """The quantisation of the written weights."""

    AUTO = "auto"
    NONE = "none"
    INT4 = "int4"
    Q8_0 = "q8_0"


class FileFormat(StrEnum):
    """The format of the written model."""

    HF = "hf"
    GGUF = "gguf"


Target = Annotated[
    Path,
    typer.Argument(
        metavar="TARGET",
        help="New folder to write, or a new file that ends with .gguf.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    FileFormat | None,
    typer.Option(
        "--format",
        help="hf: a folder for transformers, vLLM and others. gguf: one file for llama.cpp. "
        "Default: gguf if the target's name ends with .gguf, else hf.",
        show_default=False,
    ),
]
Dtype = Annotated[
    DtypeName,
    typer.Option(
        "--dtype",
        help="Precision of the weights. auto: as they were trained, except that a GGUF file has "
        "fp16 instead of fp32.",
    ),
]
Adapter = Annotated[
    bool, typer.Option("--adapter", help="Write only the adapter, in peft's format.")
]
Quantization = Annotated[
    QuantizationName,
    typer.Option(
        "--quantization",
        help="int4: linear layers packed in INT4 (compressed-tensors, W4A16), which vLLM and "
        "transformers load. q8_0: blocks of 8-bit numbers (GGUF). auto: int4 if the model was "
        "trained for it; a GGUF file has the rounded weights then. none: of a run that trained for "
        "INT4, the weights before rounding.",
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        help="Number of weights that share an INT4 scale: 32, 64 or 128. Default: as the model "
        "was trained, or 128.",
        show_default=False,
    ),
]


def export(
    model: opts.Model,
    target: Target,
    format: FormatOption = None,
    dtype: Dtype = DtypeName.AUTO,
    adapter: Adapter = False,
    quantization: Quantization = QuantizationName.AUTO,
    group_size: GroupSize = None,
    base: opts.Base = None,
    step: opts.Step = None,
    revision: opts.Revision = None,
) -> None:
    """Write a model in Hugging Face or GGUF format, from any checkpoint, adapter, GGUF file or run.

    An adapter is merged into its base model, unless you give --adapter. You can export an
    interrupted run as well: its best checkpoint is used, or else its newest. The folder contains
    the tokenizer and the chat template that training used.
    """
    from homeostat.generation.choice import choose

    as_gguf = format is FileFormat.GGUF or (format is None and target.suffix.lower() == ".gguf")
    if as_gguf and (adapter or group_size is not None):
        option = "--adapter" if adapter else "--group-size"
        raise ModelError(f"{option} is not for GGUF files: they hold whole models. Leave it out.")
    choice = choose(model, base=base, step=step, revision=revision)
    typer.echo(f"exporting {safe_text(choice.describe())}", err=True)
    how: dict[str, Any] = {"dtype": dtype.value, "quantization": quantization.value}
    if as_gguf:
        from homeostat.generation.gguf_export import export_gguf

        written = export_gguf(choice, target, **how)
        notes = list(written.notes)
        if written.not_quantised:
            names = ", ".join(written.not_quantised[:3])
            typer.echo(
                f"{len(written.not_quantised)} of {written.num_tensors} tensors are in fp16, "
                f"because their rows are no multiple of 32 values: {names} ...",
                err=True,
            )
    else:
        from homeostat.generation.exporting import export_model

        notes = export_model(choice, target, adapter_only=adapter, group_size=group_size, **how)
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(safe_text(str(target)))
