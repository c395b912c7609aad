"""`homeostat inspect`: show the tokens of a recipe's rows, or a run's completions."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from homeostat.cli.completions import show_step
from homeostat.cli.options import Format, OutputFormat, Overrides
from homeostat.cli.plain import heading, is_unicode, marks, printable
from homeostat.errors import ConfigError, Problem
from homeostat.importing.hints import load_recipe
from homeostat.observe import format as fmt
from homeostat.observe.terminal import SafeConsole

if TYPE_CHECKING:
    from homeostat.config.run import RunConfig
    from homeostat.data.inspection import InspectedRow, Inspection, Token

BAR_WIDTH = 40
# Two alternating shades, so that the borders of tokens are visible.
TRAINED = ("bold white on #005f00", "bold white on #007a00")
UNTRAINED = "dim"
SPECIAL = "magenta"


Place = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="The recipe (a YAML file), or the folder of an RL run. With --layers also the folder "
        "of any run or checkpoint.",
        show_default=False,
    ),
]
Rows = Annotated[int, typer.Option("--rows", "-n", min=0, help="Number of rows to show.")]
RowIds = Annotated[
    list[int] | None,
    typer.Option(
        "--row-id", metavar="N", help="Show row N instead of the first rows. May be repeated."
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="Step of the run to show. Default: the newest."),
]
Layers = Annotated[
    bool,
    typer.Option(
        "--layers",
        help="Show every layer of the model with its actual dtype, its quantisation and scales, "
        "or the reason why it is not quantised.",
    ),
]


def inspect(
    recipe: Place,
    overrides: Overrides = None,
    rows: Rows = 3,
    row_id: RowIds = None,
    step: Step = None,
    layers: Layers = False,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Show the tokens of some rows with their labels, and statistics of all rows.

    Trained tokens have a green background, or brackets if the output has no colour. The row numbers
    are the same as in row_losses.jsonl and offending_rows/. Exit code 1: training would refuse
    these rows.

    For a preference recipe you see pairs: the chosen row, then the rejected one. For an RL recipe
    you see prompts, up to where the answer begins. For the folder of an RL run you see the
    completions of a step with the highest and the lowest rewards, --rows of each.

    With --layers you see the layers of the model instead; no rows are read.
    """
    console = SafeConsole(stderr=format is Format.JSON, highlight=False)
    if layers:
        _refuse(row_id or step is not None, "--layers", "--row-id and --step are about rows.")
        _show_layers(recipe, overrides, console, as_json=format is Format.JSON)
        return
    if recipe.is_dir():
        _refuse(overrides or row_id, "KEY=VALUE and --row-id", "they belong to a recipe.")
        show_step(recipe, step, console, num_rows=rows, as_json=format is Format.JSON)
        return
    _refuse(step is not None, "--step", "it belongs to the folder of a run, not to a recipe.")
    from homeostat.hub.resolve import resolve_names

    lines: list[str] = []
    config = resolve_names(
        load_recipe(recipe, overrides), console=console, need="tokenizer", tell=lines.append
    )
    found = _gather(config, console, num_rows=rows, row_ids=row_id or [])
    _show_rows(replace(found, notes=(*lines, *found.notes)), console, as_json=format is Format.JSON)


def _show_rows(found: Inspection, console: Console, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found, console)
    if any(warned.level == "error" for warned in found.warnings):
        raise typer.Exit(1)


def _show_layers(
    path: Path, overrides: list[str] | None, console: Console, *, as_json: bool
) -> None:
    from homeostat.cli.layers import show_layers
    from homeostat.generation.layers import list_layers

    show_layers(list_layers(path, overrides), console, as_json=as_json)


def _refuse(given: object, place: str, why: str) -> None:
    if given:
        raise ConfigError([Problem(place, why)])


