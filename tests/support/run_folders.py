"""Write run folders as a run would leave them, in milliseconds: for what only reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_run(
    folder: Path,
    metrics: Mapping[str, Sequence[float]],
    *,
    settings: Mapping[str, Any] | None = None,
    finished: bool = True,
) -> Path:
    """Write a run of ours: its settings, metrics by step from 1 on, and its events."""
    folder.mkdir(parents=True)
    config = {"algorithm": {"type": "grpo"}, "runs_dir": "runs", "trainer": {"lr": 1e-5}}
    (folder / "config.json").write_text(json.dumps(config | dict(settings or {})))
    steps = len(next(iter(metrics.values())))
    with (folder / "metrics.jsonl").open("w") as file:
        for place in range(steps):
            row = {name: values[place] for name, values in metrics.items()}
            file.write(json.dumps({"step": place + 1, "time": 1.7e9 + place, **row}) + "\n")
    events: list[dict[str, Any]] = [
        {"kind": "run_started", "step": 0},
        {"kind": "training", "step": 0, "total_steps": steps},
    ]
    if finished:
        events.append({"kind": "run_finished", "step": steps})
    text = "".join(json.dumps({"time": 1.7e9, **event}) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text)
    return folder
