"""`homeostat env`: show versions, devices and incompatibilities; write bug reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from homeostat.cli.options import Format, OutputFormat
from homeostat.observe.environment import Environment, TorchFacts, gather_environment
from homeostat.observe.safe_text import safe_text
from homeostat.observe.sheet import bug_sheet, cuda_lines, require_run_dir
from homeostat.observe.terminal import SafeConsole


def env(
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Print the bug report of a run, as Markdown."),
    ] = None,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Show versions and devices, and report what is incompatible or missing.

    With --run DIR it prints everything that a bug report needs, with secrets removed.
    """
    if run is not None:
        require_run_dir(run)
    environment = gather_environment(read_torch(), folder=run)
    if run is not None:
        sheet = bug_sheet(run, environment, environ=os.environ)
        as_json = format is Format.JSON
        typer.echo(json.dumps({"sheet": sheet}) if as_json else safe_text(sheet), nl=as_json)
    elif format is Format.JSON:
        typer.echo(json.dumps(environment.as_json(), indent=2))
    else:
        _show(environment, SafeConsole())


def read_torch() -> TorchFacts:
    """Return facts about torch, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        # Importing a torch with broken CUDA libraries raises OSError.
        return TorchFacts(error=str(error))
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    return TorchFacts(
        version=torch.__version__,
        built_for_cuda=torch.version.cuda,
        cuda_available=available,
        arch_list=tuple(torch.cuda.get_arch_list()) if available else (),
        capabilities=tuple(torch.cuda.get_device_capability(index) for index in range(count)),
    )


def _show(environment: Environment, console: Console) -> None:
    gpus = {f"GPU {index}": gpu.describe() for index, gpu in enumerate(environment.cuda.gpus)}
    _print_table(console, "Machine", {**environment.machine, **gpus, **cuda_lines(environment)})
    _print_table(console, "Versions", environment.versions)
    if environment.missing_extras:
        _print_table(console, "Not installed (optional)", environment.missing_extras)
    console.print(Text("Verdict", style="bold"))
    for text in environment.verdicts:
        console.print(Text(f"  {text}", style="yellow"))
    if not environment.verdicts:
        where = "GPU" if environment.cuda.torch.cuda_available else "CPU"
        console.print(Text(f"  Ready to train on the {where}.", style="green"))


def _print_table(console: Console, title: str, rows: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(f"  {name}", Text(value))
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()
