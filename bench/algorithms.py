"""Claim: every RL algorithm of `algorithm.type` learns the demo's task, whatever the seed.

    python bench/algorithms.py [--seeds 10 11 12] [--steps 40] [--only ppo] [--jobs 2]
    python bench/algorithms.py --memory [--device cuda]

The first form trains the demo's first stage once (`recipes/tiny_sort_sft_cpu.yaml`) and then, from
its weights, every algorithm with its own defaults and each seed: the task and the model of
`recipes/tiny_sort_grpo_cpu.yaml` with fewer prompts and steps. A new algorithm joins by being in
`algorithm.type`. It reports the share of right answers in the first and in the last five steps, and
the first step at which it is a half; of PPO also the critic's explained variance over the run.

The second form measures the peak memory of PPO beside GRPO's, on the same model and rows, and what
`homeostat estimate` says of both. On a GPU it is what torch allocated, on a CPU what the process
had resident.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import estimate

from homeostat.config.algorithm import AnyPolicyGradient

ROOT = Path(__file__).resolve().parents[1]
SFT, RL = (ROOT / "recipes" / f"tiny_sort_{kind}_cpu.yaml" for kind in ("sft", "grpo"))
NUM_ENDS = 5
HALF = 0.5
RATE = 1e-3
# What an algorithm needs beside its type: a critic learns as fast as the policy of this size.
# Energy-based fine-tuning rewards likeness to the answer, so right answers are only counted.
MORE: dict[str, tuple[str, ...]] = {
    "ppo": (f"critic={{lr: {RATE}}}",),
    # Right answers have six tokens. DAPO penalises the last fifth of the limit.
    "dapo": ("rollout.max_new_tokens=12",),
    "ebft": (
        "ebft={reference_column: answer, embed_method: completion_mean, ce_coefficient: 0.03}",
        "rewards.functions=[{type: exact_match, weight: 0.0}]",
    ),
}
RIGHT = "rewards/exact_match/mean"
SIZES = (
    "rollout.prompts_per_step=64",
    "trainer.updates_per_step=2",
    f"trainer.lr={RATE}",
    "data.validation=[]",
    "eval={}",
    "checkpoint={interval_steps: 1000, export: 'off'}",
    "observe={console: quiet, report: false}",
)


def kinds() -> list[str]:
    classes = AnyPolicyGradient.__args__
    return [one.model_fields["type"].annotation.__args__[0] for one in classes]


def homeostat(*words: str | Path) -> None:
    code = "from homeostat.cli.main import main; main()"
    line = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stdout[-500:]}{done.stderr[-1500:]}")


def base_weights(folder: Path) -> Path:
    homeostat("train", SFT, f"runs_dir={folder}", "seed=10", "observe.console=quiet")
    return sorted((folder / SFT.stem / "checkpoints").glob("step_*"))[-1] / "hf"


def learn(kind: str, seed: int, steps: int, *, weights: Path, folder: Path) -> dict[str, Any]:
    name = f"{kind}_{seed}"
    changes = (f"name={name}", f"runs_dir={folder}", f"seed={seed}", f"model.path={weights}")
    algorithm = f"algorithm={{type: {kind}}}"
    sizes = (*SIZES, f"trainer.max_steps={steps}", *MORE.get(kind, ()))
    homeostat("train", RL, *changes, algorithm, *sizes)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rewards = [record[RIGHT] for record in records]
    row = {
        "algorithm": kind,
        "seed": seed,
        "reward_first": round(statistics.mean(rewards[:NUM_ENDS]), 4),
        "reward_last": round(statistics.mean(rewards[-NUM_ENDS:]), 4),
        "steps_to_half": next((r["step"] for r in records if r[RIGHT] >= HALF), None),
        "seconds": round(sum(record["time/step"] for record in records), 1),
    }
    explained = [record.get("critic/explained_variance") for record in records]
    if any(value is not None for value in explained):
        row["explained_variance"] = [None if v is None else round(v, 4) for v in explained]
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per algorithm over its seeds."""
    found = []
    for kind in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == kind]
        halves = [row["steps_to_half"] for row in own]
        line = {
            "algorithm": kind,
            "seeds": len(own),
            "reward_first": round(statistics.mean(row["reward_first"] for row in own), 3),
            "reward_last": round(statistics.mean(row["reward_last"] for row in own), 3),
            "reward_last_worst": min(row["reward_last"] for row in own),
            "steps_to_half": halves,
        }
        curves = [row["explained_variance"] for row in own if "explained_variance" in row]
        if curves:
            ends = [statistics.mean(v for v in c[-NUM_ENDS:] if v is not None) for c in curves]
            line["explained_variance_last"] = [round(value, 3) for value in ends]
        found.append(line)
    return found


def measure_memory(device: str) -> list[dict[str, Any]]:
    """Peak and estimate of GRPO and PPO at one size."""
    shape, tokens = ("0.5B", 8192) if device == "cuda" else ("31M", 4096)
    rows = []
    for kind in ("grpo", "ppo"):
        setup = estimate.Setup(
            f"{kind} {shape}, {tokens} tokens",
            shape,
            tokens,
            row_tokens=512 if device == "cuda" else 256,
            rl=True,
            over=(f"algorithm={{type: {kind}, skip_zero_advantage: false}}",),
        )
        with tempfile.TemporaryDirectory() as folder:
            rows.append(estimate.measure(setup, Path(folder), device))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", default=None, help="Algorithms, by their type.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs at one time.")
    parser.add_argument("--memory", action="store_true", help="Peak memory of PPO beside GRPO's.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--commit", default=None, help="Where there is no git to ask.")
    chosen = parser.parse_args()
    machine = common.machine(("torch", "transformers", "numpy"))
    machine |= common.device_facts(chosen.device) | {"commit": chosen.commit or machine["commit"]}
    if chosen.memory:
        rows = measure_memory(chosen.device)
        grpo, ppo = (row["measured_bytes"] for row in rows)
        result = {**machine, "ppo_over_grpo": round(ppo / grpo, 3), "rows": rows}
        common.write_result(f"ppo_memory_{chosen.device}", result)
        return
    with tempfile.TemporaryDirectory(prefix="homeostat-algorithms-") as place:
        folder = Path(place)
        weights = base_weights(folder)
        tasks = [(kind, seed) for kind in chosen.only or kinds() for seed in chosen.seeds]
        where = {"weights": weights, "folder": folder}
        with ThreadPoolExecutor(chosen.jobs) as pool:
            rows = list(pool.map(lambda task: learn(*task, chosen.steps, **where), tasks))
    lines = table(rows)
    for line in lines:
        print(json.dumps(line), flush=True)
    facts = {"steps": chosen.steps, "table": lines, "runs": rows}
    common.write_result("algorithms", {**machine, **facts})


if __name__ == "__main__":
    main()
