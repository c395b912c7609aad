"""Claim: this tree computes what another commit computes, bit by bit, and resumes its runs.

    python bench/same_bits.py --against COMMIT

For refactors. Each run is made three times: by the other commit, by this tree, and begun by the
other commit, stopped at about half its steps and finished by this tree. All three must agree: the
tensors of the last checkpoint and the tokens and rewards of the kept completions byte by byte, the
metrics that do not measure time or memory value by value. Metrics that only one side has are listed
and not compared. Bits belong to one machine: nothing here is stored to compare with later.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import pyarrow.parquet as pq
import rl_kills
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600.0
# Not a function of seed and recipe alone.
MEASURED = rl_kills.MEASURED


def sft(name: str, runs_dir: Path) -> dict[str, Any]:
    """Return the demo's first act, shortened."""
    assets = ROOT / "recipes" / "assets"
    rows = {"type": "prompt_completion", "path": str(assets / "tiny_sort_sft.jsonl"), "chat": False}
    return {
        "name": name,
        "runs_dir": str(runs_dir),
        "model": {"path": str(assets / "tiny-sort"), "init": "random"},
        "data": {"train": [rows], "max_length": 32, "validation_share": 0.1},
        "trainer": {
            "device": "cpu",
            "threads": 1,
            "max_steps": 12,
            "batch_rows": 64,
            "max_tokens_per_device": 1024,
            "lr": 3e-3,
        },
        "eval": {"interval_steps": 6},
        "checkpoint": {"interval_steps": 3},
        "observe": {"console": "plain", "report": False},
    }


def sft_two_ranks(name: str, runs_dir: Path) -> dict[str, Any]:
    raw = sft(name, runs_dir)
    raw["trainer"]["backend"] = {"type": "fsdp"}
    return {**raw, "cluster": {"type": "torchrun", "processes": 2}}


def grpo(name: str, runs_dir: Path) -> dict[str, Any]:
    """Return plain GRPO without a reference, in fast numerics."""
    raw = rl_kills.recipe(name, runs_dir, "in_process")
    raw["algorithm"] = {"type": "grpo", "entropy_bonus": 0.01}
    raw["model"] |= {"numerics": "fast"}
    del raw["reference"]
    return raw


def dapo(kind: str) -> Callable[[str, Path], dict[str, Any]]:
    """Return a run with all that has state: dynamic sampling, adaptive KL, two rewards, eval."""
    return lambda name, runs_dir: rl_kills.recipe(name, runs_dir, kind)


RECIPES: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "sft": sft,
    "sft_two_ranks": sft_two_ranks,
    "grpo": grpo,
    "dapo": dapo("in_process"),
    "dapo_own_process": dapo("own_process"),
    "dapo_helper": dapo("helper"),
}


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", commit], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def start(tree: Path, recipe: Path, log: Path) -> subprocess.Popen[bytes]:
    code = "from homeostat.cli.main import main; main()"
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as output:
        command = [sys.executable, "-c", code, "train", str(recipe)]
        return subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=tree)


def finish(process: subprocess.Popen[bytes], log: Path, *, expected: tuple[int, ...]) -> None:
    try:
        code = process.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if code not in expected:
        sys.exit(f"{log.stem}: exit code {code}\n{log.read_text()[-3000:]}")


def num_steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"train/loss"') if file.exists() else 0


def make(trees: list[Path], name: str, place: Path, kind: str) -> Path:
    """Make one run; of two trees the first begins it and is asked to stop half-way."""
    recipe, log = place / f"{name}.json", place / f"{name}.log"
    raw = RECIPES[kind](name, place)
    recipe.write_text(json.dumps(raw), encoding="utf-8")
    process = start(trees[0], recipe, log)
    if len(trees) > 1:
        end = time.monotonic() + DEADLINE_S
        while num_steps(place / name) < raw["trainer"]["max_steps"] // 2:
            if process.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        finish(process, log, expected=(0, 143))
        process = start(trees[1], recipe, log)
    finish(process, log, expected=(0,))
    return place / name


def tensors(folder: Path) -> dict[str, bytes]:
    last = sorted((folder / "checkpoints").glob("step_*"))[-1]
    return {
        f"{file.name}/{name}": array.tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {n: value for n, value in json.loads(line).items() if not n.startswith(MEASURED)}
        for line in lines
    ]


def completions(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "completions").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def differences(one: Path, other: Path) -> list[str]:
    """Say where two runs differ; an empty list where they are the same."""
    found = []
    if tensors(one) != tensors(other):
        names = {n for n, v in tensors(one).items() if tensors(other).get(n) != v}
        found.append(f"tensors: {sorted(names)[:4]} or their names")
    if len(metrics(one)) != len(metrics(other)):
        found.append(f"metrics: {len(metrics(one))} and {len(metrics(other))} records")
    for ours, theirs in zip(metrics(one), metrics(other), strict=False):
        bad = [n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]]
        bad = [n for n in bad if not (ours[n] != ours[n] and theirs[n] != theirs[n])]
        if bad:
            found.append(f"step {ours['step']}: {sorted(bad)}")
            break
    if completions(one) != completions(other):
        found.append("completions")
    return found


def names_of_one_side(one: Path, other: Path) -> list[str]:
    sides = [{name for record in metrics(folder) for name in record} for folder in (one, other)]
    return sorted(sides[0] ^ sides[1])


def compare(kind: str, before: Path, place: Path) -> dict[str, Any]:
    runs = {
        "before": make([before], f"{kind}_before", place, kind),
        "after": make([ROOT], f"{kind}_after", place, kind),
        "continued": make([before, ROOT], f"{kind}_continued", place, kind),
    }
    facts = {
        "records": len(metrics(runs["before"])),
        "tensors": len(tensors(runs["before"])),
        "completions": len(completions(runs["before"])),
        "metrics_of_one_side": names_of_one_side(runs["before"], runs["after"]),
        "after": differences(runs["before"], runs["after"]),
        "continued": differences(runs["before"], runs["continued"]),
    }
    print(kind, json.dumps(facts), flush=True)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, help="the commit to compare with")
    parser.add_argument("--kinds", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    command = ["git", "-C", str(ROOT), "rev-parse", arguments.against]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with (
        tempfile.TemporaryDirectory(prefix="homeostat-same-bits-") as temporary,
        ThreadPoolExecutor(arguments.parallel) as pool,
    ):
        place = Path(temporary)
        before = unpack(commit, place / "before")
        jobs = {kind: pool.submit(compare, kind, before, place) for kind in arguments.kinds}
        found = {kind: job.result() for kind, job in jobs.items()}
    holds = not any(facts["after"] or facts["continued"] for facts in found.values())
    machine = common.machine(("torch", "transformers", "numpy"))
    common.write_result("same_bits", {**machine, "against": commit, "holds": holds, "runs": found})
    if not holds:
        sys.exit("the two sides differ")


if __name__ == "__main__":
    main()
