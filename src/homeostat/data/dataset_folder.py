"""Choose the files of a dataset's folder that belong to a configuration and a split.

    README.md says it (`configs:` in its header)   -> its patterns
    names say it (train-00000-of-00002.parquet,    -> files by split; the folder `config/` is a
        data/test.jsonl, main/train/0000.parquet)     configuration
    neither                                        -> all files are the split train

The rules are those that datasets on the Hugging Face hub follow, so the same folder works from the
hub and from a disk. Only names are looked at; nothing is opened.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from homeostat.errors import DataError

README = "README.md"
ROW_FILES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
PACKED_FILES = (".gz", ".zst")
# Files with a readable suffix that hold no rows.
_NOT_ROWS = {
    "dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json",
}  # fmt: skip
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(?:.*/)?([\w.]+?)-\d{5}-of-\d{5}[^/]*")
_NUMBERED = re.compile(r"(?:.*/)?(?:partial-)?([\w.]+)/\d{4}\.parquet")
MAX_README_BYTES = 10_000_000
MAX_FILES = 100_000


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files of one split, in the order of their rows."""

    split: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Declared:
    """A configuration in the header of README.md. `files`: split -> patterns, None: by names."""

    name: str
    is_default: bool
    folder: str
    files: Mapping[str, tuple[str, ...]] | None


def choose_files(
    names: Sequence[str],
    readme: str | None,
    *,
    config: str | None,
    split: str | None,
    place: str,
    default: str | None = None,
) -> Chosen:
    """Return the files of a split. `names` are relative to the folder, with slashes.

    Without `split` it is `default` if there is such a split, or else the only one. Raises
    DataError, which says which configurations or splits there are; `place` names the dataset.
    """
    rows = sorted(name for name in names if is_row_file(name))
    if not rows:
        shown = ", ".join(sorted(names)[:8]) or "none"
        raise DataError(
            f"{place}: no file of a known kind ({', '.join(ROW_FILES)}, also with .gz or .zst). "
            f"Its files: {shown}."
        )
    declared = _declared(readme, place=place) if readme else []
    if declared:
        one = _pick_config(declared, config, place=place)
        inside = [name for name in rows if name.startswith(one.folder)]
        splits = _by_pattern(inside, one) if one.files is not None else _by_name(inside)
        place = place if one.name == "default" else f"{place} ({one.name})"
    else:
        inside = rows if config is None else _below(rows, config, place=place)
        splits = _by_name(inside)
    return _pick_split(splits, split, default=default, place=place)


def is_row_file(name: str) -> bool:
    """Return whether a file's name says that it holds rows which can be read."""
    path = PurePosixPath(name)
    if path.name in _NOT_ROWS or any(part.startswith((".", "__")) for part in path.parts):
        return False
    return suffix_of(name) in ROW_FILES


def suffix_of(name: str) -> str:
    """Return the suffix that says what a file holds, below that of its compression."""
    lower = name.lower()
    for packed in PACKED_FILES:
        lower = lower.removesuffix(packed)
    return PurePosixPath(lower).suffix


def packing_of(name: str) -> str | None:
    """Return the suffix of a file's compression, if it has one."""
    suffix = PurePosixPath(name.lower()).suffix
    return suffix if suffix in PACKED_FILES else None


def read_readme(folder: Path) -> str | None:
    """Return the text of a folder's README.md, if it has one."""
    file = folder / README
    try:
        if not file.is_file() or file.stat().st_size > MAX_README_BYTES:
            return None
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from None


