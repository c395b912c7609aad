"""`homeostat import`: turn another framework's config or launch script into a recipe."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.cli.options import Format, OutputFormat
from homeostat.cli.output_file import write_output
from homeostat.errors import ConfigError, HomeostatError, Problem
from homeostat.observe.safe_text import safe_text

if TYPE_CHECKING:
    from homeostat.importing.entries import ForeignFile, Imported


class FrameworkName(StrEnum):
    """Frameworks whose files can be converted."""

    AXOLOTL = "axolotl"
    TRL = "trl"
    LLAMA_FACTORY = "llama_factory"
    VERL = "verl"
    OPENRLHF = "openrlhf"
    SLIME = "slime"
    MILES = "miles"


File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A YAML config, a shell script that launches a run, or a Python script with TRL's "
        "config objects. It is read, never executed.",
        show_default=False,
    ),
]
From = Annotated[
    FrameworkName | None,
    typer.Option(
        "--from",
        help="The framework. Default: the framework is recognised from the file.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="RECIPE",
        help="New file for the recipe. Default: print the recipe.",
        show_default=False,
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        help="Number of devices of the original run, by which batch sizes per device are "
        "multiplied. Default: the number in the file, or 1.",
        show_default=False,
    ),
]


def import_(
    file: File,
    framework: From = None,
    out: Out = None,
    devices: Devices = None,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Turn a config of axolotl, TRL, LLaMA-Factory, verl, OpenRLHF, slime or miles into a recipe.

    The command lists what became of each setting: taken over, approximated (and how), planned, not
    needed (and why), or unknown. Keys that you have to check, for example local paths, are marked
    LOOK in the recipe. If the recipe is printed, the list goes to standard error.
    """
    if out is not None and out.exists():
        raise HomeostatError(f"{out}: this file exists already. Choose another name for --out.")
    imported = _convert(file, framework=framework, devices=devices)
    from homeostat.importing.render import as_json, render_listing, render_recipe

    recipe = render_recipe(imported, source=file.name)
    if out is not None:
        write_output(out, recipe)
    if format is Format.JSON:
        typer.echo(json.dumps(as_json(imported), indent=2, default=str))
        return
    typer.echo(safe_text(render_listing(imported)), err=out is None)
    if out is None:
        typer.echo(safe_text(recipe), nl=False)
    else:
        typer.echo(f"{safe_text(str(out))} written. Next: homeostat check {safe_text(str(out))}")


def _convert(file: Path, *, framework: FrameworkName | None, devices: int | None) -> Imported:
    from homeostat.importing.convert import convert, stem_of
    from homeostat.importing.reading import read_foreign
    from homeostat.importing.recognise import recognise

    found = read_foreign(file)
    table = recognise(found, name=framework.value if framework else None)
    if table is None:
        raise ConfigError([_unrecognised(found, file)], file=str(file))
    return convert(found, table, stem=stem_of(file), devices=devices)


def _unrecognised(found: ForeignFile, file: Path) -> Problem:
    from homeostat.config.run import RunConfig

    sections = {setting.name.partition(".")[0] for setting in found.settings}
    if sections and sections <= RunConfig.model_fields.keys():
        return Problem(
            "", "this is a recipe of homeostat already.", f"Next: homeostat check {file}"
        )
    known = ", ".join(FrameworkName)
    what = "no framework is recognised in it: too few of its settings are known."
    return Problem("", what, f"Name it with --from: {known}.")
