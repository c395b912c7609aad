"""Claim: on a CPU, homeostat fine-tunes faster than TRL's SFTTrainer, to the same losses.

Both sides read the same model folder and the same JSONL, tokenise for themselves, take the same
rows in the same order in each update, and run the same AdamW in fp32 with the same threads. TRL
runs with the fastest of its settings that keeps the rows of an update together: `--sweep` measures
them all, and `BEST` names the winner.

One child process per side and repetition, taking turns. The parent holds the only stopwatch:
each side appends a line per update to a file, and the parent notes wall clock and CPU seconds of
the child as the line appears. The first update (warm-up) and the last (which may be followed by
saving) are not counted. tokens/s counts real tokens, never padding.

    python bench/sft_vs_trl.py                        # small model, one thread
    python bench/sft_vs_trl.py --threads 2
    python bench/sft_vs_trl.py --size smollm2-135m --steps 4 --batch-rows 8 --repeats 1
    python bench/sft_vs_trl.py --sweep                # TRL's settings against each other
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from stopwatch import ChildFailedError, run_child
from trl_side import LEARNING_RATE, MAX_LENGTH, VARIANTS, Workload

PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "tokenizers", "numpy")
MAX_LOSS_DIFFERENCE = 1e-4

# The winner of --sweep.
BEST = "padding_free4"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one side, its counted updates only; losses are those of every update."""

    side: str
    tokens: int
    wall_s: float
    cpu_s: float
    losses: list[float]
    max_rss_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


# ---- the two sides: homeostat by its command line, TRL by trl_side.py --------------------------


def recipe(workload: Workload, runs_dir: Path) -> dict[str, Any]:
    """The same work for `homeostat train`."""
    rows = str(Path(workload.folder) / "rows.jsonl")
    return {
        "name": "homeostat",
        "runs_dir": str(runs_dir),
        "model": {"path": workload.folder},
        "data": {
            "train": [{"type": "prompt_completion", "path": rows}],
            "shuffle": False,
            "max_length": MAX_LENGTH,
        },
        "trainer": {
            "device": "cpu",
            "precision": "fp32",
            "threads": workload.threads,
            "max_steps": workload.steps,
            "batch_rows": workload.batch_rows,
            "lr": LEARNING_RATE,
            "schedule": {"type": "constant", "warmup_steps": 0},
        },
        "checkpoint": {"export": "off"},
        "observe": {"console": "plain", "report": False},
    }


def command(
    side: str, workload: Workload, scratch: Path, *, variant: str
) -> tuple[list[str], Path]:
    """The child's command line, and the file it appends a line per update to."""
    if side == "homeostat":
        file = scratch / "recipe.yaml"
        file.write_text(json.dumps(recipe(workload, scratch)), encoding="utf-8")
        start = "from homeostat.cli.main import main; main()"
        line = [sys.executable, "-c", start, "train", str(file)]
        return line, scratch / "homeostat" / "metrics.jsonl"
    out = scratch / "trl.jsonl"
    task = {"workload": asdict(workload), "out": str(out), "variant": variant}
    return [sys.executable, str(common.BENCH_DIR / "trl_side.py"), json.dumps(task)], out


def measure(side: str, workload: Workload, scratch: Path, *, variant: str) -> Measured:
    scratch.mkdir()
    line, out = command(side, workload, scratch, variant=variant)
    timed = run_child(line, out, scratch, threads=workload.threads, num_lines=workload.steps)
    first, last = 0, workload.steps - 2
    stamps = timed.stamps
    return Measured(
        side=side,
        tokens=int(timed.records[last]["num_tokens"] - timed.records[first]["num_tokens"]),
        wall_s=stamps[last][0] - stamps[first][0],
        cpu_s=stamps[last][1] - stamps[first][1],
        losses=[record["train/loss"] for record in timed.records],
        max_rss_bytes=timed.max_rss_bytes,
    )


# ---- the comparison ----------------------------------------------------------------------------


