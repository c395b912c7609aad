"""Show the layers of a model with their real precision, for `homeostat inspect --layers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from homeostat.observe.format import byte_size

if TYPE_CHECKING:
    from homeostat.precision.sheets import LayerSheet


def show_layers(sheets: Sequence[LayerSheet], console: Console, *, as_json: bool) -> None:
    """Print every layer, and totals by group."""
    from dataclasses import asdict

    from homeostat.precision.sheets import totals

    sums = totals(sheets)
    if as_json:
        found = {
            "layers": [sheet.as_json() for sheet in sheets],
            "totals": [asdict(total) for total in sums],
        }
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    # A name that is broken over two lines cannot be copied, so the other columns shrink first.
    table.add_column("layer", no_wrap=True, min_width=max((len(s.name) for s in sheets), default=0))
    for title in ("kind", "shape", "dtype", "quantised", "scales", "bytes"):
        table.add_column(title, overflow="fold", justify="right" if title == "bytes" else "left")
    for sheet in sheets:
        shape = " x ".join(map(str, sheet.shape))
        scales = sheet.scaling or (f"[dim]{sheet.why}[/dim]" if sheet.why else "")
        cells = (sheet.name, sheet.kind, shape, sheet.dtype, sheet.format or "no", scales)
        table.add_row(*cells, byte_size(sheet.num_bytes))
    console.print(table)
    console.print()
    for total in sums:
        console.print(
            f"{total.group:<10} {total.quantised:>5} of {total.layers} layers quantised, "
            f"{byte_size(total.num_bytes)}",
            highlight=False,
        )
