"""`homeostat train`: start a run, or resume one that was interrupted."""

from __future__ import annotations

import json
import sys
from typing import IO, TYPE_CHECKING, cast

import typer
from rich.console import Console
from rich.text import Text

from homeostat.cli.options import Format, LogLevel, OutputFormat, Overrides, Recipe
from homeostat.importing.hints import load_recipe
from homeostat.observe.logs import resolve_level
from homeostat.observe.outlet import Outlet
from homeostat.observe.terminal import SafeConsole

if TYPE_CHECKING:
    from homeostat.run.session.result import RunResult


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    format: OutputFormat = Format.TEXT,
    log_level: LogLevel = None,
) -> None:
    """Train a model as described by a recipe.

    Everything is written to the run directory (runs_dir/name); the same command resumes an
    interrupted run. Ctrl-C or SIGTERM finishes the step, saves a checkpoint and ends the run; a
    second one ends it at once.
    """
    config = load_recipe(recipe, overrides)
    level = resolve_level(log_level, config=config.observe.log_level)
    from homeostat.run.calling.start import train_recipe
    from homeostat.run.session.session import open_session

    out = sys.stderr if format is Format.JSON else sys.stdout
    console = SafeConsole(file=cast(IO[str], Outlet(out)))
    text = recipe.read_text(encoding="utf-8")
    with open_session(
        config, recipe=text, command=sys.argv, console=console, log_level=level
    ) as session:
        result = train_recipe(config, session)
    if format is Format.JSON:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _summarise(result, console)
    raise typer.Exit(session.stop.exit_code)


def _summarise(result: RunResult, console: Console) -> None:
    for name, value in result.lines():
        console.print(Text.assemble((f"{name:<12}", "bold"), f" {value}"), soft_wrap=True)
