"""A tiny real preference run: pairs or labelled rows over the tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support import tiny

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config


def write_pairs(file: Path, *, num_rows: int = 40, seed: int = 0) -> Path:
    """Words to be turned around: the chosen answer does it, the rejected one repeats the word."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        word = "".join(rng.choices("abcdef", k=rng.randint(2, 12))) + "z"
        row = {"prompt": f"turn around {word}", "chosen": word[::-1], "rejected": word}
        rows.append(json.dumps(row))
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def recipe(folder: Path, algorithm: str, **sections: Any) -> dict[str, Any]:
    """A raw recipe over pairs; sections are merged one level deep."""
    rows = folder / "pairs.jsonl"
    if not rows.exists():
        write_pairs(rows)
    data = {"train": [{"type": "preference", "path": str(rows)}], "max_length": 64}
    own = {"algorithm": {"type": algorithm}, "data": data, "trainer": {"lr": 3e-3}}
    for name, section in sections.items():
        is_merged = isinstance(section, dict) and name in own
        own[name] = {**own[name], **section} if is_merged else section
    return tiny.recipe(folder, **own)


def config(folder: Path, algorithm: str, *overrides: str, **sections: Any) -> RunConfig:
    return build_config(recipe(folder, algorithm, **sections), list(overrides), file=None)
