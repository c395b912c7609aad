"""`homeostat train`: start a run, or resume one that was interrupted."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import IO, TYPE_CHECKING, cast

import typer
from rich.console import Console
from rich.text import Text

from homeostat.cli.launched import keep_seat, load_launched
from homeostat.cli.options import Format, LogLevel, OutputFormat, Overrides, Recipe
from homeostat.observe.logs import resolve_level
from homeostat.observe.outlet import Outlet
from homeostat.observe.terminal import SafeConsole
from homeostat.workers.outside import find_launch

if TYPE_CHECKING:
    from homeostat.run.session.result import RunResult

log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    format: OutputFormat = Format.TEXT,
    log_level: LogLevel = None,
) -> None:
    """Train a model as a recipe describes.

    Everything is written to the run directory (runs_dir/name). To resume an interrupted run, give
    the same command again. On Ctrl-C or SIGTERM the run finishes its step, saves a checkpoint and
    ends; a second Ctrl-C or SIGTERM ends it at once.

    You can also start this command with torchrun or srun, once per rank. Then rank 0 is the
    controller, and each of the other processes runs a worker for it.
    """
    launch = find_launch(os.environ)
    if launch is not None and launch.rank > 0:
        raise typer.Exit(keep_seat(launch, recipe, overrides))
    config = load_launched(launch, recipe, overrides)
    level = resolve_level(log_level, config=config.observe.log_level)
    from homeostat.hub.resolve import resolve_names
    from homeostat.run.calling.start import train_recipe
    from homeostat.run.session.session import open_session
    from homeostat.workers.seats import seats_opened

    out = sys.stderr if format is Format.JSON else sys.stdout
    console = SafeConsole(file=cast(IO[str], Outlet(out)))
    text = recipe.read_text(encoding="utf-8")
    # Other ranks wait for this one, so it accepts their connections before any slow work.
    with seats_opened(launch, timeout_s=config.cluster.start_timeout_s):
        config = resolve_names(config, console=console)
        with open_session(
            config, recipe=text, command=sys.argv, console=console, log_level=level
        ) as session:
            if launch is not None:
                log.info("%s; this one, rank 0, is the controller", launch.describe())
            result = train_recipe(config, session)
    if format is Format.JSON:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _summarise(result, console)
    raise typer.Exit(session.stop.exit_code)


def _summarise(result: RunResult, console: Console) -> None:
    for name, value in result.lines():
        console.print(Text.assemble((f"{name:<12}", "bold"), f" {value}"), soft_wrap=True)
