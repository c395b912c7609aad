"""Claim: an RL update changes few of the bytes of bf16 weights, so that differences are a small
part of what a whole publication sends.

`homeostat train` with GRPO from random bf16 weights, the engine in a separate process, weights by
`sync.transport.type: delta`, at three learning rates. Each publication reports the bytes of the
weights and those that were sent; the first of a run is always whole. The share of bytes that differ
between two versions, in whole elements of 2 bytes, is counted from the checkpoints' weights.

    make bench-publish-delta
    python bench/publish_delta.py --tiny                    # proves the script
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch
from safetensors.torch import load_file
from shapes import SHAPES, write_folder

REWARD = common.BENCH_DIR / "trl_grpo_side.py"
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
PROMPT_TOKENS = 24


def recipe(folder: Path, scratch: Path, *, lr: float, steps: int) -> dict[str, Any]:
    prompts = {"type": "prompts", "path": f"{folder}/prompts.jsonl", "chat": False}
    return {
        "name": f"lr_{lr:g}",
        "runs_dir": str(scratch),
        "algorithm": {"type": "grpo"},
        "model": {"path": str(folder)},
        "engine": {"type": "native", "own_process": True},
        "sync": {"transport": {"type": "delta"}},
        "data": {"train": [prompts], "max_length": 2 * PROMPT_TOKENS},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 12},
        "rewards": {"functions": [{"type": "function", "path": f"{REWARD}:digit_share"}]},
        "trainer": {
            "device": "cpu",
            "precision": "bf16",
            "threads": 1,
            "max_steps": steps,
            "lr": lr,
            "schedule": {"type": "constant", "warmup_steps": 0},
            "max_tokens_per_device": 1024,
        },
        "checkpoint": {"export": "every", "interval_steps": 1, "keep_last": steps},
        "observe": {"console": "plain", "report": False},
    }


def train(folder: Path, scratch: Path, *, lr: float, steps: int) -> dict[str, Any]:
    raw = recipe(folder, scratch, lr=lr, steps=steps)
    file = scratch / f"{raw['name']}.yaml"
    file.write_text(json.dumps(raw), encoding="utf-8")
    start = "from homeostat.cli.main import main; main()"
    line = [sys.executable, "-c", start, "train", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=environment)
    run = scratch / raw["name"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    sent = [event for event in events if event["kind"] == "weights_published"]
    found = {
        "bytes": sent[0]["bytes"],
        "sent_bytes": [event["sent_bytes"] for event in sent],
        "sent_share": [round(event["sent_bytes"] / event["bytes"], 5) for event in sent],
        "changed_share": changed_shares(run),
    }
    print(f"lr {lr:g}", json.dumps(found), flush=True)
    return found


def changed_shares(run: Path) -> list[float]:
    """Return the share of bytes, in elements that differ, between each two checkpoints."""
    folders = sorted((run / "checkpoints").glob("step_*/hf"))
    versions = [load_file(folder / "model.safetensors") for folder in folders]
    found = []
    for old, new in itertools.pairwise(versions):
        changed = sum(
            int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in new
        )
        found.append(round(changed / sum(tensor.numel() for tensor in new.values()), 5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    common.add_commit(parser)
    options = parser.parse_args()
    shape = "tiny" if options.tiny else "small"
    rates = LEARNING_RATES[:1] if options.tiny else LEARNING_RATES
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = scratch / "model"
        write_folder(
            SHAPES[shape], folder, device=torch.device("cpu"), dtype=torch.bfloat16,
            num_prompts=32, prompt_tokens=PROMPT_TOKENS,
        )  # fmt: skip
        steps = 3 if options.tiny else options.steps
        runs = {f"{lr:g}": train(folder, scratch, lr=lr, steps=steps) for lr in rates}
    result = common.facts_of(options, ("torch", "homeostat"))
    result |= {"shape": shape, "learning_rates": runs}
    common.write_result("publish_delta", result)


if __name__ == "__main__":
    main()
