"""Claim: on a CPU, homeostat trains DPO and KTO faster than TRL, to the same losses.

Both sides read the same model folder and the same JSONL, tokenise for themselves, take the same
rows in the same order in each update, score them under the reference before the first update, and
run the same AdamW in fp32 with one thread. Losses are those of every update, under weights that
each side has trained for itself: equal losses after several updates mean equal gradients.

One child process per side and repetition, taking turns. The parent holds the only stopwatch (see
stopwatch.py). The first update (warm-up) and the last (which may be followed by saving) are not
counted. tokens/s counts real tokens, never padding.

    python bench/preference_vs_trl.py
    python bench/preference_vs_trl.py --size tiny --repeats 1        # losses only, in a minute
    python bench/preference_vs_trl.py --sweep     # TRL's micro-batch sizes against each other
    python bench/preference_vs_trl.py --trl-python /path/to/python   # TRL in its own environment
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from stopwatch import ChildFailedError, run_child
from trl_preference_side import BETA, LEARNING_RATE, MAX_LENGTH, Workload

PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "tokenizers", "numpy")
ALGORITHMS = ("dpo", "kto")
MAX_LOSS_DIFFERENCE = 1e-5
# Rows of TRL's micro-batch: the winner of --sweep. kto has to take the whole update at once.
BEST_ROWS = {"dpo": 2, "kto": 16}
SWEPT_ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one side, its counted updates only; losses are those of every update."""

    tokens: int
    wall_s: float
    cpu_s: float
    losses: list[float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def recipe(workload: Workload, runs_dir: Path) -> dict[str, Any]:
    """The same work for `homeostat train`."""
    kind = "preference" if workload.algorithm == "dpo" else "unpaired_preference"
    return {
        "name": "homeostat",
        "runs_dir": str(runs_dir),
        "algorithm": {"type": workload.algorithm},
        "preference": {"beta": BETA},
        "model": {"path": workload.folder},
        "data": {
            "train": [{"type": kind, "path": str(Path(workload.folder) / "rows.jsonl")}],
            "shuffle": False,
            "max_length": MAX_LENGTH,
        },
        "trainer": {
            "device": "cpu",
            "precision": "fp32",
            "threads": 1,
            "max_steps": workload.steps,
            "batch_rows": workload.batch_rows,
            "lr": LEARNING_RATE,
            "schedule": {"type": "constant", "warmup_steps": 0},
        },
        "checkpoint": {"export": "off"},
        "observe": {"console": "plain", "report": False, "row_losses": False},
    }


def measure(side: str, workload: Workload, scratch: Path, *, trl_python: str) -> Measured:
    scratch.mkdir(parents=True)
    if side == "homeostat":
        file = scratch / "recipe.yaml"
        file.write_text(json.dumps(recipe(workload, scratch)), encoding="utf-8")
        start = "from homeostat.cli.main import main; main()"
        line = [sys.executable, "-c", start, "train", str(file)]
        out = scratch / "homeostat" / "metrics.jsonl"
    else:
        out = scratch / "trl.jsonl"
        task = {"workload": asdict(workload), "out": str(out)}
        script = str(common.BENCH_DIR / "trl_preference_side.py")
        line = [trl_python, script, json.dumps(task)]
    timed = run_child(line, out, scratch, threads=1, num_lines=workload.steps)
    first, last = 0, workload.steps - 2
    return Measured(
        tokens=int(timed.records[last]["num_tokens"] - timed.records[first]["num_tokens"]),
        wall_s=timed.stamps[last][0] - timed.stamps[first][0],
        cpu_s=timed.stamps[last][1] - timed.stamps[first][1],
        losses=[record["train/loss"] for record in timed.records],
    )


def write_rows(workload: Workload) -> None:
    """Write pairs, or labelled rows: the better answer is the row's own, the worse another's."""
    folder = Path(workload.folder)
    tokenizer = common.build_tokenizer(folder)
    rows = common.make_rows(tokenizer, workload.steps * workload.batch_rows, seed=1)
    others = [*rows[1:], rows[0]]
    made: list[dict[str, Any]] = []
    for number, (row, other) in enumerate(zip(rows, others, strict=True)):
        good, bad = row["completion"], other["completion"]
        if workload.algorithm == "dpo":
            made.append({"prompt": row["prompt"], "chosen": good, "rejected": bad})
        else:
            is_good = number % 2 == 0
            completion = good if is_good else bad
            made.append({"prompt": row["prompt"], "completion": completion, "label": is_good})
    common.write_jsonl(made, folder / "rows.jsonl")


def summary(runs: list[Measured]) -> dict[str, Any]:
    return {
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1),
        "tokens_per_s_runs": [round(run.tokens_per_s, 1) for run in runs],
        "tokens_per_cpu_s": round(statistics.median(run.tokens / run.cpu_s for run in runs), 1),
        "tokens": runs[0].tokens,
        "losses": runs[0].losses,
    }


