"""Claim: a model learns in FP8 and for INT4 as it does in bf16, with the same data and seeds.

    python bench/precision_learning.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data gsm8k/
    python bench/precision_learning.py ... --only rl            # one stage alone
    python bench/precision_learning.py --tiny --device cpu      # proves the script, in a minute

Every run is a process of `homeostat train`; those of a stage run at the same time on one device.

    sft     300 steps on GSM8K in bf16, FP8 (blockwise) and for INT4, each with three seeds;
            the evaluation loss is that of the precision that was trained
    files   the INT4 model is evaluated from its packed export, and beside it the bf16 model that
            was rounded to INT4 after training, from a packed export as well
    rl      60 steps of GRPO on sums, from one warm start, in the same precisions and seeds; also
            how far the log-probs of engine and trainer are apart at the end

The last line printed is the JSON, also written to bench/results/ with pictures of both stages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import curves

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("bf16", "fp8", "int4")
COLOURS = {"bf16": "#0f172a", "fp8": "#2563eb", "int4": "#d97706"}
# Rewards and losses are drawn as means over so many steps.
SMOOTHED = 10
QUIET = ("observe.console=plain", "observe.report=false")


@dataclass(frozen=True, slots=True)
class Task:
    """A recipe with the settings that all its runs share."""

    recipe: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The comparison: two stages, the warm start of the second, seeds and group size."""

    sft: Task
    warm_start: Task
    rl: Task
    seeds: tuple[int, ...]
    group_size: int
    parallel: int

    def precision(self, name: str) -> tuple[str, ...]:
        """The settings of a precision, whatever the environment asks for."""
        chosen = {
            "bf16": (),
            "fp8": ("trainer.fp8={recipe: blockwise}",),
            "int4": (f"trainer.int4={{group_size: {self.group_size}}}",),
        }[name]
        return chosen if name == "int4" else (*chosen, "trainer.int4=null")


def smollm2(arguments: argparse.Namespace) -> Plan:
    """SmolLM2-135M on one GPU."""
    model, data = f"model.path={arguments.model}", arguments.data
    once = ("checkpoint.interval_steps=1000", "checkpoint.export=off", "trainer.device=cuda")
    sft = (
        model, f"data.train.0.path={data}/train.jsonl", f"data.validation.0.path={data}/test.jsonl",
        "trainer.epochs=null", f"trainer.max_steps={arguments.sft_steps}", "trainer.batch_rows=32",
        "trainer.max_tokens_per_device=8192", "eval.interval_steps=100", *once,
    )  # fmt: skip
    rl = (
        f"trainer.max_steps={arguments.rl_steps}", "rollout.prompts_per_step=64",
        "engine.max_concurrency=512", "engine.memory_share=0.03",
        "trainer.max_tokens_per_device=16384", "eval.interval_steps=20", *once,
    )  # fmt: skip
    return Plan(
        Task("smollm2_gsm8k_gpu", sft),
        Task("smollm2_chain_sum_sft_gpu", (model, "trainer.device=cuda")),
        Task("smollm2_chain_sum_grpo_gpu", rl),
        tuple(range(arguments.seeds)),
        arguments.group_size,
        arguments.parallel,
    )


def tiny(arguments: argparse.Namespace) -> Plan:
    """The demo's model, for a few steps: every part runs, and nothing is proved about learning."""
    here = (f"trainer.device={arguments.device}", "trainer.precision=fp32", "checkpoint.export=off")
    held_out = (
        "data.validation=[{type: prompt_completion, "
        "path: recipes/assets/tiny_sort_sft.jsonl, chat: false}]"
    )
    sft = ("trainer.max_steps=6", held_out, "eval.interval_steps=3", *here)
    start = ("trainer.max_steps=12", *here[:2])
    rl = (
        "trainer.max_steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "eval.interval_steps=2", "eval.max_rows=8", *here,
    )  # fmt: skip
    return Plan(
        Task("tiny_sort_sft_cpu", sft),
        Task("tiny_sort_sft_cpu", start),
        Task("tiny_sort_grpo_cpu", rl),
        (0,),
        32,
        min(arguments.parallel, os.cpu_count() or 1),
    )


# ---- processes ---------------------------------------------------------------------------------


def command(*words: str, log: Path) -> float:
    """Run `homeostat`; return its seconds. Its last lines are in the error where it fails."""
    line = [sys.executable, "-c", "from homeostat.cli.main import main; main()", *words]
    started = time.perf_counter()
    with log.open("w") as out:
        done = subprocess.run(line, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"homeostat {' '.join(words)} failed:\n{tail}")
    return time.perf_counter() - started


