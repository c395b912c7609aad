"""`homeostat inspect`: the tokens that a recipe trains on, as the model will see them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.rule import Rule
from rich.text import Text

from homeostat.cli.options import Format, OutputFormat, Overrides, Recipe
from homeostat.config import load_config
from homeostat.observe import format as fmt

if TYPE_CHECKING:
    from homeostat.config.run import RunConfig
    from homeostat.data.inspection import InspectedRow, Inspection, Token

BAR_WIDTH = 40
# Two shades in turn, so that the borders of tokens can be seen.
TRAINED = ("bold white on #005f00", "bold white on #007a00")
UNTRAINED = "dim"
SPECIAL = "magenta"


def inspect(
    recipe: Recipe,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=0, help="How many rows to show.")] = 3,
    row_id: Annotated[
        list[int] | None,
        typer.Option(
            "--row-id", metavar="N", help="Show row N in place of the first rows; may be repeated."
        ),
    ] = None,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Show the tokens of some rows with their labels, and what became of all rows.

    Trained tokens stand on green, or in brackets where there is no colour. Row numbers are those
    of row_losses.jsonl and offending_rows/. Exit code 1: training would refuse these rows.
    """
    config = load_config(recipe, overrides)
    console = Console(stderr=format is Format.JSON, highlight=False)
    found = _gather(config, console, num_rows=rows, row_ids=row_id or [])
    if format is Format.JSON:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found, console)
    if any(warned.level == "error" for warned in found.warnings):
        raise typer.Exit(1)


def _gather(
    config: RunConfig, console: Console, *, num_rows: int, row_ids: list[int]
) -> Inspection:
    from homeostat.data.inspection import inspect_rows

    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory() as folder, bar:
        task = bar.add_task("tokenising", total=None)
        return inspect_rows(
            config,
            cache_dir=Path(config.data.cache_dir or folder),
            num_rows=num_rows,
            row_ids=row_ids,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def show(found: Inspection, console: Console) -> None:
    """Print an inspection for a person."""
    for row in found.rows:
        _show_row(row, console)
    _show_counts(found, console)
    _show_lengths(found, console)
    _show_updates(found, console)
    for warned in found.warnings:
        style = "bold red" if warned.level == "error" else "bold yellow"
        console.print(Text.assemble((f"{warned.level}: ", style), warned.message), soft_wrap=True)
        for example in warned.examples:
            console.print(Text(f"  {example.place}: {example.message}"), soft_wrap=True)


def _show_row(row: InspectedRow, console: Console) -> None:
    share = row.num_trained / row.num_tokens
    title = f"row {row.row_id}   {row.num_tokens} tokens, {row.num_trained} trained ({share:.0%})"
    _heading(title, console)
    console.print(Text(row.origin, style="dim"), soft_wrap=True)
    text = colour_row(row, console)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    console.print(text, soft_wrap=True)
    weights = sorted({token.weight for token in row.tokens} - {0.0, 1.0})
    if weights:
        shown = ", ".join(fmt.number(weight) for weight in weights)
        console.print(Text(f"with loss weights other than 1: {shown}", style="dim"))
    console.print()


def colour_row(row: InspectedRow, console: Console) -> Text:
    """The row's text: trained tokens on green, or in brackets where nothing can be coloured."""
    plain = console.no_color or console.color_system is None
    opening, closing, newline = _marks(console)
    text, shade = Text(), 0
    for trained, run in itertools.groupby(_shown_tokens(row), lambda token: token.weight > 0):
        text.append(opening if plain and trained else "")
        for token in run:
            style = UNTRAINED
            if trained:
                style, shade = TRAINED[shade], 1 - shade
            if token.special:
                style = f"{style} {SPECIAL}" if not trained else f"{style} underline"
            text.append(printable(token.text, newline=newline), style=style)
        text.append(closing if plain and trained else "")
    return text


def _shown_tokens(row: InspectedRow) -> Iterator[Token]:
    return (token for token in row.tokens if token.text)


def printable(text: str, *, newline: str) -> str:
    """Control characters as escapes (data must not steer the terminal), line ends visible."""
    shown = (
        f"{newline}\n" if char == "\n" else char if char.isprintable() else repr(char)[1:-1]
        for char in text
    )
    return "".join(shown)


def _marks(console: Console) -> tuple[str, str, str]:
    return ("⟦", "⟧", "↵") if _is_unicode(console) else ("[[", "]]", "\\n")


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _heading(name: str, console: Console) -> None:
    dash = "─" if _is_unicode(console) else "-"
    console.print(Rule(Text(name, style="bold"), align="left", characters=dash, style="dim"))


def _show_counts(found: Inspection, console: Console) -> None:
    report = found.report
    _heading("all rows", console)
    share = report.trained_tokens / report.tokens
    lines = {
        "rows": f"{report.kept} kept of {report.seen}: {report.dropped_overlong} overlong dropped, "
        f"{report.num_bad} unusable; {report.truncated} cut",
        "tokens": f"{fmt.count(report.tokens)}, {fmt.count(report.trained_tokens)} of them trained "
        f"({share:.0%})",
        "run": f"{found.train_rows} rows to train on, {found.total_steps} updates",
        "tokenizer": f"{found.vocab_size} tokens, generation stops at {', '.join(found.stops)}",
    }
    for name, line in [*lines.items(), *(("note", note) for note in found.notes)]:
        console.print(Text.assemble((f"{name:<11}", "bold"), line), soft_wrap=True)
    console.print()


def _show_lengths(found: Inspection, console: Console) -> None:
    _heading("tokens per row", console)
    most = max(length.rows for length in found.lengths)
    block = "█" if _is_unicode(console) else "#"
    for length in found.lengths:
        size = round(BAR_WIDTH * length.rows / most)
        # A bin that is not empty always shows something.
        bar = block * max(size, 1 if length.rows else 0)
        span = f"{length.low:>7} - {length.high:<7}"
        console.print(Text.assemble(span, (f"{bar:<{BAR_WIDTH}}", "cyan"), f" {length.rows}"))
    console.print()


def _show_updates(found: Inspection, console: Console) -> None:
    _heading("first updates", console)
    for update in found.updates:
        sizes = update.micro_batch_tokens
        line = (
            f"step {update.step}: {update.rows} rows, {update.tokens} tokens in {len(sizes)} "
            f"micro-batch{'es' if len(sizes) > 1 else ''} of {min(sizes)} to {max(sizes)} tokens"
        )
        if update.fill is not None:
            line += f" ({update.fill:.1%} full)"
        console.print(Text(line), soft_wrap=True)
    console.print()
