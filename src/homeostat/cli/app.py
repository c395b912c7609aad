"""The top level of the command line: its name, its help, its exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

from homeostat import __version__

EXIT_CODES = {
    "0": "success",
    "1": "the run or the data has a problem",
    "2": "invalid usage, recipe or input",
    "128 + n": "ended by signal n",
}


def new_app() -> typer.Typer:
    """Return an app without commands."""
    app = typer.Typer(
        name="homeostat",
        help="LLM post-training that keeps itself healthy.\n\n"
        "To train: homeostat new, then homeostat check RECIPE, then homeostat train RECIPE. You "
        "can change any key of a recipe on the command line: trainer.lr=1e-5.\n\n"
        "If a run of any framework goes wrong: homeostat doctor LOG.",
        epilog="Exit codes: "
        + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items())
        + ".",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"homeostat {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Define the options that come before the command."""