def train(task: Task, name: str, place: Path, settings: Sequence[str]) -> float:
    """Train a recipe under another name in `place`."""
    words = (f"name={name}", f"runs_dir={place}", *QUIET, *task.settings, *settings)
    recipe = str(ROOT / "recipes" / f"{task.recipe}.yaml")
    return command("train", recipe, *words, log=place / f"{name}.log")


def all_runs(plan: Plan, task: Task, stage: str, place: Path, settings: Sequence[str]) -> float:
    """Train a stage in every precision with every seed; return the seconds of the longest run."""
    jobs = [
        (f"{stage}_{precision}_{seed}", (*settings, *plan.precision(precision), f"seed={seed}"))
        for seed in plan.seeds
        for precision in PRECISIONS
    ]
    with ThreadPoolExecutor(plan.parallel) as pool:
        return max(pool.map(lambda job: train(task, job[0], place, job[1]), jobs))


# ---- INT4 files --------------------------------------------------------------------------------


def evaluate_packed(plan: Plan, run: str, place: Path) -> float:
    """The evaluation loss of a run's weights from a packed INT4 export, read back as it is."""
    packed, plain = place / f"{run}_packed", place / f"{run}_plain"
    size = ("--group-size", str(plan.group_size))
    words = ("--quantization", "int4", *(() if "_int4_" in run else size))
    command("export", str(place / run), str(packed), *words, log=place / f"{run}_packed.log")
    words = ("--quantization", "none")
    command("export", str(packed), str(plain), *words, log=place / f"{run}_plain.log")
    # Nothing is learnt: the first evaluation is of the weights as they were read.
    still = (
        "trainer.lr=0", "trainer.schedule={type: constant}", "trainer.max_steps=1",
        f"model.path={plain}", "model.init=pretrained", "eval.at_start=true", "trainer.int4=null",
    )  # fmt: skip
    train(plan.sft, f"{run}_evaluated", place, still)
    loss = next(r["eval/loss"] for r in read(place / f"{run}_evaluated") if "eval/loss" in r)
    for folder in (packed, plain, place / f"{run}_evaluated"):
        shutil.rmtree(folder)
    return loss


def rounded(plan: Plan, place: Path) -> dict[str, list[float]]:
    """Losses of packed models by seed: trained for INT4, and rounded after training in bf16."""
    runs = [f"sft_{precision}_{seed}" for precision in ("int4", "bf16") for seed in plan.seeds]
    with ThreadPoolExecutor(plan.parallel) as pool:
        losses = list(pool.map(lambda run: evaluate_packed(plan, run, place), runs))
    count = len(plan.seeds)
    return {"int4_from_file": losses[:count], "bf16_rounded_after": losses[count:]}


# ---- results -----------------------------------------------------------------------------------


