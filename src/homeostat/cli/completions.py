"""Show the completions of a step that earned the most and the least."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import typer
from rich.console import Console
from rich.text import Text

from homeostat.cli.plain import heading, marks, printable
from homeostat.errors import RunDirError
from homeostat.json_text import parse_json
from homeostat.observe import format as fmt
from homeostat.observe.completions import (
    REWARD_PREFIX,
    Row,
    best_and_worst,
    failed_rewards,
    read_completions,
)
from homeostat.observe.jsonl import encode
from homeostat.observe.run_dir import RunPaths
from homeostat.types import StopReason

CUT = {str(reason) for reason in StopReason if reason.is_cut}


def show_step(
    folder: Path, step: int | None, console: Console, *, num_rows: int, as_json: bool
) -> None:
    """Show up to `num_rows` of the best and of the worst completions of a step."""
    paths = RunPaths(folder)
    if not paths.config_json.is_file():
        raise RunDirError(f"{folder}: not the folder of a run (it has no config.json).")
    rows = read_completions(paths.completions, step)
    best, worst = best_and_worst(rows, num_rows)
    if as_json:
        summary = {"completions": len(rows), "best": best, "worst": worst}
        typer.echo(encode(summary).decode().rstrip())
        return
    for name, chosen in (("best", best), ("worst", worst)):
        for row in chosen:
            _show(name, row, console)
    _show_summary(rows, console)


def _show(name: str, row: Row, console: Console) -> None:
    place = f"prompt {row['prompt_id']}, group {row['group']}, sample {row['sample']}"
    heading(f"{name}   step {row['step']}, {place}", console)
    newline = marks(console)[2]
    for text, style in ((_asked(row["prompt"]), "dim"), (row["completion"], _mood(row))):
        console.print(Text(printable(text, newline=newline), style=style), soft_wrap=True)
    failed = failed_rewards(row)
    values = {
        key.removeprefix(REWARD_PREFIX): value
        for key, value in row.items()
        if key.startswith(REWARD_PREFIX)
    }
    earned = [
        f", {label} {'failed' if label in failed else _number(value)}"
        for label, value in values.items()
    ]
    line = Text.assemble(
        (f"reward {_number(row['reward'])}", "bold"),
        *earned,
        "   advantage ",
        (_number(row["advantage"]), f"bold {_mood(row)}"),
        f"   {row['num_tokens']} tokens, ended by ",
        (row["stop_reason"], "bold yellow" if row["stop_reason"] in CUT else "bold"),
    )
    console.print(line, soft_wrap=True)
    console.print()


def _asked(prompt: str) -> str:
    """Return the prompt's text; for a chat, each message with its role."""
    try:
        lines = [f"{message['role']}: {message['content']}" for message in parse_json(prompt)]
    except (ValueError, TypeError, LookupError):
        return prompt
    return "\n".join(lines) or prompt


def _mood(row: Row) -> str:
    """Return green if the update makes a completion more likely, red if less likely."""
    advantage = row["advantage"] or 0.0
    return "green" if advantage > 0 else "red" if advantage < 0 else "default"


def _number(value: float | None) -> str:
    return "none" if value is None else fmt.number(value)


def _show_summary(rows: list[Row], console: Console) -> None:
    heading("all completions", console)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    num_cut = sum(row["stop_reason"] in CUT for row in rows)
    prompts = len({row["group"] for row in rows})
    lines = {
        "completions": f"{len(rows)} of {prompts} prompts, {num_cut} cut off",
        "reward": f"{_number(fmean(rewards) if rewards else None)} on average",
    }
    if missing := len(rows) - len(rewards):
        num_failed = sum(bool(failed_rewards(row)) and row["reward"] is None for row in rows)
        lines["reward"] += f", {missing} without one"
        lines["reward"] += f" ({num_failed} because a reward failed)" if num_failed else ""
    for name, line in lines.items():
        console.print(Text.assemble((f"{name:<13}", "bold"), line), soft_wrap=True)