def files_below(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its subfolders."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    names = list(itertools.islice(found, MAX_FILES + 1))
    if len(names) > MAX_FILES:
        raise DataError(
            f"{folder}: more than {MAX_FILES} files, which is too many for the folder of a dataset."
        )
    return names


def _declared(readme: str, *, place: str) -> list[_Declared]:
    """Return the configurations in a README's header."""
    _, _, rest = readme.partition("---\n") if readme.startswith("---\n") else ("", "", "")
    header, end, _ = rest.partition("\n---")
    if not end:
        return []
    try:
        values = yaml.safe_load(header)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{place}: the header of {README} cannot be read: {reason}.") from None
    configs = values.get("configs") if isinstance(values, dict) else None
    found = configs if isinstance(configs, list) else []
    return [_one_config(one, place=place) for one in found if isinstance(one, dict)]


def _one_config(values: dict[str, Any], *, place: str) -> _Declared:
    name, folder = values.get("config_name", "default"), values.get("data_dir", "")
    if not isinstance(name, str) or not isinstance(folder, str):
        raise DataError(
            f"{place}: a configuration in the header of {README} has a name that is not plain text."
        )
    folder = folder.removeprefix("./").strip("/")
    files = dict(_patterns(values["data_files"])) if values.get("data_files") else None
    prefix = f"{folder}/" if folder not in ("", ".") else ""
    return _Declared(name, values.get("default") is True, prefix, files)


def _patterns(data_files: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (split, patterns): a text, a list of texts, or a list of {split, path}."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    plain = tuple(entry for entry in entries if isinstance(entry, str))
    if plain:
        yield "train", plain
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("split"), str):
            path = entry.get("path")
            paths = path if isinstance(path, list) else [path]
            yield entry["split"], tuple(one for one in paths if isinstance(one, str))


def _pick_config(declared: list[_Declared], config: str | None, *, place: str) -> _Declared:
    names = [one.name for one in declared]
    fitting = [one for one in declared if one.name == config]
    if config is None:
        fitting = [one for one in declared if one.is_default or one.name == "default"]
        fitting = fitting or (declared if len(declared) == 1 else [])
    if fitting:
        return fitting[0]
    shown = ", ".join(names[:20])
    if config is None:
        raise DataError(f"{place}: it has several configurations. Set config to one of: {shown}.")
    raise DataError(f"{place}: no configuration is named {config!r}. There are: {shown}.")


def _by_pattern(names: list[str], declared: _Declared) -> dict[str, list[str]]:
    found = {}
    for split, patterns in (declared.files or {}).items():
        whole = [
            re.compile(_as_regex(declared.folder + one.removeprefix("./"))) for one in patterns
        ]
        found[split] = [name for name in names if any(one.fullmatch(name) for one in whole)]
    return found


def _as_regex(pattern: str) -> str:
    """Return the regular expression of a glob: * and ? stay inside a folder, ** does not."""
    out = re.escape(pattern)
    out = out.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*")
    return out.replace(r"\*", "[^/]*").replace(r"\?", "[^/]")


def _below(names: list[str], config: str, *, place: str) -> list[str]:
    inside = [name for name in names if name.startswith(f"{config}/")]
    if not inside:
        folders = sorted({name.partition("/")[0] for name in names if "/" in name})
        there = f"There are: {', '.join(folders[:20])}." if folders else "It has no configurations."
        raise DataError(f"{place}: no configuration is named {config!r}. {there}")
    return inside


def _by_name(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        split = _split_of(name)
        if split is not None:
            found.setdefault(split, []).append(name)
    return found or {"train": names}


def _without_copies(names: Sequence[str]) -> tuple[str, ...]:
    """Keep one of several files that differ only in their format: train.jsonl, train.parquet."""
    best: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"(?:\.gz|\.zst)$", "", name.lower()).removesuffix(suffix_of(name))
        other = best.setdefault(stem, name)
        best[stem] = min(name, other, key=lambda one: ROW_FILES.index(suffix_of(one)))
    kept = set(best.values())
    return tuple(name for name in names if name in kept)


def _split_of(name: str) -> str | None:
    """Return the split that a file's name, or a folder in it, says."""
    shard = _SHARD.fullmatch(name) or _NUMBERED.fullmatch(name)
    if shard is not None:
        return _WORDS.get(shard[1].lower(), shard[1])
    *folders, file = name.lower().split("/")
    # A folder decides before the name of a file in it: train/unit_test_code.jsonl is for training.
    words = [word for part in (*reversed(folders), file) for word in re.split(r"\W|_|\d", part)]
    return next((_WORDS[word] for word in words if word in _WORDS), None)


def _pick_split(
    splits: dict[str, list[str]], split: str | None, *, default: str | None, place: str
) -> Chosen:
    there = [name for name, files in splits.items() if files]
    wanted = split or (default if default in there else None)
    if wanted is None and len(there) == 1 and default in (None, "train"):
        wanted = there[0]
    if wanted in there:
        return Chosen(str(wanted), _without_copies(splits[str(wanted)]))
    shown = ", ".join(there[:20]) or "none"
    if wanted is None:
        raise DataError(f"{place}: set split to one of: {shown}.")
    raise DataError(f"{place}: no split is named {wanted!r}. There are: {shown}.")
