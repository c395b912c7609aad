"""Read run folders: our own, and others by the files in them that are known.

Our folders have config.json (settings by our keys), metrics.jsonl, events.jsonl, completions/,
console.log and traceback.txt. In other folders, every file that a reader knows is read, and the
results are combined; `facts["sources"]` lists the files. If a file is damaged, only its content is
lost, and a note says so.
"""

from __future__ import annotations

import os
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
from homeostat.observe.jsonl import shown_numbers

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
    notes: list[str] = []
    found = _found(path / "metrics.jsonl", notes)
    console = _found(path / "console.log", notes)
    if found is None:
        # Where its records cannot be read, what was shown of them is better than nothing.
        found = (console if notes else None) or Found()
    elif found.log.lines:
        # All its lines are records: what was kept as text is damaged, or just being written.
        whole = found.reading.num_lines - _is_being_written(path / "metrics.jsonl")
        damaged = [line.number for line in found.log.lines if line.number <= whole]
        _note_damaged(path / "metrics.jsonl", damaged, notes)
    found.settings = {}
    found.events = list(_events(path / "events.jsonl", notes))
    found.samples = list(_samples(path / "completions", notes))
    _add_log(found, path, console, notes)
    files = ("config.json", "metrics.jsonl", "events.jsonl", "console.log", "traceback.txt")
    found.sources = [str(path / name) for name in files if (path / name).is_file()]
    totals = [event.fields.get("total_steps") for event in found.events if event.kind == "training"]
    found.total_steps = totals[-1] if totals and type(totals[-1]) is int else None
    found.reading += Reading(notes=tuple(notes))
    kind = _kind(settings)
    return view_of(found, config=settings, framework=HOMEOSTAT, kind=kind, names=names)


def _found(file: Path, notes: list[str]) -> Found | None:
    """Read a file of the folder; None without one. One that cannot be read gets a note."""
    if not os.path.lexists(file):
        return None
    if file.is_dir():
        notes.append(f"{file}: is a folder, so nothing of it was read.")
        return None
    try:
        return found_in_file(file)
    except DataError as error:
        # Its second sentence says what to give the doctor instead.
        why = str(error).removeprefix(f"{file}: ").partition(". ")[0].rstrip(".")
        notes.append(f"{file}: {why}; the rest of the run was read.")
        return None


def _is_being_written(file: Path) -> bool:
    """Return whether the last line of a file has no end yet."""
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def _note_damaged(file: Path, numbers: Sequence[int], notes: list[str]) -> None:
    if numbers:
        shown = shown_numbers(numbers)
        notes.append(f"{file}: lines that cannot be read were passed over: {shown}.")


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


def _events(path: Path, notes: list[str]) -> Iterator[Event]:
    """Yield the complete lines of the event log as events, as far as they can be read."""
    damaged: list[int] = []
    try:
        with path.open("rb") as file:
            for number in range(1, _MAX_EVENTS + 1):
                line = file.readline(_MAX_LINE)
                if not line:
                    break
                event = _event(line)
                if event is not None:
                    yield event
                elif line.endswith(b"\n"):
                    damaged.append(number)
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path}: cannot be read: {error.strerror}; the rest of the run was read.")
    _note_damaged(path, damaged, notes)


def _event(line: bytes) -> Event | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return None
    step = record.get("step")
    rest = {name: value for name, value in record.items() if name not in {"kind", "step"}}
    return Event(record["kind"], step if type(step) is int else None, rest)


def _samples(folder: Path, notes: list[str]) -> Iterator[SampleText]:
    """Yield completions of the first step that has any, and of the newest steps."""
    if not folder.is_dir():
        return
    # Reading Parquet needs a large import, so do it only if there is something to read.
    from homeostat.observe.completions import completion_steps, read_completions

    try:
        steps = completion_steps(folder)
    except RunDirError as error:
        notes.append(str(error))
        return
    for step in dict.fromkeys([*steps[:1], *steps[1:][1 - _MAX_STEP_FILES :]]):
        try:
            rows = read_completions(folder, step)
        except RunDirError as error:
            notes.append(str(error))
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


def _add_log(found: Found, path: Path, console: Found | None, notes: list[str]) -> None:
    """Add the console log and, if the run ended with an error, its traceback after it.

    The metrics in the console log are not added, because metrics.jsonl has them.
    """
    lines = _lines_of(console)
    ends = [event for event in found.events if event.kind in _ENDS]
    # If the run was resumed, the traceback of the earlier attempt says nothing about its state now.
    if not ends or ends[-1].kind == "run_failed":
        start = lines[-1].number if lines else 0
        step = ends[-1].step if ends else None
        lines += [
            LogLine(start + line.number, line.text, step)
            for line in _lines_of(_found(path / "traceback.txt", notes))
        ]
    found.log = Log(lines)


def _lines_of(found: Found | None) -> list[LogLine]:
    return [] if found is None else list(found.log.lines)
