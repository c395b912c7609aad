"""Read, print and write for `homeostat dev check-settings`."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from homeostat.cli.known_settings.checking import Checked, check, unplaced, updated
from homeostat.cli.known_settings.files import file_text
from homeostat.errors import HomeostatError
from homeostat.health.frameworks import known as known_module
from homeostat.health.frameworks.known import Known, known

LISTS = Path("src") / "homeostat" / "health" / "frameworks" / "known"
_OWN = "homeostat"
_ANY = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison of one list: what is printed, and the list with the places found."""

    name: str
    results: tuple[Checked, ...]
    facts: Known
    lines: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        """Return whether a setting vanished, or has no place in any source."""
        return bool(unplaced(self.facts)) or any(one.vanished for one in self.results)


def chosen(names: Sequence[str]) -> list[str]:
    """Return the lists to compare; all that have sources if none is named."""
    folder = Path(known_module.__file__).with_suffix("")
    there = sorted(path.stem for path in folder.glob("*.toml") if path.stem != _OWN)
    if odd := [name for name in names if name not in there]:
        raise HomeostatError(
            f"there is no list of settings of {', '.join(odd)}. Name one of {', '.join(there)}."
        )
    return list(names) or there


def folders(given: Sequence[str]) -> dict[str, list[Path]]:
    """Return repository -> folders; "" has folders that may hold any of them."""
    found: dict[str, list[Path]] = {}
    for text in given:
        repository, _, folder = text.rpartition("=")
        path = Path(folder)
        if not path.is_dir():
            raise HomeostatError(
                f"--source {text}: {folder} is not a folder. Give a checkout, or a folder with "
                "installed packages such as .venv/lib/python3.11/site-packages."
            )
        found.setdefault(repository, []).append(path)
    return found or {_ANY: [Path(sysconfig.get_path("purelib"))]}


def report(name: str, given: Mapping[str, Sequence[Path]]) -> Report:
    """Compare a list with its sources."""
    facts = known(name)
    results = tuple(check(facts, given))
    new = updated(facts, results)
    return Report(name, results, new, tuple(_lines(name, results, new)))


def write(root: Path, one: Report) -> None:
    """Write a list with the places that were found; one that nothing was compared for stays."""
    if any(result.is_compared for result in one.results):
        path = root / LISTS / f"{one.name}.toml"
        path.write_text(file_text(one.facts), encoding="utf-8")


def summary(reports: Sequence[Report]) -> str:
    """Return the last line: counts over all lists."""
    results = [result for one in reports for result in one.results if result.is_compared]
    held = sum(len(one.held) for one in results)
    moved = sum(len(one.moved) for one in results)
    vanished = sum(len(one.vanished) for one in results)
    return f"{held} stand where the lists say, {moved} elsewhere, {vanished} vanished."


def _lines(name: str, results: Sequence[Checked], facts: Known) -> Iterator[str]:
    for one in results:
        title = f"{name}: {one.source.repository}"
        if not one.is_compared:
            yield f"{title}: not compared, none of its files is here"
            continue
        yield f"{title}: {len(one.held)} stand where the list says"
        yield from (f"  moved     {setting} -> {place}" for setting, place in one.moved.items())
        yield from (f"  vanished  {setting}" for setting in one.vanished)
    yield from (f"  no place  {setting}" for setting in unplaced(facts))
