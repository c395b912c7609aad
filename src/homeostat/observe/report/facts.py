"""Gather facts from the files of a run for the page: status, times, worst rows, samples.

Every file may be missing, empty or belong to a run that is still going on.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from homeostat.config.loading.shareable import shared_config
from homeostat.errors import RunDirError
from homeostat.json_text import parse_json
from homeostat.observe.completions import completion_steps, read_completions
from homeostat.observe.expert_load import is_expert_load
from homeostat.observe.jsonl import (
    IsSound,
    is_event,
    is_finding,
    is_metrics,
    is_row_losses,
    iter_jsonl,
)
from homeostat.observe.progress import is_rl
from homeostat.observe.redact import Scrubber
from homeostat.observe.report.illnesses import (
    Illness,
    Remedy,
    read_illnesses,
    read_remedies,
    share_out,
)
from homeostat.observe.report.series import Series, read_columns
from homeostat.observe.run_dir import RunPaths
from homeostat.observe.samples import Row, best_and_worst_prompts

log = logging.getLogger(__name__)

_STARTS = ("run_started", "run_resumed")
NUM_WORST_ROWS = 15
NUM_SAMPLES = 3  # number of best completions of a step, and of worst ones


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row whose loss stood out from the other rows of its step."""

    row_id: int
    step: int
    loss: float
    step_median: float

    @property
    def excess(self) -> float:
        return self.loss - self.step_median if math.isfinite(self.loss) else math.inf


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The best and the worst completions of a step, or why they could not be read."""

    step: int
    best: list[Row]
    worst: list[Row]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything that the page shows, read once."""

    paths: RunPaths
    # Only the values that may be shared; texts of the run's files go through the scrubber.
    config: dict[str, Any]
    scrubber: Scrubber
    columns: dict[str, Series]
    events: list[dict[str, Any]]
    worst_rows: list[WorstRow]
    expert_load: list[dict[str, Any]]
    samples: list[StepSamples]
    illnesses: list[Illness]
    # Remedies of findings that are no longer on record.
    other_remedies: list[Remedy]
    last_step: int
    started_at: float | None
    duration_s: float
    # Numbers of the lines that were skipped, by file name.
    damaged: dict[str, list[int]]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.paths.path.resolve().name)

    @property
    def status(self) -> tuple[str, str]:
        """Return a word for the state of the run, and its mood: good, warn, bad or none."""
        for event in reversed(self.events):
            match event["kind"]:
                case "run_failed":
                    return "failed", "bad"
                case "run_finished":
                    early = any(other["kind"] == "early_stop" for other in self.events)
                    return ("finished early", "good") if early else ("finished", "good")
                case "run_stopped":
                    return "stopped", "warn"
                case "run_started" | "run_resumed":
                    break
        return "not finished", ""

    def told(self, name: str) -> Any:
        """Return a field, such as `command` or `environment`, of the newest event that has it."""
        return next((event[name] for event in reversed(self.events) if name in event), None)

    def config_value(self, *path: str) -> Any:
        here: Any = self.config
        for part in path:
            here = here.get(part) if isinstance(here, dict) else None
        return here

    @property
    def is_rl(self) -> bool:
        return is_rl(self.columns)

    @property
    def best_eval(self) -> tuple[float, float] | None:
        """Return step and value of the highest eval/reward, or of the lowest eval/loss."""
        sign = -1.0 if self.is_rl else 1.0
        series = self.columns.get("eval/reward" if self.is_rl else "eval/loss")
        if series is None or not series.finite.size:
            return None
        pairs = zip(series.y.tolist(), series.x.tolist(), strict=True)
        value, step = min((sign * y, x) for y, x in pairs if math.isfinite(y))
        return step, sign * value


def read_facts(path: Path) -> RunFacts:
    """Read all files of a run directory."""
    paths = RunPaths(path)
    files = (paths.metrics, paths.events, paths.findings, paths.row_losses, paths.expert_load)
    bad: dict[str, list[int]] = {file.name: [] for file in files}

    def records(file: Path, is_sound: IsSound) -> Iterator[dict[str, Any]]:
        return iter_jsonl(file, is_sound=is_sound, damaged=bad[file.name])

    config = read_config(paths)
    scrubber = Scrubber.of(config, environ=os.environ)
    metrics = list(records(paths.metrics, is_metrics))
    events = [scrubber.tree(event) for event in records(paths.events, is_event)]
    illnesses = read_illnesses(map(scrubber.tree, records(paths.findings, is_finding)))
    started_at, duration_s = _times(metrics, events)
    return RunFacts(
        paths=paths,
        config=shared_config(config),
        scrubber=scrubber,
        columns=read_columns(metrics),
        events=events,
        worst_rows=find_worst_rows(records(paths.row_losses, is_row_losses)),
        expert_load=list(records(paths.expert_load, is_expert_load)),
        samples=read_samples(paths.completions),
        illnesses=illnesses,
        other_remedies=share_out(read_remedies(events), illnesses),
        last_step=max((int(record["step"]) for record in metrics), default=0),
        started_at=started_at,
        duration_s=duration_s,
        damaged={name: numbers for name, numbers in bad.items() if numbers},
    )


def read_config(paths: RunPaths) -> dict[str, Any]:
    """Return the resolved config as plain values; empty if it is missing or unreadable."""
    try:
        config = parse_json(paths.config_json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_samples(folder: Path) -> list[StepSamples]:
    """Return the samples of the first and the last step that have a file."""
    try:
        steps = completion_steps(folder)
    except RunDirError as error:
        log.warning("the report has no completions: %s", error)
        return []
    found = []
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        try:
            best, worst = best_and_worst_prompts(read_completions(folder, step), NUM_SAMPLES)
            found.append(StepSamples(step, best, worst))
        except RunDirError as error:
            found.append(StepSamples(step, [], [], problem=str(error)))
    return found


def _times(
    metrics: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> tuple[float | None, float]:
    """Return the start of the run and its duration: its sessions, without the gaps between them."""
    moments = sorted(
        (float(record["time"]), record.get("kind") in _STARTS)
        for record in [*metrics, *events]
        if "time" in record
    )
    duration, previous = 0.0, None
    for moment, is_start in moments:
        if previous is not None and not is_start:
            duration += moment - previous
        previous = moment
    return (moments[0][0] if moments else None), duration


def find_worst_rows(
    records: Iterable[dict[str, Any]], *, count: int = NUM_WORST_ROWS
) -> list[WorstRow]:
    """Return rows by how far their loss is above the median of their step, each row once.

    The median is subtracted because all rows of an early step have a high loss.
    """
    worst: dict[int, WorstRow] = {}
    for record in records:
        losses = [float(loss) for loss in record["losses"]]
        finite = [loss for loss in losses if math.isfinite(loss)]
        middle = median(finite) if finite else math.nan
        for row_id, loss in zip(record["row_ids"], losses, strict=True):
            row = WorstRow(int(row_id), int(record["step"]), loss, middle)
            known = worst.get(row.row_id)
            if known is None or row.excess > known.excess:
                worst[row.row_id] = row
        if len(worst) > 20_000:
            worst = {row.row_id: row for row in _top(worst, count)}
    return [row for row in _top(worst, count) if row.excess > 0]


def _top(worst: dict[int, WorstRow], count: int) -> list[WorstRow]:
    return heapq.nlargest(count, worst.values(), key=lambda row: (row.excess, -row.step))
