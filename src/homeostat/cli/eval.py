"""`homeostat eval`: lm-evaluation-harness on a model, through the native engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from homeostat.cli import generation_options as opts
from homeostat.cli.options import Format, OutputFormat
from homeostat.cli.output_file import write_output
from homeostat.errors import DataError
from homeostat.observe.safe_text import safe_text
from homeostat.observe.terminal import SafeConsole

if TYPE_CHECKING:
    from homeostat.generation.harness_lm import Row


Tasks = Annotated[
    str,
    typer.Option(
        "--tasks",
        metavar="NAME,...",
        help="Tasks, separated by commas: names that lm-evaluation-harness has, or YAML files.",
        show_default=False,
    ),
]
Include = Annotated[
    Path | None,
    typer.Option("--include", metavar="DIR", help="Folder with YAML files of your tasks."),
]
Fewshot = Annotated[
    int | None,
    typer.Option(
        "--num-fewshot",
        min=0,
        help="Number of examples before each question. Default: the task's own.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, help="Largest number of questions to use from each task. Default: all."
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat/--raw", help="--chat: format each question with the chat template.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Write all results of the harness as JSON."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        min=1,
        help="Largest number of tokens in an answer. Default: the task's own, or 256.",
    ),
]


def eval_(
    model: opts.Model,
    tasks: Tasks,
    include: Include = None,
    num_fewshot: Fewshot = None,
    limit: Limit = None,
    chat: Chat = False,
    out: Out = None,
    max_new_tokens: MaxNewTokens = None,
    seed: opts.Seed = 0,
    base: opts.Base = None,
    step: opts.Step = None,
    revision: opts.Revision = None,
    tokenizer: opts.Tokenizer = None,
    chat_template: opts.Template = None,
    context: opts.Context = None,
    device: opts.Device = opts.DeviceName.AUTO,
    precision: opts.Precision = opts.PrecisionName.AUTO,
    format: OutputFormat = Format.TEXT,
) -> None:
    """Evaluate any checkpoint, adapter, GGUF file or run with lm-evaluation-harness.

    Needs the extra `eval` (pip install 'homeostat[eval]'). The native engine scores and answers the
    questions, packed without padding. The datasets of built-in tasks are downloaded from the hub; a
    task that you write can use local files.
    """
    from homeostat.generation.harness_lm import (
        evaluate_tasks,
        read_tasks,
        require_harness,
        result_rows,
    )

    require_harness()
    files = read_tasks([word.strip() for word in tasks.split(",") if word.strip()], include=include)
    if not files.names:
        raise DataError("--tasks: name at least one task.")
    text_model, name = opts.load(
        model,
        base=base,
        step=step,
        revision=revision,
        tokenizer=tokenizer,
        template=chat_template,
        device=device,
        precision=precision,
    )
    from homeostat.generation.harness import Harness

    how = {"context": context, "max_new_tokens": max_new_tokens, "seed": seed}
    harness = Harness(text_model, **how, on_progress=_show_progress)
    asked = {"num_fewshot": num_fewshot, "limit": limit, "as_chat": chat, "seed": seed}
    found = evaluate_tasks(harness, files, name=name, **asked)
    if out is not None:
        write_output(out, json.dumps(found, indent=2, default=str) + "\n")
    _show(list(result_rows(found)), name, format)


def _show(rows: list[Row], name: str, format: Format) -> None:
    from homeostat.generation.harness_lm import rows_as_json

    if format is Format.JSON:
        typer.echo(json.dumps({"model": name, "results": rows_as_json(rows)}, indent=2))
        return
    console = SafeConsole()
    console.print(f"model: {safe_text(name)}", highlight=False, markup=False)
    console.print(_table(rows))


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{done} of {total}" + ("\n" if done == total else ""), err=True, nl=False)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("task", "metric"):
        table.add_column(name)
    for name in ("value", "stderr", "questions"):
        table.add_column(name, justify="right")
    for row in rows:
        error = "" if row.stderr is None else f"{row.stderr:.4f}"
        questions = "" if row.num_samples is None else str(row.num_samples)
        value = f"{row.value:.4f}" if abs(row.value) < 1e5 else f"{row.value:.4g}"
        table.add_row(row.task, row.metric, value, error, questions)
    return table
