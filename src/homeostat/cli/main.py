"""The command line. One file per verb; what they import is imported when they run."""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Annotated

import typer

from homeostat import __version__
from homeostat.cli import check, env, inspect, schema, train
from homeostat.errors import ConfigError, HomeostatError

EXIT_CODES = {
    "0": "all is well",
    "1": "the run, or the data, is in trouble",
    "2": "bad usage, recipe or input",
    "128 + n": "ended by signal n",
}

app = typer.Typer(
    name="homeostat",
    help="LLM post-training that keeps itself healthy.\n\n"
    "Start with: homeostat check RECIPE, then homeostat train RECIPE. "
    "Any key of a recipe can be changed on the command line: trainer.lr=1e-5.",
    epilog="Exit codes: " + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train.train)
app.command()(check.check)
app.command()(inspect.inspect)
app.command()(env.env)
app.command()(schema.schema)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"homeostat {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before the verb."""


def main() -> None:
    """Entry point: an error that a user can mend is a message, never a traceback."""
    try:
        app()
    except HomeostatError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_error(error: HomeostatError) -> None:
    if _wants_json(sys.argv):
        typer.echo(json.dumps({"error": as_json(error)}, indent=2))
        return
    text = str(error)
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        text = f"{len(error.problems)} problems:\n" + "\n".join(f"  {x}" for x in text.split("\n"))
    typer.echo(f"error: {text}", err=True)


def _wants_json(argv: list[str]) -> bool:
    return "--format=json" in argv or any(
        flag == "--format" and value == "json" for flag, value in itertools.pairwise(argv)
    )


def as_json(error: HomeostatError) -> dict[str, object]:
    """An error for a program to read."""
    fields: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        fields["file"] = error.file
        fields["problems"] = [
            {"place": p.place, "line": p.line, "message": p.message, "hint": p.hint}
            for p in error.problems
        ]
    return fields
