"""Damage to bytes, JSON trees and files: the tools that fuzz_kinds makes its cases with."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from fuzz_values import HOSTILE


@dataclass(slots=True)
class World:
    """A case being made: its folder and random numbers, and what comes out."""

    folder: Path
    rng: random.Random
    recipe: dict[str, Any]
    what: str = ""
    verb: str = "check"
    arguments: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def hostile(self) -> Any:
        """A value that nobody meant. A message about a path names the path."""
        value = self.rng.choice(HOSTILE)
        if isinstance(value, str) and len(value) > 2 and value.isprintable():
            # Of a path outside the folder `check` shows the last part only.
            self.places += (value[:30], PurePath(value).name[:30] or value)
        elif isinstance(value, str):
            self.places += (repr(value),)
        elif isinstance(value, float) and not math.isfinite(value):
            # YAML reads JSON's word for it as text, so that it may be a path.
            self.places += (json.dumps(value),)
        return value

    def write_recipe(self) -> None:
        (self.folder / "recipe.yaml").write_text(to_json(self.recipe), encoding="utf-8")


def base_recipe() -> dict[str, Any]:
    return {
        "name": "run",
        "model": {"path": "model", "init": "random"},
        "data": {"train": [{"type": "messages", "path": "rows.jsonl"}], "max_length": 128},
        "trainer": {
            "max_steps": 2, "batch_rows": 4, "max_tokens_per_device": 256, "threads": 1, "lr": 1e-3,
            "schedule": {"type": "linear", "warmup_steps": 1},
        },
        "checkpoint": {"interval_steps": 1, "export": "off"},
        "observe": {"console": "quiet"},
    }  # fmt: skip


def to_json(value: Any) -> str:
    """JSON is YAML too. Surrogates stay escapes, so that the file itself is sound UTF-8."""
    return json.dumps(value, indent=1)


def damage_bytes(world: World, data: bytes) -> bytes:
    """Flip, delete, insert, double, cut or swap a few bytes or a line."""
    how = world.pick("flip", "delete", "insert", "double", "cut", "lines", "zero")
    at = world.rng.randrange(len(data) + 1)
    size = world.pick(1, 2, 7, 40)
    world.what += f"{how} {size} at byte {at}; "
    if how == "flip":
        flipped = bytes(byte ^ world.rng.randrange(1, 256) for byte in data[at : at + size])
        return data[:at] + flipped + data[at + size :]
    if how == "insert":
        noise = world.pick(b"\0", b"\xff\xfe", b"\t", b"\r\n", b"\xed\xa0\x80", b"{", b'"', b": ")
        return data[:at] + noise * world.pick(1, 1, size) + data[at:]
    if how == "double":
        return data[:at] + data[at : at + size] * 2 + data[at + size :]
    if how == "lines":
        lines = data.splitlines(keepends=True)
        lines.insert(world.rng.randrange(len(lines) + 1), world.rng.choice(lines or [b"\n"]))
        return b"".join(lines)
    if how == "cut":
        return data[:at]
    if how == "zero":
        return data[:at] + bytes(size) + data[at + size :]
    return data[:at] + data[at + size :]


def tree_places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else items
    found = [place] if place else []
    for name, child in items:
        found += tree_places(child, (*place, name))
    return found


def damage_tree(world: World, value: Any, *, place: tuple[Any, ...] | None = None) -> Any:
    """Replace, remove, rename, move or wrap one value of a JSON tree, in place."""
    place = place or world.rng.choice(tree_places(value))
    *path, last = place
    here = value
    for part in path:
        here = here[part]
    how = world.pick("set", "set", "set", "remove", "rename", "move", "wrap")
    new = world.hostile()
    world.what += f"{how} {'.'.join(map(str, place))} (to {new!r:.60}); "
    if how == "set" or isinstance(here, list):
        here[last] = new
    elif how == "wrap":
        here[last] = world.pick([here[last]], {"x": here[last]}, {last: here[last]})
    else:
        moved = here.pop(last)
        if how == "rename":
            here[world.pick(last[1:], last + "s", last.upper(), "", last + "\0", "type")] = moved
        elif how == "move":
            value[last] = moved
    return value


def damage_json(world: World, path: Path) -> None:
    text = to_json(damage_tree(world, json.loads(path.read_bytes())))
    path.write_text(text, encoding="utf-8")


def damage_file(world: World, path: Path) -> None:
    """The bytes of a file, or what stands in its place."""
    how = world.pick("bytes", "bytes", "bytes", "bytes", "empty", "gone", "folder", "link", "pipe")
    world.what += f"{path.name}: {how}; "
    if how == "bytes":
        path.write_bytes(damage_bytes(world, path.read_bytes()))
        return
    path.unlink()
    if how == "empty":
        path.touch()
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(world.pick("nowhere", path.name, "/dev/null"))
    elif how == "pipe":
        os.mkfifo(path)
