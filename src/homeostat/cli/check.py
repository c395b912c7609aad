"""`homeostat check`: report every mistake that can be known before the first step."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from homeostat.cli.options import Format, OutputFormat, Overrides, Recipe
from homeostat.cli.packages import missing_for_training
from homeostat.errors import MissingDependencyError
from homeostat.importing.hints import load_recipe
from homeostat.observe.redact import Scrubber
from homeostat.observe.terminal import SafeConsole
from homeostat.workers.outside import find_launch, require_launch

if TYPE_CHECKING:
    from homeostat.run.preflight.item import Item


def check(recipe: Recipe, overrides: Overrides = None, format: OutputFormat = Format.TEXT) -> None:
    """Check a recipe before training: keys, model, rows, sizes, disk.

    Reports all problems at once. It leaves no files, except that models and datasets from the hub
    stay in the hub's cache. Exit code 0: a run can start; 1: there is too little disk space; 2: the
    recipe or its files have errors.
    """
    launch = find_launch(os.environ)
    if launch is not None and launch.rank > 0:
        # If a launcher starts this once per rank, only one process answers.
        raise typer.Exit(0)
    config = load_recipe(recipe, overrides)
    if launch is not None:
        require_launch(launch, cluster=config.cluster, mesh=config.mesh)
    lacks = missing_for_training()
    if lacks is not None:
        _show_keys_only(recipe, lacks, as_json=format is Format.JSON)
        return
    from homeostat.hub.resolve import resolve_names
    from homeostat.run.preflight.check import Preflight
    from homeostat.run.preflight.item import Item
    from homeostat.run.session.waiting import progress_of

    console = SafeConsole(stderr=format is Format.JSON)
    names: list[str] = []
    config = resolve_names(config, console=console, tell=names.append)
    with progress_of("tokenising rows", console) as progress:
        preflight = Preflight(config, progress=progress)
        # The exception of a reward, for example, may quote private values of the recipe.
        values = config.model_dump(mode="json")
        scrubber = Scrubber.of(values, environ=os.environ, shows_paths=True)
        found = [*(Item("names", "ok", line) for line in names), *preflight.run()]
        items = [scrubbed(item, scrubber) for item in found]
    if format is Format.JSON:
        shown = {"ok": preflight.exit_code == 0, "items": [asdict(item) for item in items]}
        typer.echo(json.dumps(shown, indent=2))
    else:
        console.print(_table(items))
        good = preflight.exit_code == 0
        verdict = "[green]ready to train[/green]" if good else "[red]not ready to train[/red]"
        console.print(f"{escape(str(recipe))}: {verdict}", highlight=False)
    raise typer.Exit(preflight.exit_code)


def _show_keys_only(recipe: Path, lacks: MissingDependencyError, *, as_json: bool) -> None:
    """Report what can be judged without the packages that read models and rows."""
    known = "all keys are known, their values are valid, and they go together"
    rest = f"model, rows, sizes and memory were not checked. {lacks}"
    if as_json:
        items = [("ok", "keys", known), ("warning", "the rest", rest)]
        listed = [dict(zip(("level", "name", "text"), item, strict=True)) for item in items]
        typer.echo(json.dumps({"ok": True, "items": listed}, indent=2))
        return
    SafeConsole().print(
        f"{recipe}: {known}.\n{rest[0].upper()}{rest[1:]}", markup=False, highlight=False
    )


def scrubbed(item: Item, scrubber: Scrubber) -> Item:
    return replace(item, text=scrubber.text(item.text), facts=scrubber.tree(item.facts))


def _table(items: list[Item]) -> Table:
    marks = {
        "ok": "[green]ok[/green]",
        "warning": "[yellow]look[/yellow]",
        "error": "[red]no[/red]",
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for item in items:
        table.add_row(marks[item.level], item.name, Text(item.text))
    return table
