"""Read run folders: our own, and others by the files in them that are known.

Our folders have config.json (settings by our keys), metrics.jsonl, events.jsonl, completions/,
console.log and traceback.txt. In other folders, every file that a reader knows is read, and the
results are combined; `facts["sources"]` lists the files. If a file is damaged, only its content is
lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from homeostat.errors import DataError, RunDirError
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.log import Log, LogLine
from homeostat.health.readers.files.one_file import found_in_file
from homeostat.health.readers.places.folders import found_in_folder
from homeostat.health.readers.places.own_runs import our_config
from homeostat.health.readers.values.settings import flat
from homeostat.health.readers.views.build import Found, view_of
from homeostat.health.reading import Reading
from homeostat.health.view import Event, Kind, RunView, SampleText
from homeostat.json_text import parse_json

_MAX_EVENTS = 200_000
_MAX_LINE = 1_000_000
_MAX_STEP_FILES = 3
_MAX_SAMPLES = 64
# Events that change the state of a run. The newest of them gives the current state.
_ENDS = ("run_started", "run_resumed", "run_stopped", "run_finished", "run_failed")


def view_of_run(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    only: Sequence[Path] = (),
    names: Mapping[str, str] | None = None,
) -> RunView:
    """Return the run in a folder, or in `only` these files of it. Raises HomeostatError."""
    settings = our_config(path)
    if settings is not None:
        return _our_view(path, {**settings, **flat(config or {})}, names=names)
    found = found_in_folder(path, only=only)
    if not found.sources:
        raise DataError(
            f"{path}: contains no metrics or logs in a known format. Give a run folder, a log or "
            "a metrics file (JSON lines, CSV, TensorBoard, W&B offline)."
            + "".join(f"\n{note}" for note in found.reading.notes)
        )
    return view_of(found, config=config, names=names)


def _our_view(path: Path, settings: dict[str, Any], *, names: Mapping[str, str] | None) -> RunView:
    metrics = path / "metrics.jsonl"
    found = found_in_file(metrics) if metrics.is_file() else Found()
    found.settings = {}
    found.events = list(_events(path / "events.jsonl"))
    try:
        found.samples = list(_samples(path / "completions"))
    except RunDirError as error:
        found.reading += Reading(notes=(str(error),))
    _add_log(found, path)
    files = ("config.json", "metrics.jsonl", "events.jsonl", "console.log", "traceback.txt")
    found.sources = [str(path / name) for name in files if (path / name).is_file()]
    totals = [event.fields.get("total_steps") for event in found.events if event.kind == "training"]
    found.total_steps = totals[-1] if totals and type(totals[-1]) is int else None
    kind = _kind(settings)
    return view_of(found, config=settings, framework=HOMEOSTAT, kind=kind, names=names)


def _kind(settings: Mapping[str, Any]) -> Kind:
    algorithm = settings.get("algorithm.type", settings.get("algorithm"))
    if algorithm == "sft":
        return Kind.SFT
    if algorithm == "reward_model":
        return Kind.REWARD_MODEL
    # A run of preference training has a beta even if its algorithm is a plug-in.
    has_beta = settings.get("preference.beta") is not None
    is_known = algorithm in {"dpo", "ipo", "kto", "orpo", "simpo"}
    return Kind.PREFERENCE if is_known or has_beta else Kind.RL


def _events(path: Path) -> Iterator[Event]:
    """Yield the complete lines of the event log as events, as far as they can be read."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for _ in range(_MAX_EVENTS):
            line = file.readline(_MAX_LINE)
            if not line:
                return
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                step = record.get("step")
                rest = {
                    name: value for name, value in record.items() if name not in {"kind", "step"}
                }
                yield Event(record["kind"], step if type(step) is int else None, rest)


def _samples(folder: Path) -> Iterator[SampleText]:
    """Yield completions of the first step that has any, and of the newest steps."""
    if not folder.is_dir():
        return
    # Reading Parquet needs a large import, so do it only if there is something to read.
    from homeostat.observe.completions import completion_steps, read_completions

    steps = completion_steps(folder)
    for step in dict.fromkeys([*steps[:1], *steps[1:][1 - _MAX_STEP_FILES :]]):
        try:
            rows = read_completions(folder, step)
        except RunDirError:
            continue
        for row in rows[:_MAX_SAMPLES]:
            yield SampleText(
                step,
                str(row["completion"] or ""),
                prompt=str(row["prompt"] or ""),
                reward=row["reward"],
                stop_reason=str(row["stop_reason"] or ""),
                num_tokens=row["num_tokens"],
            )


def _add_log(found: Found, path: Path) -> None:
    """Add the console log and, if the run ended with an error, its traceback after it.

    The metrics in the console log are not added, because metrics.jsonl has them.
    """
    lines = _lines_of(path / "console.log")
    ends = [event for event in found.events if event.kind in _ENDS]
    # If the run was resumed, the traceback of the earlier attempt says nothing about its state now.
    if not ends or ends[-1].kind == "run_failed":
        start = lines[-1].number if lines else 0
        step = ends[-1].step if ends else None
        lines += [
            LogLine(start + line.number, line.text, step)
            for line in _lines_of(path / "traceback.txt")
        ]
    found.log = Log(lines)


def _lines_of(file: Path) -> list[LogLine]:
    return list(found_in_file(file).log.lines) if file.is_file() else []