def _gather(
    config: RunConfig, console: Console, *, num_rows: int, row_ids: list[int]
) -> Inspection:
    from homeostat.algorithms.row_loss import row_loss
    from homeostat.data.inspection import inspect_prompts, inspect_rows
    from homeostat.data.tokenizer import load_tokenizer

    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory() as folder, bar:
        task = bar.add_task("tokenising", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        inputs, tokenizer = config.for_inputs, load_tokenizer(config.model)
        which = {"num_rows": num_rows, "row_ids": row_ids}
        if config.is_rl:
            return inspect_prompts(inputs, tokenizer, **which, progress=progress)
        loss = row_loss(config.algorithm, preference=config.preference, data=config.data)
        cache_dir = Path(config.data.cache_dir or folder)
        return inspect_rows(
            inputs, tokenizer, loss=loss, cache_dir=cache_dir, **which, progress=progress
        )


def show(found: Inspection, console: Console) -> None:
    """Print an inspection for a person."""
    for row in found.rows:
        _show_row(row, console, is_rl=found.is_rl)
    _show_counts(found, console)
    _show_lengths(found, console)
    if found.updates:
        _show_updates(found, console)
    for warned in found.warnings:
        style = "bold red" if warned.level == "error" else "bold yellow"
        console.print(Text.assemble((f"{warned.level}: ", style), warned.message), soft_wrap=True)
        for example in warned.examples:
            console.print(Text(f"  {example.place}: {example.message}"), soft_wrap=True)


def _show_row(row: InspectedRow, console: Console, *, is_rl: bool) -> None:
    share = row.num_trained / row.num_tokens
    name = f"row {row.row_id}" + (f", {row.side}" if row.side else "")
    title = f"{name}   {row.num_tokens} tokens, {row.num_trained} trained ({share:.0%})"
    if is_rl:
        title = f"prompt {row.row_id}   {row.num_tokens} tokens"
    heading(title, console)
    console.print(Text(row.origin, style="dim"), soft_wrap=True)
    text = colour_row(row, console)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    console.print(text, soft_wrap=True)
    weights = sorted({token.weight for token in row.tokens} - {0.0, 1.0})
    if weights:
        shown = ", ".join(fmt.number(weight) for weight in weights)
        console.print(Text(f"with loss weights other than 1: {shown}", style="dim"))
    for name, shown in row.columns.items():
        console.print(Text.assemble((f"{name}: ", "bold dim"), (shown, "dim")), soft_wrap=True)
    console.print()


def colour_row(row: InspectedRow, console: Console) -> Text:
    """Return the row's text with trained tokens on green, or in brackets without colour."""
    plain = console.no_color or console.color_system is None
    opening, closing, newline = marks(console)
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


def _show_counts(found: Inspection, console: Console) -> None:
    report = found.report
    heading("all rows", console)
    share = report.trained_tokens / report.tokens
    rows = (
        f"{report.kept} kept of {report.seen}: {report.dropped_overlong} overlong dropped, "
        f"{report.num_bad} unusable"
    )
    tokens, trained = fmt.count(report.tokens), fmt.count(report.trained_tokens)
    own = {
        found.unit: f"{rows}; {report.truncated} cut",
        "tokens": f"{tokens}, {trained} of them trained ({share:.0%})",
        "run": f"{found.train_rows} {found.unit} to train on, {found.total_steps} updates",
    }
    if found.is_rl:
        own = {"prompts": rows, "tokens": tokens, "run": f"{found.train_rows} prompts to train on"}
    lines = {
        **own,
        "tokenizer": f"{found.vocab_size} tokens, generation stops at {', '.join(found.stops)}",
    }
    more = [("source", str(part)) for part in found.mix]
    more += [("filter", line) for line in found.filters]
    for name, line in [*lines.items(), *more, *(("note", note) for note in found.notes)]:
        console.print(Text.assemble((f"{name:<11}", "bold"), line), soft_wrap=True)
    console.print()


def _show_lengths(found: Inspection, console: Console) -> None:
    heading("tokens per row", console)
    most = max(length.rows for length in found.lengths)
    block = "█" if is_unicode(console) else "#"
    for length in found.lengths:
        size = round(BAR_WIDTH * length.rows / most)
        # A bin that is not empty always shows at least one block.
        bar = block * max(size, 1 if length.rows else 0)
        span = f"{length.low:>7} - {length.high:<7}"
        console.print(Text.assemble(span, (f"{bar:<{BAR_WIDTH}}", "cyan"), f" {length.rows}"))
    console.print()


def _show_updates(found: Inspection, console: Console) -> None:
    heading("first updates", console)
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
