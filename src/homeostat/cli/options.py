"""Arguments that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE", help="The recipe: a YAML file that describes the run.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys of the recipe to override: trainer.lr=1e-5 data.train.0.limit=100.",
        show_default=False,
    ),
]


class Format(StrEnum):
    """The format of a verb's output."""

    TEXT = "text"
    JSON = "json"


OutputFormat = Annotated[
    Format, typer.Option("--format", help="Output format: text for people, json for programs.")
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="Lowest level to log: debug, info, warning or error. HOMEOSTAT_DEBUG=1 sets debug.",
    ),
]
