"""A tiny real run: model folder, data file and recipe, shared by tests that train."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config

ASSETS = Path(__file__).resolve().parents[2] / "recipes" / "assets"


def write_model(folder: Path, **changes: Any) -> Path:
    """The tiny-chat folder at a size that trains in milliseconds a step."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (ASSETS / "tiny-chat").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps({**config, **small, **changes}))
    return folder


def write_rows(file: Path, *, num_rows: int = 40, seed: int = 0) -> Path:
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        word = "".join(rng.choices("abcdef", k=rng.randint(1, 12)))
        turns = [("user", f"turn around {word}"), ("assistant", word[::-1])]
        if rng.random() < 0.3:
            turns += [("user", "again"), ("assistant", word)]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    """A raw recipe over a fresh tiny model and data; sections are merged one level deep."""
    model = folder / "model"
    if not model.exists():
        write_model(model)
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows)
    raw: dict[str, Any] = {
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model), "init": "random"},
        "data": {"train": [{"type": "messages", "path": str(rows)}], "max_length": 128},
        "trainer": {
            "max_steps": 6,
            "batch_rows": 8,
            "max_tokens_per_device": 256,
            "lr": 1e-2,
            "threads": 1,
        },
        "checkpoint": {"interval_steps": 2, "export": "off"},
        "observe": {"console": "quiet", "report": False},
    }
    for name, section in sections.items():
        if isinstance(section, dict) and isinstance(raw.get(name), dict):
            raw[name] = {**raw[name], **section}
        else:
            raw[name] = section
    return raw


def config(folder: Path, *overrides: str, **sections: Any) -> RunConfig:
    return build_config(recipe(folder, **sections), list(overrides), file=None)
