"""`homeostat clinic`: inject faults into tiny runs, and measure detection and cure."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from homeostat.cli.options import Format, OutputFormat
from homeostat.cli.output_file import write_output
from homeostat.errors import OutputError
from homeostat.observe.durable import not_written
from homeostat.observe.terminal import SafeConsole

if TYPE_CHECKING:
    from homeostat.clinic.ward import Ended

Select = Annotated[
    str,
    typer.Option(
        metavar="NAME,...", help="Run only these faults and healthy runs.", show_default=False
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        min=1, help="Number of variants of each fault, which differ in onset and strength."
    ),
]
FirstSeed = Annotated[int, typer.Option(min=1, help="The first seed.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Number of parallel runs. Default: one per core.", show_default=False),
]
Short = Annotated[
    bool, typer.Option("--short", help="Run one fault and one healthy run, without remedies.")
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Folder for the runs, the policies that they start from, and report.json.",
    ),
]


def clinic(
    select: Select = "",
    seeds: Seeds = 1,
    first_seed: FirstSeed = 1,
    jobs: Jobs = None,
    short: Short = False,
    format: OutputFormat = Format.TEXT,
    out: Out = Path("runs/clinic"),
) -> None:
    """Inject faults into tiny real runs, and measure how well they are detected and cured.

    Each fault changes the model, the data, the reward, the recipe, a process or a file of a small
    but real run, and never the metrics that the run writes. Healthy runs are included to count
    false alarms.
    """
    from homeostat.clinic.rounds import Plan, chosen, hold
    from homeostat.clinic.summary import as_json, fault_table, healthy_table, summary_lines

    names = [name.strip() for name in select.split(",") if name.strip()]
    healthy, faults = chosen(names, short=short)
    at_a_time = jobs or os.cpu_count() or 1
    plan = Plan(
        healthy,
        faults,
        seeds,
        at_a_time,
        out.resolve(),
        with_cures=not short,
        first_seed=first_seed,
    )
    console = SafeConsole(file=sys.stderr if format is Format.JSON else sys.stdout)
    _make(out)
    report = hold(plan, tell=lambda ended: _tell(console, ended))
    text = json.dumps(as_json(report), indent=2)
    write_output(out / "report.json", text + "\n")
    if format is Format.JSON:
        typer.echo(text)
        return
    if report.faults:
        console.print(fault_table(report.faults))
    if report.healthy:
        console.print(healthy_table(report.healthy))
    for line in summary_lines(report):
        console.print(line, highlight=False)


def _make(folder: Path) -> None:
    """Make the folder of the runs. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(not_written(folder, error)) from None


def _tell(console: Console, ended: Ended) -> None:
    job = ended.job
    how = f" with health.heal={job.heal}" if job.kind == "ill" and job.heal != "off" else ""
    console.print(f"{job.kind} {job.name}{how}: {ended.how}, {ended.seconds:.0f} s", style="dim")
    console.file.flush()
