"""Combine the results of the format readers into one RunView, under our names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import stat
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from homeostat.health.frameworks import ALL, HOMEOSTAT, Framework
from homeostat.health.log import Log
from homeostat.health.names import FOREIGN, unprefixed
from homeostat.health.readers.values.common_names import METRICS, folded
from homeostat.health.readers.values.metric_words import meaning_of
from homeostat.health.readers.values.settings import flat, ours
from homeostat.health.readers.views.derived import derive
from homeostat.health.readers.views.detect import framework_of, kind_of
from homeostat.health.reading import Reading
from homeostat.health.view import Event, Kind, RunView, SampleText, Series
from homeostat.observe.names import describe

# HF's trainer rounds the loss to this many decimals, and prints a loss that is not finite as 0.
_LOSS_DECIMALS = 4
_HF_FORMS = {"dict", "swift", "llamafactory"}


# Files that are written as a whole with each checkpoint, so later records are missing in them.
_STATES = frozenset({"trainer_state.json"})


@dataclass(slots=True)
class Found:
    """The content of a file, under the names used there.

    The contents of several files can be combined into one view.
    """

    series: dict[str, Series] = field(default_factory=dict)
    forms: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    events: list[Event] = field(default_factory=list)
    samples: list[SampleText] = field(default_factory=list)
    decimals: dict[str, int] = field(default_factory=dict)
    total_steps: int | None = None
    runs: list[tuple[str, Mapping[str, Series], Mapping[str, Any]]] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    # Names of the files in a folder that were read as one run.
    joined: list[str] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    # Rows without any known name, by the log's names. Used only if there are no other rows.
    unknown: dict[str, Series] = field(default_factory=dict)
    # Count and total of the progress bar with which the text ends.
    open_bar: tuple[int, int] | None = None


def view_of(
    found: Found,
    *,
    config: Mapping[str, Any] | None = None,
    framework: Framework | None = None,
    kind: Kind | None = None,
    names: Mapping[str, str] | None = None,
) -> RunView:
    """Build one view of a run. `config` are settings that the user gave; they take precedence.

    `names` maps the log's names of metrics to ours, as the user gave them.
    """
    given = dict(names or {})
    if not given.keys().isdisjoint(found.unknown):
        found.series = {**found.unknown, **found.series}
    raw = {**found.settings, **flat(config or {})}
    table = framework or framework_of(
        names=found.series.keys(), log=found.log, forms=found.forms, settings=raw
    )
    renamed = translation(_counts(found.series), table, given=given)
    metrics = _renamed(found.series, renamed, table, given=given)
    derive(metrics)
    if table is HOMEOSTAT:
        # The timestamp of a record is not a metric.
        metrics.pop("time", None)
    settings = raw if table is HOMEOSTAT else ours(raw, table)
    facts = _facts(found, table, given=given)
    decimals = {renamed[name]: count for name, count in found.decimals.items() if name in renamed}
    if _HF_FORMS & found.forms.keys() and "loss" in found.series and table is not HOMEOSTAT:
        facts["nan_prints_as_zero"] = True
        if _is_rounded(found.series["loss"]):
            decimals[renamed["loss"]] = _LOSS_DECIMALS
    return RunView(
        metrics=metrics,
        framework=table,
        kind=kind
        or kind_of({*metrics, *found.series}, {**raw, **settings}, log=found.log, framework=table),
        settings=settings,
        raw_settings=raw,
        events=tuple(found.events),
        log=found.log,
        samples=tuple(found.samples),
        facts=facts,
        total_steps=found.total_steps,
        decimals=decimals,
    )


def _facts(found: Found, table: Framework, *, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts about the files and the text: everything but metrics and settings."""
    facts: dict[str, Any] = {
        "sources": tuple(found.sources),
        "joined": tuple(found.joined),
        "nan_prints_as_zero": False,
        "reading": _understood(found, table, given=given),
    }
    logs = [source for source in found.sources if os.path.basename(source) not in _STATES]
    facts["is_saved_state"] = bool(found.sources) and not logs
    quiet_s = _quiet_s(logs)
    if quiet_s is not None:
        facts["quiet_s"] = quiet_s
    if found.runs:
        facts["runs"] = tuple(
            {
                "label": label,
                "metrics": _renamed(
                    series, translation(_counts(series), table, given=given), table, given=given
                ),
                "settings": ours(settings, table),
            }
            for label, series, settings in found.runs
        )
    if found.open_bar is not None:
        facts["open_bar"] = found.open_bar
    if found.summary:
        facts["summary"] = dict(found.summary)
    return facts


def _quiet_s(sources: Collection[str]) -> float | None:
    """Return the seconds since the newest file was written; None for a stream or pasted text."""
    newest = 0.0
    for source in sources:
        with contextlib.suppress(OSError, ValueError):
            state = os.stat(source)
            newest = max(newest, state.st_mtime if stat.S_ISREG(state.st_mode) else 0.0)
    return max(0.0, time.time() - newest) if newest else None


