"""Memory estimated before a run against the peak that the run measured.

    python bench/estimate.py [--device cpu|cuda] [--jobs 3]

Each setup is a real run of a few steps in a process of its own (random weights at the shape named,
rows that fill the budget); the estimate is `homeostat estimate --format json` on the same recipe.
On a GPU the measured peak is what torch allocated, on a CPU what the process had resident.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import yaml

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets"
SHAPES = {
    "31M": {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000,
    },
    "135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152,
    },
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 151_936,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A recipe's size. `over` are overrides of single keys."""

    name: str
    shape: str
    tokens: int
    row_tokens: int = 512
    rl: bool = False
    over: tuple[str, ...] = field(default_factory=tuple)


SETUPS = {
    "cuda": (
        Setup("sft 1.5B bf16, 8k tokens", "1.5B", 8192),
        Setup("sft 135M bf16, 32k tokens", "135M", 32_768),
        Setup("sft 135M bf16, 8k tokens", "135M", 8192),
        Setup("sft 135M fp32, 4k tokens", "135M", 4096, over=("trainer.precision=fp32",)),
        Setup("sft 0.5B bf16, 16k tokens", "0.5B", 16_384),
        Setup("sft 0.5B bf16, 32k tokens, checkpointing", "0.5B", 32_768,
              over=("trainer.gradient_checkpointing=true",)),
        Setup("sft 1.5B bf16, 8k tokens, checkpointing", "1.5B", 8192,
              over=("trainer.gradient_checkpointing=true",)),
        Setup("grpo 135M bf16, 16k tokens", "135M", 16_384, rl=True),
        Setup("grpo 0.5B bf16, 8k tokens, KL", "0.5B", 8192, rl=True,
              over=("algorithm.kl.coefficient=0.001", "algorithm.kl.estimator=k3")),
    ),
    "cpu": (
        Setup("sft 31M, 4k tokens", "31M", 4096),
        Setup("sft 31M, 16k tokens", "31M", 16_384),
        Setup("sft 31M, 16k tokens, checkpointing", "31M", 16_384,
              over=("trainer.gradient_checkpointing=true",)),
        Setup("sft 135M, 4k tokens", "135M", 4096),
        Setup("grpo 31M, 4k tokens", "31M", 4096, row_tokens=256, rl=True),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="Part of a setup's name.")
    parser.add_argument("--commit", default=None, help="Where there is no git to ask.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at one time: a GPU has room.")
    chosen = parser.parse_args()

    def measured(setup: Setup) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(setup, Path(folder), chosen.device)
        print(json.dumps(row), flush=True)
        return row

    setups = [setup for setup in SETUPS[chosen.device] if chosen.only in setup.name]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        rows = list(pool.map(measured, setups))
    worst = max(abs(row["off"]) for row in rows)
    result = {**common.machine(("torch",)), "worst_off": worst, "rows": rows}
    if chosen.commit:
        result["commit"] = chosen.commit
    common.write_result(f"estimate_{chosen.device}", result)


def measure(setup: Setup, folder: Path, device: str) -> dict[str, Any]:
    recipe = _recipe(setup, folder, device)
    over = list(setup.over)
    found = json.loads(_homeostat("estimate", recipe, *over, "--format", "json"))
    _homeostat("train", recipe, *over)
    records = list(_records(folder / "runs" / "run" / "metrics.jsonl"))
    measured = max(record["memory/max_alloc"] for record in records)
    return {
        "setup": setup.name,
        "estimated_bytes": found["peak_bytes"],
        "measured_bytes": measured,
        "off": found["peak_bytes"] / measured - 1,
        "reserved_bytes": max(record["memory/max_reserved"] for record in records),
        "parts": {name: value for name, value in found.items() if name.endswith("_bytes")},
    }


def _homeostat(*words: str | Path) -> str:
    code = "from homeostat.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=900
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{words}: {done.stderr[-2000:]}")
    return done.stdout


def _records(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        yield json.loads(line)


def _recipe(setup: Setup, folder: Path, device: str) -> Path:
    model = folder / "model"
    model.mkdir()
    for file in (ASSETS / "tiny-chat").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SHAPES[setup.shape]}))
    recipe = {
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model), "init": "random"},
        "trainer": {
            "device": device, "max_steps": 3, "max_tokens_per_device": setup.tokens, "lr": 1e-5,
            "threads": 1,
        },
        "checkpoint": {"export": "off", "interval_steps": 1000},
        "observe": {"console": "quiet", "report": False},
    }  # fmt: skip
    recipe |= _rl(setup, folder) if setup.rl else _sft(setup, folder)
    recipe["trainer"] |= {} if setup.rl else {"batch_rows": 2 * setup.tokens // setup.row_tokens}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def _sft(setup: Setup, folder: Path) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    # The tokenizer has a token per letter; the template adds some.
    answer = "ab" * (setup.row_tokens // 2 - 40)
    line = json.dumps({"messages": [
        {"role": "user", "content": "turn around abc"}, {"role": "assistant", "content": answer},
    ]})  # fmt: skip
    rows.write_text((line + "\n") * (4 * setup.tokens // setup.row_tokens))
    source = {"type": "messages", "path": str(rows)}
    return {"data": {"train": [source], "max_length": setup.row_tokens}}


def _rl(setup: Setup, folder: Path) -> dict[str, Any]:
    rows = folder / "prompts.jsonl"
    prompts = [{"prompt": f"turn around {'abcdefgh'[i % 8] * 20}"} for i in range(64)]
    rows.write_text("\n".join(map(json.dumps, prompts)) + "\n")
    rewards = {"functions": [{"type": "length", "free_tokens": 1, "max_tokens": 4096}]}
    return {
        "algorithm": {"type": "grpo", "skip_zero_advantage": False},
        "data": {"train": [{"type": "prompts", "path": str(rows)}], "max_length": 128},
        "rollout": {
            "prompts_per_step": 8, "samples_per_prompt": 8,
            "max_new_tokens": setup.row_tokens - 128,
        },
        "rewards": rewards,
    }  # fmt: skip


if __name__ == "__main__":
    main()
