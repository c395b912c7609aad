"""Write the bug report: everything that a maintainer asks for, as Markdown.

The config is shown by an allow-list (config/loading/shareable.py), and texts go through a scrubber
(redact.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homeostat.errors import RunDirError
from homeostat.observe import format as fmt
from homeostat.observe.environment import Environment
from homeostat.observe.jsonl import shown_numbers
from homeostat.observe.logs import tail
from homeostat.observe.progress import event_line
from homeostat.observe.redact import Scrubber, mask_text, relevant_environment
from homeostat.observe.report.facts import RunFacts, read_facts
from homeostat.observe.run_dir import RunPaths

# Kinds of events by which a run reacts to a problem on its own.
_REMEDIES = (
    "step_skipped",
    "oom_retry",
    "checkpoint_failed",
    "checkpoint_skipped_invalid",
    "sink_failed",
    "run_stopped",
    "run_resumed",
    "config_changed",
    "early_stop",
)
NUM_CONSOLE_LINES = 40
NUM_REMEDIES = 60


def require_run_dir(path: Path) -> None:
    """Refuse a folder to which no run has written."""
    paths = RunPaths(path)
    if not (paths.events.is_file() or paths.config_json.is_file()):
        raise RunDirError(
            f"{path} is not a run directory: it has neither config.json nor events.jsonl. "
            "Give the folder of a run, such as runs/NAME."
        )


def bug_sheet(run_dir: Path, environment: Environment, *, environ: Mapping[str, str]) -> str:
    """Return everything about a run and this machine that a bug report needs."""
    facts = read_facts(run_dir)
    parts = [
        f"# Run `{mask_text(facts.name)}`: {facts.status[0]}",
        _summary(facts),
        _section("Command", _code(facts.told("command"), facts.scrubber)),
        machine_markdown(environment),
        _section("At the run's last start", _table(facts.told("environment") or {})),
        _section("Environment variables", _table(relevant_environment(environ))),
        _section("Remedies tried", _remedies(facts)),
        _section("Traceback", _code("\n".join(tail(facts.paths.traceback, 200)), facts.scrubber)),
        _section("Last console lines", _console(facts)),
        _section("Config", _code(json.dumps(facts.config, indent=2), facts.scrubber, "json")),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def machine_markdown(environment: Environment) -> str:
    """Describe hardware, versions and the verdict on CUDA."""
    gpus = {f"GPU {index}": gpu.describe() for index, gpu in enumerate(environment.cuda.gpus)}
    cuda = cuda_lines(environment)
    verdicts = "\n".join(f"- {text}" for text in environment.verdicts)
    return "\n".join(
        (
            _section("Machine", _table({**environment.machine, **gpus, **cuda})),
            _section("Verdict", verdicts),
            _section("Versions", _table(environment.versions)),
        )
    )


def cuda_lines(environment: Environment) -> dict[str, str]:
    """Describe the driver, torch's CUDA version and its architectures, if there are any."""
    cuda = environment.cuda
    newest = f", CUDA up to {cuda.driver_cuda[0]}.{cuda.driver_cuda[1]}" if cuda.driver_cuda else ""
    lines = {
        "driver": f"{cuda.driver_version}{newest}" if cuda.driver_version else "",
        "torch CUDA": cuda.torch.built_for_cuda or "none (CPU build)",
        "torch kernels": ", ".join(cuda.torch.arch_list),
    }
    return {name: value for name, value in lines.items() if value}


def _summary(facts: RunFacts) -> str:
    lines = {"steps": f"{facts.last_step}", "time": fmt.duration(facts.duration_s)}
    for name in ("train/loss", "eval/loss", "grad_norm"):
        series = facts.columns.get(name)
        if series is not None:
            lines[f"last {name}"] = fmt.number(float(series.y[-1]))
    for name, numbers in facts.damaged.items():
        lines[f"damaged lines of {name}"] = f"{len(numbers)}, passed over: {shown_numbers(numbers)}"
    return _table(lines)


def _remedies(facts: RunFacts) -> str:
    found = [event for event in facts.events if event["kind"] in _REMEDIES]
    lines = [
        f"- step {event['step']}: {facts.scrubber.text(_event_text(event))}" for event in found
    ]
    if len(lines) > NUM_REMEDIES:
        lines = [f"- ({len(lines) - NUM_REMEDIES} earlier ones)", *lines[-NUM_REMEDIES:]]
    return "\n".join(lines)


def _event_text(event: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in ("kind", "step", "time")}
    return event_line(str(event["kind"]), fields, max_length=300)


def _console(facts: RunFacts) -> str:
    return _code("\n".join(tail(facts.paths.console_log, NUM_CONSOLE_LINES)), facts.scrubber)


def _section(title: str, body: str) -> str:
    return f"\n## {title}\n\n{body}" if body else ""


def _table(rows: Mapping[str, str]) -> str:
    cells = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *cells]) if cells else ""


def _cell(value: str) -> str:
    return mask_text(value).replace("|", "\\|").replace("\n", " ")


def _code(text: Any, scrubber: Scrubber, language: str = "") -> str:
    """Return a fenced block whose fence is longer than any run of backticks inside."""
    if not text:
        return ""
    body = scrubber.text(str(text))
    fence = "```"
    while fence in body:
        fence += "`"
    return f"{fence}{language}\n{body}\n{fence}"