def prepare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes model, tokenizer and rows; returns what the result says about them."""
    tokenizer = common.build_tokenizer(folder)
    rows = common.make_rows(tokenizer, arguments.steps * arguments.batch_rows, seed=1)
    common.write_jsonl(rows, folder / "rows.jsonl")
    chats = [row["prompt"] + row["completion"] for row in rows]
    lengths = [len(ids) for ids in tokenizer(chats)["input_ids"]]
    return {
        "size": arguments.size,
        "parameters": common.build_model(folder, size=arguments.size),
        "steps": arguments.steps,
        "batch_rows": arguments.batch_rows,
        "threads": arguments.threads,
        "text_lengths": common.percentiles(lengths),
    }


def summary(runs: list[Measured]) -> dict[str, Any]:
    return {
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1),
        "tokens_per_s_runs": [round(run.tokens_per_s, 1) for run in runs],
        "tokens_per_cpu_s": round(statistics.median(run.tokens / run.cpu_s for run in runs), 1),
        "wall_s": [round(run.wall_s, 2) for run in runs],
        "cpu_s": [round(run.cpu_s, 2) for run in runs],
        "tokens": runs[0].tokens,
        "max_rss_bytes": max(run.max_rss_bytes for run in runs),
        "losses": runs[0].losses,
    }


def loss_difference(left: list[float], right: list[float]) -> float:
    """Largest relative difference of an update's losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(left, right, strict=True))


def compare(workload: Workload, scratch: Path, *, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[Measured]] = {"homeostat": [], "trl": []}
    for repeat in range(repeats):
        for side, done in runs.items():
            done.append(measure(side, workload, scratch / f"{side}_{repeat}", variant=BEST))
            print(
                f"{side} {repeat + 1}/{repeats}: {done[-1].tokens_per_s:.0f} tokens/s", flush=True
            )
    ours, theirs = summary(runs["homeostat"]), summary(runs["trl"])
    difference = loss_difference(ours["losses"], theirs["losses"])
    return {
        "ratio": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3),
        "cpu_ratio": round(ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"], 3),
        "max_relative_loss_difference": difference,
        "losses_equal": difference <= MAX_LOSS_DIFFERENCE,
        "tokens_equal": ours["tokens"] == theirs["tokens"],
        "trl_settings": VARIANTS[BEST],
        "homeostat": ours,
        "trl": theirs,
    }


def sweep(workload: Workload, scratch: Path, names: list[str]) -> dict[str, Any]:
    """Every variant of TRL once, and how far its losses are from those of one row at a time."""
    reference = measure("trl", workload, scratch / "reference", variant="rows1").losses
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            run = measure("trl", workload, scratch / name, variant=name)
        except ChildFailedError as error:
            found[name] = {"settings": VARIANTS[name], "failed": str(error).splitlines()[-1]}
            print(f"{name}: failed: {found[name]['failed']}", flush=True)
            continue
        difference = loss_difference(run.losses, reference)
        found[name] = {
            "settings": VARIANTS[name],
            "max_relative_loss_difference": difference,
            "losses_equal": difference <= MAX_LOSS_DIFFERENCE,
            **summary([run]),
        }
        print(f"{name}: {run.tokens / run.cpu_s:.0f} tokens per CPU second", flush=True)
    equal = [name for name, entry in found.items() if entry.get("losses_equal")]
    best = max(equal, key=lambda name: found[name]["tokens_per_cpu_s"], default=None)
    return {"best": best, "variants": found}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(common.SIZES), default="small")
    parser.add_argument("--steps", type=int, default=6, help="updates, at least 3")
    parser.add_argument("--batch-rows", type=int, default=16, help="rows of an update")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sweep", nargs="*", choices=list(VARIANTS), help="TRL's variants")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: the first and the last are not counted")
    rows = VARIANTS[BEST]["rows"]
    if arguments.batch_rows % rows:
        parser.error(f"--batch-rows must be a multiple of {rows}, TRL's micro-batch")
    return arguments


def main() -> None:
    common.require(("trl", "datasets", "accelerate", "psutil"), extra="bench")
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="sft_vs_trl_") as folder:
        model, scratch = Path(folder) / "model", Path(folder) / "runs"
        model.mkdir()
        scratch.mkdir()
        result = common.machine(PACKAGES) | {"workload": prepare(model, arguments)}
        workload = Workload(str(model), arguments.steps, arguments.batch_rows, arguments.threads)
        if arguments.sweep is not None:
            result |= sweep(workload, scratch, arguments.sweep or list(VARIANTS))
            name = "trl_variants"
        else:
            name = "sft_vs_trl"
            try:
                result |= compare(workload, scratch, repeats=arguments.repeats)
            except ChildFailedError as error:
                sys.exit(str(error))
    suffix = "" if arguments.threads == 1 else f"_{arguments.threads}threads"
    common.write_result(f"{name}_{arguments.size}{suffix}", result)


if __name__ == "__main__":
    main()
