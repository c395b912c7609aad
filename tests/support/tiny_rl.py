"""A tiny real RL run: a model folder, prompts, and a recipe that takes a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support.tiny import ASSETS

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6}


def write_model(folder: Path, **changes: Any) -> Path:
    """The tiny-sort folder at a size that samples and trains in milliseconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (ASSETS / "tiny-sort").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SMALL, **changes}))
    return folder


def write_prompts(file: Path, *, num_rows: int = 24, seed: int = 0) -> Path:
    """Digits to sort, with the answer, its first digit and a number of no use."""
    rng = random.Random(seed)
    rows = []
    for index in range(num_rows):
        digits = "".join(rng.choices("0123456789", k=rng.randint(2, 5)))
        answer = "".join(sorted(digits))
        rows.append(
            json.dumps({"prompt": f"{digits}>", "answer": answer, "first": answer[0], "n": index})
        )
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    """A raw recipe over a fresh tiny model and prompts; sections are merged one level deep.

    The reward is one that random weights meet now and then: the completion holds the smallest
    digit.
    """
    model, prompts = folder / "model", folder / "prompts.jsonl"
    if not model.exists():
        write_model(model)
    if not prompts.exists():
        write_prompts(prompts)
    raw: dict[str, Any] = {
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "algorithm": {"type": "grpo"},
        "model": {"path": str(model), "init": "random"},
        "data": {
            "train": [{"type": "prompts", "path": str(prompts), "chat": False}],
            "max_length": 16,
        },
        "rollout": ROLLOUT,
        "rewards": {
            "functions": [{"type": "exact_match", "column": "first", "extract": "[0-9]"}],
        },
        "trainer": {
            "max_steps": 4,
            "updates_per_step": 2,
            "max_tokens_per_device": 128,
            "lr": 1e-2,
            "threads": 1,
            "device": "cpu",
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