def read(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def series(plan: Plan, place: Path, stage: str, metric: str) -> dict[str, list[float]]:
    """A metric of every step by precision, as the mean over seeds."""
    found = {}
    for precision in PRECISIONS:
        runs = [read(place / f"{stage}_{precision}_{seed}") for seed in plan.seeds]
        steps = [[r[metric] for r in records if metric in r and r["step"] > 0] for records in runs]
        found[precision] = [statistics.mean(values) for values in zip(*steps, strict=True)]
    return found


def at_end(plan: Plan, place: Path, stage: str, metric: str) -> dict[str, list[float]]:
    """The last value of a metric, by precision and seed."""
    return {
        precision: [
            [r[metric] for r in read(place / f"{stage}_{precision}_{seed}") if metric in r][-1]
            for seed in plan.seeds
        ]
        for precision in PRECISIONS
    }


def against(losses: list[float], base: list[float]) -> float:
    """The mean over seeds of how much larger a loss is than bf16's, as a share."""
    pairs = zip(losses, base, strict=True)
    return round(statistics.mean(mine / theirs - 1 for mine, theirs in pairs), 5)


def picture(found: dict[str, list[float]], title: str, file: Path) -> None:
    """Draw a curve for each precision, smoothed over some steps."""
    smooth = {
        name: [statistics.mean(v[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(v))]
        for name, v in found.items()
    }
    values = [value for line in smooth.values() for value in line]
    low, high, right = min(values), max(values), 90
    span, last = (high - low) or 1.0, max(len(line) for line in smooth.values())
    parts = curves.head(title)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(curves.grid_line(share, f"{low + share * span:.3g}", right=right))
    ends = []
    for name, line in smooth.items():
        points = [
            curves.place((step + 1) / last, (value - low) / span, right=right)
            for step, value in enumerate(line)
        ]
        parts.append(curves.curve(points, COLOURS[name]))
        ends.append((points[-1][1], name, COLOURS[name]))
    parts += curves.step_labels(range(0, last + 1, max(1, last // 5)), last=last, right=right)
    parts += curves.end_labels(ends, right=right)
    parts.append(curves.caption(f"mean over seeds, smoothed over {SMOOTHED} steps"))
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def drop_checkpoints(place: Path) -> None:
    """Leave of all runs their metrics: checkpoints of a stage fill a disk of 64 GB."""
    for folder in place.glob("*/checkpoints"):
        shutil.rmtree(folder)


def sft_stage(plan: Plan, place: Path) -> dict[str, Any]:
    """Train and evaluate on given rows, also from packed files."""
    seconds = {"sft": all_runs(plan, plan.sft, "sft", place, ())}
    losses = at_end(plan, place, "sft", "eval/loss")
    print(f"sft: {losses}, {seconds['sft']:.0f} s", flush=True)
    started = time.perf_counter()
    packed = rounded(plan, place)
    seconds["files"] = time.perf_counter() - started
    print(f"packed: {packed}, {seconds['files']:.0f} s", flush=True)
    drop_checkpoints(place)
    return {
        "eval_loss": {**losses, **packed},
        "fp8_above_bf16": against(losses["fp8"], losses["bf16"]),
        "int4_above_bf16": against(packed["int4_from_file"], losses["bf16"]),
        "rounded_after_above_bf16": against(packed["bf16_rounded_after"], losses["bf16"]),
        "int4_file_above_trained": against(packed["int4_from_file"], losses["int4"]),
        "train_loss": series(plan, place, "sft", "train/loss"),
        "sft_seconds": seconds,
    }


def rl_stage(plan: Plan, place: Path) -> dict[str, Any]:
    """Train by rewards from one warm start."""
    train(plan.warm_start, "warm", place, ("trainer.int4=null",))
    warm = sorted((place / "warm" / "checkpoints").glob("step_*"))[-1] / "hf"
    seconds = all_runs(plan, plan.rl, "rl", place, (f"model.path={warm}",))
    print(f"rl: {seconds:.0f} s", flush=True)
    drop_checkpoints(place)
    return {
        "reward": series(plan, place, "rl", "reward"),
        "eval_reward": at_end(plan, place, "rl", "eval/reward"),
        "logp_difference": at_end(plan, place, "rl", "sampling/sampling_logp_difference/mean"),
        "rl_seconds": seconds,
    }


STAGES = {"sft": sft_stage, "rl": rl_stage}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the .gguf file or an HF folder of SmolLM2-135M")
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: proves the script")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--rl-steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0 on")
    parser.add_argument("--group-size", type=int, choices=(32, 64), default=32)
    parser.add_argument("--parallel", type=int, default=9, help="runs at the same time")
    parser.add_argument("--runs-dir", help="keep the run directories here, without checkpoints")
    parser.add_argument("--only", choices=list(STAGES), help="one stage alone")
    common.add_commit(parser)
    arguments = parser.parse_args()
    if not arguments.tiny and not (arguments.model and arguments.data):
        parser.error("--model and --data are needed, or --tiny")
    return arguments


def main() -> None:
    arguments = parse()
    plan = tiny(arguments) if arguments.tiny else smollm2(arguments)
    # The runs share the cores: with a thread per core each, most of them wait for the others.
    threads = max(1, (os.cpu_count() or 1) // plan.parallel)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(arguments.runs_dir or temporary).resolve()
        place.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"group_size": plan.group_size, "seeds": list(plan.seeds)}
        for name, stage in STAGES.items():
            if arguments.only in (None, name):
                found |= stage(plan, place)
        pictures = place if arguments.tiny else common.RESULTS_DIR
        if "train_loss" in found:
            title = "SFT, training loss" if arguments.tiny else "SFT on GSM8K, training loss"
            picture(found["train_loss"], title, pictures / "precision_learning_sft.svg")
        if "reward" in found:
            picture(found["reward"], "GRPO on sums, reward", pictures / "precision_learning_rl.svg")
    facts = common.facts_of(arguments, ("torch", "transformers", "triton", "numpy"))
    result = facts | common.device_facts(arguments.device) | found
    if arguments.tiny:
        print(json.dumps(result))
    else:
        name = "precision_learning" + (f"_{arguments.only}" if arguments.only else "")
        common.write_result(name, result)


if __name__ == "__main__":
    main()
