"""`homeostat clinic`: tiny runs made ill on purpose; how well is that noticed and mended?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from homeostat.cli.options import Format, OutputFormat
from homeostat.observe.terminal import SafeConsole

if TYPE_CHECKING:
    from homeostat.clinic.ward import Ended

Select = Annotated[
    str,
    typer.Option(
        metavar="NAME,...", help="Only these faults and healthy runs.", show_default=False
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Doses of each fault: onset and strength.")]
FirstSeed = Annotated[int, typer.Option(min=1, help="Where seeds are counted from.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at one time. Default: one per core.", show_default=False),
]
Short = Annotated[
    bool, typer.Option("--short", help="One fault and one healthy run, without remedies.")
]
Out = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Where the runs, their base policies and report.json go."),
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
    """Make tiny real runs ill on purpose, and see how well that is noticed and mended.

    Each fault alters a model, data, a reward, a recipe, a process or a file of a run that is real
    and small; none touches what the run writes down. Healthy runs beside them show false alarms.
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
    report = hold(plan, tell=lambda ended: _tell(console, ended))
    text = json.dumps(as_json(report), indent=2)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    if format is Format.JSON:
        typer.echo(text)
        return
    if report.faults:
        console.print(fault_table(report.faults))
    if report.healthy:
        console.print(healthy_table(report.healthy))
    for line in summary_lines(report):
        console.print(line, highlight=False)


def _tell(console: Console, ended: Ended) -> None:
    job = ended.job
    how = f" with health.heal={job.heal}" if job.kind == "ill" and job.heal != "off" else ""
    console.print(f"{job.kind} {job.name}{how}: {ended.how}, {ended.seconds:.0f} s", style="dim")
    console.file.flush()