def compare(workload: Workload, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[Measured]] = {"homeostat": [], "trl": []}
    for repeat in range(arguments.repeats):
        for side, done in runs.items():
            place = scratch / f"{side}_{repeat}"
            done.append(measure(side, workload, place, trl_python=arguments.trl_python))
            name = f"{workload.algorithm}, {side} {repeat + 1}/{arguments.repeats}"
            print(f"{name}: {done[-1].tokens_per_s:.0f} tokens/s", flush=True)
    ours, theirs = summary(runs["homeostat"]), summary(runs["trl"])
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    difference = max(abs(left - right) for left, right in pairs)
    return {
        "ratio": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3),
        "cpu_ratio": round(ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"], 3),
        "max_loss_difference": difference,
        "losses_equal": difference <= MAX_LOSS_DIFFERENCE,
        "tokens_equal": ours["tokens"] == theirs["tokens"],
        "trl_rows": workload.rows,
        "homeostat": ours,
        "trl": theirs,
    }


def sweep(workload: Workload, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return TRL's speed by the rows of its micro-batch."""
    found = {}
    for rows in [rows for rows in SWEPT_ROWS if workload.batch_rows % rows == 0]:
        task = Workload(**{**asdict(workload), "rows": rows})
        run = measure("trl", task, scratch / f"rows{rows}", trl_python=arguments.trl_python)
        found[str(rows)] = summary([run])
        print(f"{workload.algorithm}, {rows} rows: {run.tokens_per_s:.0f} tokens/s", flush=True)
    return found


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of the packages that TRL's interpreter has."""
    code = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{n: m.version(n) for n in {list(PACKAGES)}}}))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if found.returncode != 0:
        sys.exit(f"{python} lacks a package that TRL's side needs:\n{found.stderr[-500:]}")
    return json.loads(found.stdout)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(common.SIZES), default="small")
    parser.add_argument("--steps", type=int, default=6, help="updates, at least 3")
    parser.add_argument("--batch-rows", type=int, default=16, help="pairs or rows of an update")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has TRL")
    parser.add_argument("--sweep", action="store_true", help="TRL's micro-batch sizes (dpo)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.trl_python == sys.executable:
        common.require(("trl", "datasets", "accelerate"), extra="bench")
    common.require(("psutil",), extra="bench")
    result = common.machine(PACKAGES) | {"threads": 1, "size": arguments.size}
    result["trl_versions"] = versions_of(arguments.trl_python)
    result |= {"steps": arguments.steps, "batch_rows": arguments.batch_rows, "beta": BETA}
    for algorithm in ["dpo"] if arguments.sweep else arguments.algorithms:
        with tempfile.TemporaryDirectory(prefix="preference_vs_trl_") as folder:
            rows = min(BEST_ROWS[algorithm], arguments.batch_rows)
            rows = arguments.batch_rows if algorithm == "kto" else rows
            model = Path(folder) / "model"
            model.mkdir()
            workload = Workload(algorithm, str(model), arguments.steps, arguments.batch_rows, rows)
            write_rows(workload)
            result["parameters"] = common.build_model(model, size=arguments.size)
            work = sweep if arguments.sweep else compare
            try:
                result[algorithm] = work(workload, Path(folder) / "runs", arguments)
            except ChildFailedError as error:
                sys.exit(str(error))
    name = "preference_trl_rows" if arguments.sweep else "preference_vs_trl"
    common.write_result(name if arguments.size == "small" else f"{name}_{arguments.size}", result)


if __name__ == "__main__":
    main()
