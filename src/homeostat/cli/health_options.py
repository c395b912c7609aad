"""Arguments of the verbs that judge runs: doctor and watch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from homeostat.health.finding import Level


class ReportFormat(StrEnum):
    """The format of the doctor's answer."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"


RunPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        help="A run folder, a console log, JSONL or CSV metrics, trainer_state.json, "
        "TensorBoard events or a W&B offline folder, of any framework. - reads standard input.",
        show_default=False,
    ),
]
RunWords = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH|COMMAND...",
        help="A log or run folder to follow, or, after --, the command to run.",
        show_default=False,
    ),
]
RunConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="File with the run's settings (YAML, JSON, TOML), if PATH does not contain them.",
    ),
]
MetricNames = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="NAME=METRIC",
        help="Read NAME in the log as this metric of homeostat (train/loss, grad_norm, reward, kl "
        "...). It must have the same unit. May be repeated.",
    ),
]
AnswerFormat = Annotated[
    ReportFormat,
    typer.Option(
        "--format",
        help="Output format: text for people, json for programs, sarif for code scanning, github "
        "for annotations of a workflow, markdown for a comment.",
    ),
]
ForMaintainers = Annotated[
    bool,
    typer.Option(
        "--for-maintainers",
        help="Write a bug report for the framework's maintainers, as Markdown: versions, the "
        "important lines of the log, settings that reproduce the run, and the rules that found "
        "nothing. Read it before you send it.",
    ),
]
Select = Annotated[
    str,
    typer.Option(
        "--select",
        metavar="CODES",
        help="Evaluate only these rules: codes, prefixes of codes, names or families, separated "
        "by commas.",
    ),
]
Ignore = Annotated[
    str,
    typer.Option("--ignore", metavar="CODES", help="Skip these rules. Same format as --select."),
]
ShownLevel = Annotated[
    Level, typer.Option("--level", help="Show findings of this level and above.")
]
StopOn = Annotated[
    Level | None,
    typer.Option(
        "--stop-on",
        help="Stop the run with SIGTERM at the first finding of this level or above. This works "
        "for a command, and for a run of homeostat whose folder is followed.",
        show_default=False,
    ),
]
WebhookUrl = Annotated[
    str | None,
    typer.Option(
        "--webhook", metavar="URL", help="Send each finding to this address as JSON (HTTP POST)."
    ),
]
ExecCommand = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        help="Run this shell command for each finding. It gets the finding as JSON on standard "
        "input, and in the environment variables HOMEOSTAT_TEXT, HOMEOSTAT_CODE, HOMEOSTAT_LEVEL "
        "and HOMEOSTAT_STEP.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        "--interval",
        min=0.0,
        help="Smallest number of seconds between two evaluations of the rules.",
    ),
]
IdleTimeout = Annotated[
    float,
    typer.Option(
        "--idle-timeout",
        min=0.0,
        help="End if nothing was written to PATH for this many seconds. 0: never.",
    ),
]
