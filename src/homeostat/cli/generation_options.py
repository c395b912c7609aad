"""Options that generate, chat, serve and export share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from homeostat.generation.loading import TextModel


class DeviceName(StrEnum):
    """The device to compute on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class PrecisionName(StrEnum):
    """The dtype to compute in."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A model folder in Hugging Face format, a .gguf file, the folder of an adapter, or "
        "the folder of a run (its best checkpoint, or else its newest).",
        show_default=False,
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        "--base", metavar="PATH", help="Base model of an adapter, if it is not where it was."
    ),
]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="N|best|latest", help="Checkpoint of a run to use."),
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", metavar="DIR", help="Another tokenizer's folder.")
]
Template = Annotated[
    str | None,
    typer.Option("--chat-template", metavar="FILE", help="Another chat template: a Jinja file."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=2,
        help="Most tokens of a prompt and its answer together. Default: the model's own limit, "
        "8192 at most.",
    ),
]
Device = Annotated[
    DeviceName, typer.Option("--device", help="auto: a GPU if there is one that can be used.")
]
Precision = Annotated[
    PrecisionName, typer.Option("--precision", help="auto: bf16 on a GPU, fp32 on a CPU.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, in tokens.")
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", "-t", min=0.0, help="0 always takes the likeliest token."),
]
TopP = Annotated[
    float, typer.Option("--top-p", min=0.0, max=1.0, help="Keep the likeliest tokens up to this.")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", min=1, help="Keep the N likeliest tokens.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Source of randomness.")]


def load(
    model: Path,
    *,
    base: Path | None,
    step: str | None,
    tokenizer: str | None,
    template: str | None,
    device: DeviceName,
    precision: PrecisionName,
) -> tuple[TextModel, str]:
    """Load the model of a command line. Return it, and a line for people that names its files."""
    # torch takes seconds to import: only a command that is valid so far pays for it.
    from homeostat.generation.choice import choose
    from homeostat.generation.loading import load_text_model, with_template

    choice = choose(model, base=base, step=step)
    choice = with_template(choice, tokenizer=tokenizer, chat_template=template)
    loaded = load_text_model(choice, device=device.value, precision=precision.value)
    if loaded.note:
        typer.echo(loaded.note, err=True)
    return loaded, choice.describe()
