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
        help="A model folder in Hugging Face format, a .gguf file, the folder of an adapter, the "
        "folder of a run (its best checkpoint, or else its newest), or a name on the Hugging Face "
        "hub (owner/name).",
        show_default=False,
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        "--base",
        metavar="PATH",
        help="New path of the adapter's base model, if its files were moved.",
    ),
]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="N|best|latest", help="Checkpoint of a run to use."),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="NAME",
        help="Branch, tag or commit of a model on the hub. Default: its main branch.",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        help="Tokenizer to use instead of the model's: a folder, or a name on the hub.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja file with a chat template to use instead of the model's.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=2,
        help="Largest number of tokens in a prompt and its answer together. Default: the model's "
        "own limit, but at most 8192.",
    ),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        "--device", help="Device to compute on. auto: a GPU if one can be used, else the CPU."
    ),
]
Precision = Annotated[
    PrecisionName,
    typer.Option(
        "--precision", help="Precision to compute in. auto: bf16 on a GPU, fp32 on a CPU."
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, help="Largest number of tokens in an answer."
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        min=0.0,
        help="Sampling temperature. 0: always take the most likely token.",
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Sample only from the most likely tokens whose probabilities sum to this value.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="N", min=1, help="Sample only from the N most likely tokens."),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Seed of the random numbers.")
]


def load(
    model: Path,
    *,
    base: Path | None,
    step: str | None,
    revision: str | None,
    tokenizer: str | None,
    template: str | None,
    device: DeviceName,
    precision: PrecisionName,
) -> tuple[TextModel, str]:
    """Load the model of a command line. Return it, and a line for people that names its files."""
    # torch takes seconds to import: only a command that is valid so far pays for it.
    from homeostat.generation.choice import choose
    from homeostat.generation.loading import load_text_model, with_template

    choice = choose(model, base=base, step=step, revision=revision)
    choice = with_template(choice, tokenizer=tokenizer, chat_template=template)
    loaded = load_text_model(choice, device=device.value, precision=precision.value)
    if loaded.note:
        typer.echo(loaded.note, err=True)
    return loaded, choice.describe()
