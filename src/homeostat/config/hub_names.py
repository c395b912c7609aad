"""Names of models and datasets on the Hugging Face hub, and the folders of its cache.

    Qwen/Qwen2.5-0.5B-Instruct              a repository: owner/name
    Qwen/Qwen2.5-0.5B-GGUF/q4_0.gguf        a file of one: owner/name/path
    <cache>/models--Qwen--Qwen2.5-0.5B/snapshots/<commit>[/path]

The last form is where huggingface_hub keeps what it downloads. It holds the name and the commit,
so a resolved path says which bytes it stands for, on any machine and wherever the cache lies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

RepositoryKind = Literal["model", "dataset"]

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:/(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A name with one of these endings is a file, never a repository.
_FILES = (
    ".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".gz", ".zst", ".arrow", ".gguf",
    ".safetensors", ".bin", ".yaml", ".yml", ".jinja", ".py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, or with `file` one of its files."""

    name: str
    file: str | None = None


@dataclass(frozen=True, slots=True)
class CachedPath:
    """A file or folder in the hub's cache: the repository and the commit that it belongs to."""

    kind: RepositoryKind
    name: str
    commit: str
    file: str


def parse_hub_name(text: str) -> HubName | None:
    """Return the repository that a text names; None if it can only be a path on this disk."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "//" in text:
        return None
    name, file = found.groups()
    if file is None:
        return None if name.lower().endswith(_FILES) else HubName(name)
    return HubName(name, file) if file.lower().endswith(_FILES) else None


def is_hub_name(text: str) -> bool:
    """Return whether a text looks like `owner/name` on the hub, and not like a file or folder."""
    found = parse_hub_name(text)
    return found is not None and found.file is None


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is the hash of a commit, which always names the same bytes."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def cached_path(path: str) -> CachedPath | None:
    """Return what a path in the hub's cache stands for; None for any other path."""
    parts = PurePath(path).parts
    for at in range(1, len(parts) - 1):
        kind, _, rest = parts[at - 1].partition("--")
        owner, _, name = rest.partition("--")
        is_snapshot = parts[at] == "snapshots" and is_commit(parts[at + 1])
        if is_snapshot and kind in ("models", "datasets") and owner and name:
            which: RepositoryKind = "model" if kind == "models" else "dataset"
            file = "/".join(parts[at + 2 :])
            return CachedPath(which, f"{owner}/{name}", parts[at + 1], file)
    return None


def portable(value: Any) -> Any:
    """Replace paths into the cache, at any depth, by what they stand for."""
    if isinstance(value, str):
        found = cached_path(value)
        return value if found is None else f"hub:{found.name}@{found.commit}/{found.file}"
    if isinstance(value, dict):
        return {name: portable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value
