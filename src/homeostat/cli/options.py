"""Arguments that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Keys to change, for example trainer.lr=1e-5.",
        show_default=False,
    ),
]


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"


OutputFormat = Annotated[Format, typer.Option("--format", help="json: for a program to read.")]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", help="debug, info, warning or error. HOMEOSTAT_DEBUG=1 sets debug."
    ),
]
