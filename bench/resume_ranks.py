"""Claim: a run resumed on another number of ranks, or in the local trainer, has equal losses.

    python bench/resume_ranks.py

For each change (2 -> 1, 1 -> 2, 4 -> 2 ranks, 2 -> local) one run does all its steps on the first
layout. Its folder, with the checkpoint of half the steps, is copied and continued by the same
recipe on the second layout. Rows, packing over other ranks, learning rates and moments all come
from the checkpoint or the seed, so that the losses of the second half may differ by rounding only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600.0
WAYS = (("2", "1"), ("1", "2"), ("4", "2"), ("2", "local"))
# Of the loss: what other orders of summation, grown over the steps, come to in fp32.
TOLERANCE = 1e-6


def recipe(name: str, runs_dir: Path, *, steps: int) -> dict[str, Any]:
    assets = ROOT / "recipes" / "assets"
    return {
        "name": name,
        "runs_dir": str(runs_dir),
        "model": {"path": str(assets / "tiny-chat"), "init": "random"},
        "data": {
            "train": [{"type": "messages", "path": str(assets / "tiny_wordplay.jsonl")}],
            "max_length": 128,
            "cache_dir": str(runs_dir / "data"),
        },
        "trainer": {
            "max_steps": steps,
            "batch_rows": 24,
            "max_tokens_per_device": 256,
            "lr": 3e-3,
            "threads": 1,
            "device": "cpu",
        },
        "checkpoint": {"interval_steps": steps // 2, "keep_last": 9, "export": "off"},
        "observe": {"console": "plain", "report": False},
    }


def layout(ranks: str) -> list[str]:
    """Overrides that put the trainer on so many ranks, or into one process."""
    if ranks == "local":
        return []
    cluster = f"cluster={{type: torchrun, processes: {ranks}}}"
    return [cluster, "trainer.backend={type: fsdp}"]


def train(folder: Path, name: str, ranks: str, *overrides: str, steps: int) -> dict[int, float]:
    """Step -> loss of a run that is begun or continued on this layout."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(recipe(name, folder, steps=steps)), encoding="utf-8")
    code = "from homeostat.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", str(file), *layout(ranks), *overrides]
    with open(folder / f"{name}.log", "ab") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=DEADLINE_S, check=False)
    if done.returncode:
        sys.exit((folder / f"{name}.log").read_text(errors="replace")[-3000:])
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["train/loss"] for record in map(json.loads, lines)}


def resume(folder: Path, begun: str, ranks: str, *, steps: int) -> dict[int, float]:
    name = f"{begun}_to_{ranks}"
    shutil.copytree(folder / begun, folder / name)
    half = steps // 2
    found = train(folder, name, ranks, f"checkpoint.load_step={half}", steps=steps)
    return {step: loss for step, loss in found.items() if step > half}


def show(first: str, second: str, before: dict[int, float], after: dict[int, float]) -> float:
    """Prints the table; the largest difference, as a share of the loss."""
    print(f"\n{first} -> {second}\n  step  uninterrupted       resumed    difference")
    for step, loss in after.items():
        print(f"{step:6d} {before[step]:14.8f} {loss:13.8f} {loss - before[step]:13.1e}")
    return max(abs(after[step] - before[step]) / before[step] for step in after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    steps = arguments.steps
    ways = []
    with tempfile.TemporaryDirectory(prefix="homeostat-ranks-") as place:
        folder = Path(place)
        begun = sorted({first for first, _ in WAYS})
        whole = {ranks: train(folder, f"run_{ranks}", ranks, steps=steps) for ranks in begun}
        for first, second in WAYS:
            before, after = whole[first], resume(folder, f"run_{first}", second, steps=steps)
            worst = show(first, second, before, after)
            table = [
                {"step": step, "uninterrupted": before[step], "resumed": loss}
                for step, loss in after.items()
            ]
            ways.append({"from": first, "to": second, "max_difference": worst, "steps": table})
    result = {
        **common.machine(("torch", "numpy")),
        "steps": steps,
        "resumed_after": steps // 2,
        "tolerance": TOLERANCE,
        "equal": all(way["max_difference"] <= TOLERANCE for way in ways),
        "ways": ways,
    }
    common.write_result("resume_ranks", result)
    if not result["equal"]:
        sys.exit("a resumed run differs from the uninterrupted one")


if __name__ == "__main__":
    main()
