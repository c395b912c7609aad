"""`homeostat export`: write a model that other tools can load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from homeostat.cli import generation_options as opts
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


def export(
    model: opts.Model,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="New folder to write.", show_default=False)
    ],
    dtype: Annotated[
        DtypeName,
        typer.Option("--dtype", help="Precision of the weights. auto: as they were trained."),
    ] = DtypeName.AUTO,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter alone, in peft's format.")
    ] = False,
    quantization: Annotated[
        QuantizationName,
        typer.Option(
            "--quantization",
            help="int4: linear layers packed in INT4 (compressed-tensors, W4A16), which vLLM and "
            "transformers load. auto: int4 if the model was trained for it.",
        ),
    ] = QuantizationName.AUTO,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help="Weights that share an INT4 scale: 32, 64 or 128. Default: as the model was "
            "trained, or 128.",
            show_default=False,
        ),
    ] = None,
    base: opts.Base = None,
    step: opts.Step = None,
) -> None:
    """Write a model in Hugging Face format, from any checkpoint, adapter, GGUF file or run.

    An adapter is merged into its base model, unless --adapter asks for it alone. A run that was
    interrupted can be exported as well: its best checkpoint, or else its newest. The folder has
    the tokenizer and the chat template of training.
    """
    from homeostat.generation.choice import choose
    from homeostat.generation.exporting import export_model

    choice = choose(model, base=base, step=step)
    typer.echo(f"exporting {safe_text(choice.describe())}", err=True)
    export_model(
        choice,
        folder,
        dtype=dtype.value,
        adapter_only=adapter,
        quantization=quantization.value,
        group_size=group_size,
    )
    typer.echo(safe_text(str(folder)))
