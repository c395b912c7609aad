"""Answer what the page asks for, as plain values for JSON. Secrets are removed from all texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from homeostat.dashboard.curves import decimated, within
from homeostat.dashboard.samples import Wanted, page_of
from homeostat.dashboard.shelf import Shelf, ShelfRun
from homeostat.errors import HomeostatError, RunDirError
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers.values.settings import flat
from homeostat.health.view import RunView, Series
from homeostat.observe.completions import completion_steps
from homeostat.observe.redact import Scrubber

MAX_CURVES = 400
MAX_POINTS = 4000


def list_runs(shelf: Shelf) -> list[dict[str, Any]]:
    """Return the runs without reading them, so that the list is there at once."""
    return [_named(run) for run in shelf.runs()]


def describe(shelf: Shelf, id: str) -> dict[str, Any]:
    """Return what a run holds: its metrics and settings. This is there before it is judged."""
    run, loaded = shelf.run(id), shelf.load(id)
    view = loaded.view
    found = {
        **_named(run),
        "version": list(loaded.version),
        "kind": view.kind.value,
        "last_step": view.last_step,
        "total_steps": view.total_steps,
        "metrics": sorted(name for name, series in view.metrics.items() if len(series)),
        "framework": view.framework.name,
        "settings": _settings(view),
        "completion_steps": _completion_steps(run, view),
        "latest": _latest(view),
    }
    return Scrubber().tree(_plain(found))


def judge(shelf: Shelf, id: str) -> dict[str, Any]:
    """Return the doctor's answer about a run."""
    loaded = shelf.load(id)
    return Scrubber().tree(_plain(as_json(loaded.diagnosis, loaded.view)))


def curves(
    shelf: Shelf,
    ids: Sequence[str],
    names: Sequence[str],
    *,
    first: float | None,
    last: float | None,
    max_points: int,
) -> dict[str, dict[str, list[Any]]]:
    """Return metric -> run -> [steps, values], between two steps, as few points as a plot shows."""
    if len(ids) * len(names) > MAX_CURVES:
        raise HomeostatError(f"{len(ids)} runs x {len(names)} metrics are more than {MAX_CURVES}.")
    views = {id: shelf.load(id).view for id in ids}
    most = min(max(10, max_points), MAX_POINTS)
    found: dict[str, dict[str, list[Any]]] = {}
    for name in names:
        for id, view in views.items():
            series = view.metrics.get(name)
            if series is not None and len(series):
                part = decimated(within(series, first=first, last=last), max_points=most)
                found.setdefault(name, {})[id] = _points(part)
    return found


def completions(shelf: Shelf, id: str, wanted: Wanted) -> dict[str, Any]:
    """Return a page of the completions of a run."""
    run, view = shelf.run(id), shelf.load(id).view
    return Scrubber().tree(_plain(page_of(run.place.path, view, wanted)))


def differences(shelf: Shelf, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings in which runs differ, each with its value in every run."""
    settings = [_settings(shelf.load(id).view) for id in ids]
    keys = sorted({key for one in settings for key in one})
    rows = [{"key": key, "values": [one.get(key) for one in settings]} for key in keys]
    found = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    return Scrubber().tree(_plain(found))


def _named(run: ShelfRun) -> dict[str, Any]:
    total, newest = run.version()
    return {
        "id": run.id,
        "name": run.name,
        "path": run.place.name,
        "modified": newest / 1e9,
        "bytes": total,
    }


def _settings(view: RunView) -> dict[str, Any]:
    """Return the run's settings under the names that its framework has for them."""
    return flat(view.raw_settings or view.settings)


def _completion_steps(run: ShelfRun, view: RunView) -> list[int]:
    try:
        ours = completion_steps(run.place.path / "completions")
    except RunDirError:
        # The page of completions says why; the rest of the run can be shown.
        ours = []
    return ours or sorted({one.step for one in view.samples if one.step is not None})


def _latest(view: RunView) -> dict[str, float]:
    names = ("reward", "train/loss", "eval/loss", "entropy", "throughput/tokens_per_s", "time/step")
    found = {name: view.latest(name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _points(series: Series) -> list[Any]:
    values = [value if math.isfinite(value) else None for value in series.values.tolist()]
    return [series.steps.tolist(), values]


def _plain(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by texts, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
