"""`homeostat doctor`: what is wrong with a run of any framework, why, and what to change there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.cli.options import Format, OutputFormat
from homeostat.errors import HomeostatError
from homeostat.health.finding import Finding, Level
from homeostat.observe.redact import Scrubber, mask_text
from homeostat.observe.safe_text import safe_page

if TYPE_CHECKING:
    from homeostat.health.rule import Rule
    from homeostat.health.view import RunView

STDIN = "-"


def doctor(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A run folder, a console log, JSONL or CSV metrics, trainer_state.json, "
            "TensorBoard events or a W&B offline folder, of any framework. - reads standard input.",
            show_default=False,
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="The run's settings (YAML, JSON, TOML), if elsewhere."
        ),
    ] = None,
    format: OutputFormat = Format.TEXT,
    select: Annotated[
        str,
        typer.Option(
            "--select", metavar="CODES", help="Ask only these: codes, their beginnings, names."
        ),
    ] = "",
    ignore: Annotated[
        str, typer.Option("--ignore", metavar="CODES", help="Do not ask these: as --select.")
    ] = "",
    level: Annotated[
        Level, typer.Option("--level", help="Show findings of this level and above.")
    ] = Level.INFO,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the rules that could not be evaluated.")
    ] = False,
) -> None:
    """Say what is wrong with a run, since which step, why, and which setting to change.

    Exit code 0: nothing of level error; 1: the run is ill, or ended in an error that no rule
    knows; 2: the input cannot be read.
    """
    from homeostat.health.diagnose import diagnose
    from homeostat.health.registry import RULES
    from homeostat.health.render import as_json, unknown_error
    from homeostat.health.render_text import as_text

    rules = chosen(RULES, select=select, ignore=ignore)
    view = _read(path, config)
    diagnosis = diagnose(view, rules)
    shown = [_without_secrets(one) for one in diagnosis.findings if one.level.rank >= level.rank]
    if format is Format.JSON:
        found = as_json(diagnosis, view, findings=shown)
        _write(json.dumps(Scrubber().tree(found), indent=2))
    else:
        width = shutil.get_terminal_size().columns
        text = as_text(
            diagnosis, view, findings=shown, width=width, color=_has_color(), verbose=verbose
        )
        _write(mask_text(text.rstrip("\n")))
    is_ill = any(one.level is Level.ERROR for one in diagnosis.findings)
    raise typer.Exit(1 if is_ill or unknown_error(diagnosis, view) else 0)


def _without_secrets(finding: Finding) -> Finding:
    """Evidence quotes lines of a log, which is pasted into bug reports. Before it is folded."""
    return replace(finding, evidence=tuple(mask_text(line) for line in finding.evidence))


def _read(path: str, config: Path | None) -> RunView:
    from homeostat.health.readers import open_run, read_text
    from homeostat.health.readers.settings import read_config

    if path != STDIN:
        return open_run(Path(path), config=config)
    settings = read_config(config) if config is not None else None
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    return read_text(text, config=settings)


def chosen(rules: tuple[Rule, ...], *, select: str, ignore: str) -> list[Rule]:
    """The rules to ask. A word stands for a code, the beginning of codes, a name or a family."""
    wanted = _matching(rules, select, option="--select") if select else list(rules)
    left_out = _matching(rules, ignore, option="--ignore") if ignore else []
    return [rule for rule in wanted if rule not in left_out]


def _matching(rules: tuple[Rule, ...], words: str, *, option: str) -> list[Rule]:
    found: list[Rule] = []
    for word in filter(None, (part.strip() for part in words.split(","))):
        matched = [
            rule
            for rule in rules
            if rule.code.startswith(word.upper()) or word.lower() in (rule.name, rule.family.value)
        ]
        if not matched:
            raise HomeostatError(
                f"{option} {word}: no rule has such a code, name or family. "
                "`homeostat rules` lists them."
            )
        found += [rule for rule in matched if rule not in found]
    return found


def _has_color() -> bool:
    """As https://no-color.org and most tools have it."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def _write(text: str) -> None:
    """To standard output, whatever it can encode and show: a log may hold any character."""
    encoding = sys.stdout.encoding or "utf-8"
    text = safe_page(text)
    typer.echo(text.encode(encoding, errors="backslashreplace").decode(encoding))
