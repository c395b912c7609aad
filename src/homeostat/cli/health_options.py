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
        help="The log's NAME is this metric of ours (train/loss, grad_norm, reward, kl ...), in "
        "our unit; may be repeated.",
    ),
]
AnswerFormat = Annotated[
    ReportFormat,
    typer.Option(
        "--format",
        help="text for people; json for programs; sarif for code scanning; github for "
        "annotations of a workflow; markdown for a comment.",
    ),
]
ForMaintainers = Annotated[
    bool,
    typer.Option(
        "--for-maintainers",
        help="Write the text of an issue, as Markdown: versions, the lines that matter, "
        "settings that reproduce the run, the rules that found nothing. Read it first.",
    ),
]
Select = Annotated[
    str,
    typer.Option(
        "--select",
        metavar="CODES",
        help="Evaluate only these codes, prefixes, names or families.",
    ),
]
Ignore = Annotated[
    str,
    typer.Option("--ignore", metavar="CODES", help="Skip these rules; same form as --select."),
]
ShownLevel = Annotated[
    Level, typer.Option("--level", help="Show findings of this level and above.")
]
StopOn = Annotated[
    Level | None,
    typer.Option(
        "--stop-on",
        help="Ask the run to stop (SIGTERM) at the first finding of this level or above: the "
        "command, or a run of homeostat's own whose folder is followed.",
        show_default=False,
    ),
]
WebhookUrl = Annotated[
    str | None,
    typer.Option("--webhook", metavar="URL", help="POST each finding as JSON to this address."),
]
ExecCommand = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        help="Run this shell command for each finding: JSON on its standard input, facts in "
        "HOMEOSTAT_TEXT, HOMEOSTAT_CODE, HOMEOSTAT_LEVEL, HOMEOSTAT_STEP.",
    ),
]
Interval = Annotated[
    float, typer.Option("--interval", min=0.0, help="Seconds between two looks, at least.")
]
IdleTimeout = Annotated[
    float,
    typer.Option(
        "--idle-timeout",
        min=0.0,
        help="End after so many seconds in which nothing was written to PATH; 0: never.",
    ),
]
