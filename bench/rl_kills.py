"""Claim: an RL run that is killed with -9 at any moment goes on to the same bits.

    python bench/rl_kills.py --runs 20

One run is left alone. Each of the others is killed one to three times, at random moments between
its first and its last step (sampling, scoring, the updates of a step and saving all take their
share of them), and begun again with the same command until it is complete. Then the tensors of the
last checkpoint are compared byte by byte, and the metrics that do not measure time value by value.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600.0
# Not a function of seed and recipe alone.
MEASURED = ("time", "throughput", "memory", "engine", "gpu", "rollout/replayed_rounds")


def recipe(name: str, runs_dir: Path) -> dict[str, Any]:
    """Two updates a step, dynamic sampling, an adaptive KL and normalised rewards: all that has
    state of its own."""
    assets = ROOT / "recipes" / "assets"
    return {
        "name": name,
        "runs_dir": str(runs_dir),
        "seed": 3,
        "algorithm": {
            "type": "dapo",
            "kl": {"coefficient": 0.01, "target": 0.05, "horizon": 256},
            "overlong": {"type": "shape", "buffer_tokens": 2},
            "dynamic_sampling": {"max_rounds": 3},
        },
        "model": {"path": str(assets / "tiny-sort"), "init": "random"},
        "data": {
            "train": [
                {"type": "prompts", "path": str(assets / "tiny_sort_prompts.jsonl"), "chat": False}
            ],
            "validation": [
                {"type": "prompts", "path": str(assets / "tiny_sort_eval.jsonl"), "chat": False}
            ],
            "max_length": 16,
        },
        "rollout": {"prompts_per_step": 12, "samples_per_prompt": 8, "max_new_tokens": 8},
        "rewards": {
            "functions": [
                {"type": "regex_format", "pattern": "[0-9]+"},
                {"type": "exact_match", "column": "answer"},
            ],
            "normalise": "scale",
        },
        "reference": {"type": "initial", "refresh_steps": 5},
        "trainer": {
            "max_steps": 24,
            "updates_per_step": 3,
            "max_tokens_per_device": 512,
            "lr": 1e-3,
            "threads": 1,
            "device": "cpu",
        },
        "eval": {"interval_steps": 6, "max_rows": 16},
        "checkpoint": {"interval_steps": 4, "export": "off"},
        "observe": {"console": "plain", "report": False},
    }


class Run:
    """One run directory, and the processes that work on it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder / name
        self.file = folder / f"{name}.json"
        self.file.write_text(json.dumps(recipe(name, folder)), encoding="utf-8")
        self.kills: list[dict[str, Any]] = []

    def start(self) -> subprocess.Popen[bytes]:
        code = "from homeostat.cli.main import main; main()"
        with open(self.folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", code, "train", str(self.file)], stdout=log, stderr=log
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # half a line: the process is writing it, or was killed
        return [event for event in found if event["kind"] == kind]

    def finish(self) -> None:
        code = self.start().wait(timeout=DEADLINE_S)
        if code != 0:
            raise RuntimeError(f"{self.folder}: exit code {code}; see its .log file")

    def kill_after(self, delay_s: float) -> bool:
        """False when the run was complete before its time came."""
        begun = len(self.events("training"))
        process = self.start()
        deadline = time.monotonic() + DEADLINE_S
        while len(self.events("training")) == begun and process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"{self.folder}: no first step within {DEADLINE_S:.0f} s")
            time.sleep(0.01)
        try:
            process.wait(timeout=delay_s)
            return False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.kills.append({"after_s": round(delay_s, 3), "at": self._place()})
        return True

    def _place(self) -> str:
        """What the newest file of the run directory says it was doing."""
        found = [p for p in self.folder.rglob("*") if p.is_file() and "console" not in p.name]
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
        return newest.relative_to(self.folder).parts[0]

    def tensors(self) -> dict[str, bytes]:
        last = sorted((self.folder / "checkpoints").glob("step_*"))[-1]
        return {f"{last.name}/{p.name}": p.read_bytes() for p in last.glob("*.safetensors")}

    def metrics(self) -> list[dict[str, float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [
            {n: value for n, value in json.loads(line).items() if not n.startswith(MEASURED)}
            for line in lines
        ]


def disturb(number: int, folder: Path, duration_s: float, seed: int) -> Run:
    rng = random.Random(seed * 1000 + number)
    run = Run(f"killed_{number:02d}", folder)
    for _ in range(rng.randint(1, 3)):
        if not run.kill_after(rng.uniform(0, duration_s)):
            break
    run.finish()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="homeostat-kills-") as place:
        folder = Path(place)
        alone = Run("alone", folder)
        alone.finish()
        span = [alone.events(kind)[0]["time"] for kind in ("training", "run_finished")]
        with ThreadPoolExecutor(arguments.parallel) as pool:
            disturbed = pool.map(
                lambda number: disturb(number, folder, span[1] - span[0], arguments.seed),
                range(arguments.runs),
            )
            runs = list(disturbed)
        weights, metrics = alone.tensors(), alone.metrics()
        same_weights = [run.tensors() == weights for run in runs]
        same_metrics = [run.metrics() == metrics for run in runs]
        replayed = sum(
            json.loads(line).get("rollout/replayed_rounds", 0)
            for run in runs
            for line in (run.folder / "metrics.jsonl").read_text().splitlines()
        )
        resumed = sum(len(run.events("run_resumed")) for run in runs)
    kills = [kill for run in runs for kill in run.kills]
    result = {
        **common.machine(("torch", "transformers", "numpy")),
        "runs": len(runs),
        "kills": len(kills),
        "kills_by_newest_file": dict(collections.Counter(kill["at"] for kill in kills)),
        "resumed_from_a_checkpoint": resumed,
        "rounds_replayed_from_the_journal": replayed,
        "weights_bitwise_equal": sum(same_weights),
        "metrics_equal": sum(same_metrics),
        "undisturbed_s": round(span[1] - span[0], 2),
        "steps": len(metrics),
    }
    common.write_result("rl_kills", result)
    if not (all(same_weights) and all(same_metrics)):
        sys.exit("a resumed run differs from the undisturbed one")


if __name__ == "__main__":
    main()
