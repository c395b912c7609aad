"""Compare a list of known settings with sources: which still exist, which moved, which vanished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from homeostat.cli.known_settings.places import OWNED_BY, Sources
from homeostat.health.frameworks.known import Known, Source


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one source of a list.

    `held` are settings that stand where the list says. `moved` maps a setting -> the place that
    defines it now; a setting that had no place yet counts as moved. `vanished` are found nowhere.
    If no file of the source was there, nothing was compared and `is_compared` is False.
    """

    source: Source
    held: tuple[str, ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict)
    vanished: tuple[str, ...] = ()
    is_compared: bool = True


def check(facts: Known, folders: Mapping[str, Sequence[Path]]) -> list[Checked]:
    """Compare the list with folders by repository; "" has those that may hold any of them.

    A setting that has no place yet is looked for in every source; the likeliest place is taken.
    """
    there = [
        Sources(folders.get(source.repository) or folders.get("", ())) for source in facts.sources
    ]
    is_there = [
        source.repository in folders or any(map(found.file, _paths(source)))
        for source, found in zip(facts.sources, there, strict=True)
    ]
    results = [
        _compare(source, found) if compared else Checked(source, is_compared=False)
        for source, found, compared in zip(facts.sources, there, is_there, strict=True)
    ]
    new = _new_places(unplaced(facts), [
        (source, found)
        for source, found, compared in zip(facts.sources, there, is_there, strict=True)
        if compared
    ])  # fmt: skip
    return [
        replace(one, moved={**one.moved, **new.get(one.source.repository, {})}) for one in results
    ]


def unplaced(facts: Known) -> list[str]:
    """Return the settings for which the list names no place."""
    placed = {name for source in facts.sources for names in source.found.values() for name in names}
    return [name for name in facts.settings or {} if name not in placed]


def own_name(setting: str, source: Source) -> str:
    """Return a setting's name in its source, without the prefix that a user writes."""
    return f"--{setting.removeprefix(source.prefix)}" if source.prefix else setting


def updated(facts: Known, results: Iterable[Checked]) -> Known:
    """Return the list with the places that were found; what vanished keeps its old one."""
    by_repository = {one.source.repository: one for one in results}
    sources = tuple(_replaced(one, by_repository.get(one.repository)) for one in facts.sources)
    return replace(facts, sources=sources)


def _compare(source: Source, there: Sources) -> Checked:
    pairs = [(name, place) for place, names in source.found.items() for name in names]
    held = tuple(name for name, place in pairs if there.has(own_name(name, source), place))
    lost = {name: own_name(name, source) for name, _ in pairs if name not in held}
    places = there.search(lost.values()) if lost else {}
    moved = {name: places[own][0][1] for name, own in lost.items() if places[own]}
    return Checked(source, held, moved, tuple(name for name in lost if name not in moved))


def _new_places(
    names: Sequence[str], sources: Sequence[tuple[Source, Sources]]
) -> dict[str, dict[str, str]]:
    """Return repository -> setting -> place for settings that had none."""
    best: dict[str, tuple[float, str, str]] = {}
    for source, there in sources:
        asked = {name: own_name(name, source) for name in names if name.startswith(source.prefix)}
        places = there.search(asked.values()) if asked else {}
        for name, own in asked.items():
            score, place = next(iter(places[own]), (0.0, ""))
            if place and (name not in best or score > best[name][0]):
                best[name] = (score, source.repository, place)
    found: dict[str, dict[str, str]] = {}
    for name, (_, repository, place) in best.items():
        found.setdefault(repository, {})[name] = place
    return found


def _replaced(source: Source, result: Checked | None) -> Source:
    if result is None:
        return source
    found: dict[str, set[str]] = {}
    for place, names in source.found.items():
        for name in names:
            found.setdefault(result.moved.get(name, place), set()).add(name)
    for name, place in result.moved.items():
        found.setdefault(place, set()).add(name)
    return replace(source, found={place: tuple(sorted(names)) for place, names in found.items()})


def _paths(source: Source) -> list[str]:
    return [place.partition(OWNED_BY)[0] for place in source.found]
