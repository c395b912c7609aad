"""Claim: rewards that run beside sampling take less of a step than rewards that wait for all of it.

    python bench/reward_overlap.py --reward-s 0.2

GRPO on the prompts of `make demo` with a model that takes seconds to sample from on a CPU, and a
reward that sleeps for a given time per group. Two kinds of run in turn: as the library does it, a
group being scored as soon as its last completion is there; and with all groups held back until the
last one has been sampled, which is what scoring after sampling means. Both must end at the same
weights, bit for bit.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
from rich.console import Console

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.sampler import Sampler
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session
from homeostat.types import Completion

ASSETS = common.BENCH_DIR.parent / "recipes" / "assets"
KINDS = ("beside", "after")
STAGES = ("time/step", "time/generate", "time/reward")
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
REWARD = """
import time

def slow(completions, answer, **columns):
    time.sleep({seconds})
    return [float(text[:1] == wanted[:1]) for text, wanted in zip(completions, answer)]
"""


def write_model(folder: Path, shape: dict[str, int]) -> Path:
    """The demo's tokenizer and family, at another size."""
    folder.mkdir()
    for file in (ASSETS / "tiny-sort").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **shape}))
    return folder


def config_of(place: Path, name: str, *, steps: int, workers: int) -> RunConfig:
    raw: dict[str, Any] = {
        "name": name,
        "runs_dir": str(place),
        "algorithm": {"type": "grpo"},
        "model": {"path": str(place / "model"), "init": "random"},
        "data": {
            "train": [
                {"type": "prompts", "path": str(ASSETS / "tiny_sort_prompts.jsonl"), "chat": False}
            ],
            "max_length": 16,
        },
        "engine": {"max_concurrency": 16},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 24},
        "rewards": {
            "functions": [{"type": "function", "path": f"{place / 'reward.py'}:slow"}],
            "workers": workers,
        },
        "trainer": {"max_steps": steps, "lr": 1e-4, "threads": 1, "device": "cpu"},
        "checkpoint": {"interval_steps": 1000, "export": "off"},
        "observe": {"console": "quiet", "report": False},
    }
    return build_config(raw, [], file=None)


Groups = Iterator[tuple[int, list[Completion]]]
sample = Sampler.sample


def held_back(sampler: Sampler, *arguments: Any, **named: Any) -> Groups:
    """The groups of a round, none before the last one has been sampled."""
    return iter(list(sample(sampler, *arguments, **named)))


def train(config: RunConfig, kind: str) -> list[dict[str, float]]:
    """The records of a run without its first step, which warms up."""
    console = Console(file=io.StringIO())
    with (
        patch.object(Sampler, "sample", held_back if kind == "after" else sample),
        open_session(
            config, recipe="", command=["bench"], console=console, log_level="warning"
        ) as session,
    ):
        train_recipe(config, session)
    return list(read_metrics(config.run_dir / "metrics.jsonl"))[1:]


def weights(config: RunConfig) -> dict[str, bytes]:
    last = sorted((config.run_dir / "checkpoints").glob("step_*"))[-1]
    return {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reward-s", type=float, default=0.2, help="seconds per group")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    records: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    ends = []
    with tempfile.TemporaryDirectory(prefix="homeostat-overlap-") as scratch:
        place = Path(scratch)
        write_model(place / "model", SHAPE)
        (place / "reward.py").write_text(REWARD.format(seconds=arguments.reward_s))
        for repeat in range(arguments.repeats):
            for kind in KINDS:
                name = f"{kind}_{repeat}"
                config = config_of(place, name, steps=arguments.steps, workers=arguments.workers)
                records[kind] += train(config, kind)
                ends.append(weights(config))
    assert all(end == ends[0] for end in ends), "the two kinds of run end at other weights"
    found = {
        kind: {name: round(statistics.median(r[name] for r in records[kind]), 4) for name in STAGES}
        for kind in KINDS
    }
    machine = common.machine(("torch", "numpy"))
    common.write_result("reward_overlap", {**machine, **vars(arguments), **found})


if __name__ == "__main__":
    main()
