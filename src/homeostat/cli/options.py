"""Arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from homeostat.errors import ConfigError, Problem

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


def refuse_given(options: Mapping[str, tuple[object, object]], why: str) -> None:
    """Refuse options that would have no effect: their values, each with its default."""
    given = [name for name, (value, default) in options.items() if value != default]
    if given:
        raise ConfigError([Problem(name, why, "Leave it out.") for name in given])