def _understood(found: Found, table: Framework, *, given: Mapping[str, str]) -> Reading:
    """Return the reading, with the number of metrics that have our name and the list of others."""
    unknown = tuple(
        sorted(n for n in found.series if n not in given and _our_name(n, table) is None)
    )
    reading = dataclasses.replace(
        found.reading,
        num_rows=sum(found.forms.values()),
        num_known=len(found.series) - len(unknown),
        unknown_metrics=unknown,
    )
    if not found.series and found.unknown:
        most = max(map(len, found.unknown.values()))
        named = sorted(found.unknown, key=lambda name: -len(found.unknown[name]))
        reading = dataclasses.replace(reading, num_unnamed=most, unnamed_metrics=tuple(named))
    notes = [_not_logged(name, given[name], found) for name in given if name not in found.series]
    return dataclasses.replace(reading, notes=(*reading.notes, *notes))


def _not_logged(name: str, ours_: str, found: Found) -> str:
    logged = [*found.series, *(found.unknown if not found.series else ())]
    near = difflib.get_close_matches(name, logged, n=3) or sorted(logged)[:12]
    there = f"Logged are, for example: {', '.join(near)}." if near else "No metric is logged."
    return f"--map {name}={ours_} has no effect: the run logs no metric of that name. {there}"


def _counts(series: Mapping[str, Series]) -> dict[str, int]:
    return {name: len(one) for name, one in series.items()}


def translation(
    counts: Mapping[str, int], table: Framework, *, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return their name -> ours; an unknown name maps to itself. No two names map to the same one.

    `counts` has the number of records of each name. The names `given` by the user take precedence
    over those from tables and from the wording.
    """
    rank = {name: place for place, name in enumerate(table.metrics)}
    for name in counts:
        # A name with a prefix comes after the same metric without it, if both were logged.
        if unprefixed(name) != name and name not in rank:
            rank[name] = len(table.metrics) + 1
    result = {name: ours_ for name, ours_ in (given or {}).items() if name in counts}
    taken = {ours_: name for name, ours_ in result.items()}
    known = {name: (rank.get(name, len(table.metrics)), _our_name(name, table)) for name in counts}

    def place(item: tuple[str, tuple[int, str | None]]) -> tuple[int, int, int]:
        # A name that many frameworks share comes before one that only another framework has, and
        # what was logged often before what was logged beside it now and then.
        return item[1][0], _rank(item[0]), -counts[item[0]]

    for name, (_, canonical) in sorted(known.items(), key=place):
        if name not in result and canonical is not None and canonical not in taken:
            taken[canonical] = name
            result[name] = canonical
    for name in known:
        if name not in result:
            # If another metric already has this name, make it distinct.
            result[name] = name if name not in taken else f"raw/{name}"
    return result


def _rank(name: str) -> int:
    """Return how sure a shared name is, the surest first; names of other frameworks come last."""
    if folded(name) in METRICS:
        return 0
    meaning = meaning_of(name)
    return meaning.rank if meaning is not None else 3


def _our_name(name: str, table: Framework) -> str | None:
    if name in table.metrics:
        return table.metrics[name]
    for pattern, target in _patterns(table.name):
        found = pattern.fullmatch(name)
        if found:
            before, hole, after = target.partition("<")
            return before + found[1] + after.partition(">")[2] if hole else target
    if describe(name) is not None or name in FOREIGN:
        return name
    if table is HOMEOSTAT:
        return None
    found = METRICS.get(folded(name)) or _others().get(name)
    meaning = meaning_of(name)
    if found is None and meaning is not None:
        found = meaning.name
    bare = unprefixed(name)
    # An unknown name may be a known name with a tracker's prefix.
    return found or (_our_name(bare, table) if bare != name else None)


@lru_cache(maxsize=64)
def _patterns(framework: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return entries with a placeholder, such as "reward/<name>", as (pattern, our name)."""
    table = ALL.get(framework)
    found = []
    for name, target in table.metrics.items() if table else ():
        if "<" in name:
            before, _, after = re.sub(r"<(?:name|i)>", "\0", name, count=1).partition("\0")
            found.append((re.compile(f"{re.escape(before)}(.+?){re.escape(after)}"), target))
    return tuple(found)


@lru_cache(maxsize=1)
def _others() -> dict[str, str]:
    """Return their name -> ours, for all names that mean the same in every framework."""
    meanings: dict[str, set[str]] = {}
    for table in ALL.values():
        for name, target in table.metrics.items():
            meanings.setdefault(name, set()).add(target)
    return {name: min(found) for name, found in meanings.items() if len(found) == 1}


def _renamed(
    series: Mapping[str, Series],
    names: Mapping[str, str],
    table: Framework,
    *,
    given: Mapping[str, str],
) -> dict[str, Series]:
    found = {}
    for name, one in series.items():
        canonical = names[name]
        # Do not scale what the user maps: the framework's units apply only to its own names.
        is_theirs = canonical != name and name not in given
        scale = table.scales.get(canonical, 1.0) if is_theirs else 1.0
        with np.errstate(over="ignore"):
            values = one.values if scale == 1.0 else one.values * scale
        found[canonical] = Series(one.steps, values)
    return found


def _is_rounded(series: Series) -> bool:
    values = series.values[-1_000:]
    # Larger floats have no decimals left, and rounding them would overflow.
    values = values[np.abs(values) < 1e12]
    return bool(len(values)) and bool(
        np.all(np.abs(values - np.round(values, _LOSS_DECIMALS)) < 1e-9 * (1 + np.abs(values)))
    )
