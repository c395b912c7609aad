"""Claim: a GRPO step of a 0.5 B model on one GPU takes homeostat a fraction of TRL's time.

Both sides read one folder (random weights of Qwen2's 0.5 B shape), sample 32 prompts x 8
completions of 512 new tokens (the end token cannot be sampled, so all have them), score them by the
same Python function and do one AdamW update, one after the other, each in a separate process.
Homeostat's side is `homeostat train` as a user runs it. The floor is computed from what the device
measures in the same run: bytes over copy bandwidth for decoding, FLOPs over matmul rate for
training.

    python bench/grpo_step_gpu.py
    python bench/grpo_step_gpu.py trainer.max_tokens_per_device=32768    # keys of our recipe
    python bench/grpo_step_gpu.py --tiny --device cpu                    # proves the script
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import floor
import torch
from shapes import DTYPES, SHAPES, write_folder
from stopwatch import ChildFailedError, Timed, run_child
from trl_grpo_side import Workload

PACKAGES = ("torch", "triton", "transformers", "trl", "datasets", "accelerate", "numpy")
TRL_SIDE = common.BENCH_DIR / "trl_gpu_side.py"
REWARD = common.BENCH_DIR / "trl_grpo_side.py"
STAGES = ("step", "generate", "reward", "score", "train", "health")
# Both sides compute as many rows at a time.
TRL_ROWS = 32
MICRO_BATCH_TOKENS = TRL_ROWS * 576
PROMPT_TOKENS = 64
LEARNING_RATE = 1e-6
SIZES: dict[str, dict[str, int]] = {
    "0.5b": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_new_tokens": 512},
    "tiny": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 16},
}


def recipe(workload: Workload, scratch: Path, *, device: str) -> dict[str, Any]:
    """The step for `homeostat train`."""
    prompts = {"type": "prompts", "path": f"{workload.folder}/prompts.jsonl", "chat": False}
    return {
        "name": "homeostat",
        "runs_dir": str(scratch),
        "seed": workload.seed,
        "algorithm": {"type": "grpo", "normalise": "token"},
        "model": {"path": workload.folder},
        "data": {"train": [prompts], "shuffle": False, "max_length": 2 * PROMPT_TOKENS},
        "rollout": {
            "prompts_per_step": workload.prompts_per_step,
            "samples_per_prompt": workload.samples_per_prompt,
            "max_new_tokens": workload.max_new_tokens,
        },
        "rewards": {"functions": [{"type": "function", "path": f"{REWARD}:digit_share"}]},
        "trainer": {
            "device": device,
            "max_steps": workload.steps,
            "lr": workload.learning_rate,
            "schedule": {"type": "constant", "warmup_steps": 0},
            "max_tokens_per_device": MICRO_BATCH_TOKENS,
        },
        "checkpoint": {"export": "off", "interval_steps": 10**6},
        "observe": {"console": "plain", "report": False, "row_losses": False},
    }


def run_ours(workload: Workload, scratch: Path, *, device: str, overrides: list[str]) -> Timed:
    scratch.mkdir()
    file = scratch / "recipe.yaml"
    file.write_text(json.dumps(recipe(workload, scratch, device=device)), encoding="utf-8")
    start = "from homeostat.cli.main import main; main()"
    line = [sys.executable, "-c", start, "train", str(file), *overrides]
    out = scratch / "homeostat" / "metrics.jsonl"
    return run_child(line, out, scratch, threads=workload.threads, num_lines=workload.steps)


def run_trl(workload: Workload, scratch: Path, *, device: str) -> Timed:
    scratch.mkdir()
    out = scratch / "trl.jsonl"
    task = {"workload": asdict(workload), "out": str(out), "rows": TRL_ROWS, "device": device}
    line = [sys.executable, str(TRL_SIDE), json.dumps(task)]
    return run_child(line, out, scratch, threads=workload.threads, num_lines=workload.steps)


def summary(run: Timed, *, seconds: float) -> dict[str, Any]:
    """Medians without the first step, which compiles and fills caches."""
    steps = [after[0] - before[0] for before, after in itertools.pairwise(run.stamps)]
    steady = run.records[1:]
    found: dict[str, Any] = {
        "step_s": round(statistics.median(steps), 4),
        "steps_s": [round(second, 3) for second in steps],
        "stages_s": {
            stage: round(statistics.median(record[f"time/{stage}"] for record in steady), 4)
            for stage in STAGES
            if f"time/{stage}" in steady[0]
        },
        "mean_completion_tokens": statistics.mean(r["completions/mean_length"] for r in steady),
        "start_to_end_s": round(seconds, 1),
    }
    for name in ("memory/max_alloc", "memory/max_reserved"):
        if name in steady[0]:
            found[f"{name.split('/')[1]}_gb"] = round(max(r[name] for r in steady) / 1e9, 2)
    for name in ("mean", "max"):
        key = f"sampling/sampling_logp_difference/{name}"
        if key in steady[0]:
            found[f"logp_difference_{name}"] = max(record[key] for record in steady)
    return found


def first_step_s(run: Timed) -> float | None:
    """Return the duration of the first step by our own clock, including warm-up."""
    return run.records[0].get("time/step")


def floors(workload: Workload, size: str, *, device: torch.device) -> dict[str, Any]:
    dtype, shape = DTYPES[device.type], SHAPES[size]
    rates = floor.measure_rates(device, dtype)
    new = workload.max_new_tokens
    rows = workload.prompts_per_step * workload.samples_per_prompt
    generate_s = floor.generate_seconds(
        shape, dtype, rates, batch=rows, prompt=PROMPT_TOKENS, new=new
    )
    flops = floor.train_flops(
        shape,
        groups=workload.prompts_per_step,
        samples=workload.samples_per_prompt,
        prompt=PROMPT_TOKENS,
        new=new,
    )
    return {
        **rates.to_json(),
        "generate_s": round(generate_s, 4),
        "train_flops": flops,
        "train_s": round(flops / rates.matmul_flops, 4),
    }


def compare(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    size, device = "tiny" if arguments.tiny else "0.5b", torch.device(arguments.device)
    steps = max(arguments.steps, arguments.trl_steps)
    write_folder(
        SHAPES[size],
        place / "model",
        device=device,
        dtype=DTYPES[device.type],
        num_prompts=steps * SIZES[size]["prompts_per_step"],
        prompt_tokens=PROMPT_TOKENS,
    )
    workload = Workload(
        folder=str(place / "model"),
        steps=arguments.steps,
        threads=arguments.threads,
        learning_rate=LEARNING_RATE,
        loss_type="dapo",
        **SIZES[size],
    )
    result: dict[str, Any] = {"shape": size, "workload": SIZES[size], "overrides": arguments.keys}
    result["floor"] = floors(workload, size, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    ours = run_ours(workload, place / "ours", device=arguments.device, overrides=arguments.keys)
    result["homeostat"] = summary(ours, seconds=time.perf_counter() - started)
    result["homeostat"]["first_step_s"] = first_step_s(ours)
    print(json.dumps(result), flush=True)
    if arguments.trl_steps:
        started = time.perf_counter()
        theirs = run_trl(
            Workload(**{**asdict(workload), "steps": arguments.trl_steps}),
            place / "theirs",
            device=arguments.device,
        )
        result["trl"] = summary(theirs, seconds=time.perf_counter() - started)
        result["trl"]["micro_batch_rows"] = TRL_ROWS
    return result | ratios(result)


def ratios(result: dict[str, Any]) -> dict[str, Any]:
    ours, least = result["homeostat"], result["floor"]
    stages = ours["stages_s"]
    found = {
        "generate_share_of_floor": round(least["generate_s"] / stages["generate"], 3),
        "train_share_of_floor": round(least["train_s"] / stages["train"], 3),
    }
    if "trl" in result:
        found["ratio"] = round(result["trl"]["step_s"] / ours["step_s"], 3)
        if "max_alloc_gb" in result["trl"]:
            found["memory_ratio"] = round(ours["max_alloc_gb"] / result["trl"]["max_alloc_gb"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: proves the script")
    parser.add_argument("--steps", type=int, default=7, help="our steps; the first is not counted")
    parser.add_argument("--trl-steps", type=int, default=3, help="TRL's; 0: leave TRL out")
    parser.add_argument("--threads", type=int, help="CPU threads of each side; default 8, tiny 1")
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    parser.add_argument("keys", nargs="*", help="keys of our recipe to change, a.b=c")
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or (1 if arguments.tiny else 8)
    theirs = ("trl", "datasets", "accelerate") if arguments.trl_steps else ()
    common.require(("psutil", *theirs), extra="bench")
    if min(arguments.steps, arguments.trl_steps or 2) < 2:
        parser.error("at least 2 steps: the first is not counted.")
    result = common.machine(PACKAGES) | common.device_facts(arguments.device)
    with tempfile.TemporaryDirectory(prefix="grpo_step_gpu_") as place:
        try:
            result |= compare(arguments, Path(place))
        except ChildFailedError as error:
            sys.exit(str(error))
    if arguments.commit:
        result["commit"] = arguments.commit
    if arguments.tiny:
        print(json.dumps(result))
    else:
        common.write_result("grpo_step_gpu", result)


if __name__ == "__main__":
    main()
