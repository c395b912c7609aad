"""Claim: on a CPU, a GRPO step takes homeostat much less time than TRL, for the same loss.

Both sides read the same model folder and prompts, sample for themselves 8 prompts x 8 completions
of up to 64 new tokens a step, score them by the same Python function and do one AdamW update in
fp32. TRL runs with the fastest of its settings (`--sweep` measures them; `BEST` names the winner).
What they sample differs (their noise does), so lengths are reported for both.

Then TRL is given the rollouts that homeostat sampled, and the losses and gradient norms of the
same steps are compared: they agree as long as both train the same model in the same way.

    python bench/grpo_vs_trl.py              # one thread each
    python bench/grpo_vs_trl.py --all-cores  # ours as it chooses, TRL at its best of three ways
    python bench/grpo_vs_trl.py --sweep      # TRL's settings against each other, one thread
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
from stopwatch import ChildFailedError, Timed, run_child
from trl_grpo_side import VARIANTS, Workload, build_workload

PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "tokenizers", "numpy")
SIDE = common.BENCH_DIR / "trl_grpo_side.py"
# The winner of --sweep.
BEST = "rows64"
NUM_REPLAYED = 5
REPLAY_TIMEOUT_S = 600


def recipe(workload: Workload, runs_dir: Path) -> dict[str, Any]:
    """The same work for `homeostat train`."""
    assert (workload.loss_type, workload.scale) == ("dapo", "group"), workload
    return {
        "name": "homeostat",
        "runs_dir": str(runs_dir),
        "seed": workload.seed,
        "algorithm": {"type": "grpo", "normalise": "token"},
        "model": {"path": workload.folder},
        "data": {
            "train": [
                {"type": "prompts", "path": f"{workload.folder}/prompts.jsonl", "chat": False}
            ],
            "shuffle": False,
            "max_length": 128,
        },
        "rollout": {
            "prompts_per_step": workload.prompts_per_step,
            "samples_per_prompt": workload.samples_per_prompt,
            "max_new_tokens": workload.max_new_tokens,
            "keep_journal": True,
        },
        "rewards": {"functions": [{"type": "function", "path": f"{SIDE}:digit_share"}]},
        "trainer": {
            "device": "cpu",
            "precision": "fp32",
            # Without it the run chooses for itself how to use the cores it has.
            **({"threads": 1} if workload.threads == 1 else {}),
            "max_steps": workload.steps,
            "lr": workload.learning_rate,
            "schedule": {"type": "constant", "warmup_steps": 0},
        },
        "checkpoint": {"export": "off", "interval_steps": 10**6},
        "observe": {"console": "plain", "report": False, "row_losses": False},
    }


def measure(side: str, workload: Workload, scratch: Path, *, variant: str) -> Timed:
    scratch.mkdir()
    if side == "homeostat":
        file = scratch / "recipe.yaml"
        file.write_text(json.dumps(recipe(workload, scratch)), encoding="utf-8")
        start = "from homeostat.cli.main import main; main()"
        line = [sys.executable, "-c", start, "train", str(file)]
        out = scratch / "homeostat" / "metrics.jsonl"
    else:
        out = scratch / "trl.jsonl"
        task = {"workload": asdict(workload), "out": str(out), "variant": variant}
        line = [sys.executable, *_ranks(workload.processes), str(SIDE), json.dumps(task)]
    return run_child(line, out, scratch, threads=workload.threads, num_lines=workload.steps)


def _ranks(processes: int) -> list[str]:
    """Return the command that starts this many data-parallel ranks."""
    if processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def per_step(timed: Timed, which: int) -> list[float]:
    """Wall (0) or CPU (1) seconds of each step but the first."""
    stamps = [stamp[which] for stamp in timed.stamps]
    return [after - before for before, after in itertools.pairwise(stamps)]


def summary(runs: list[Timed]) -> dict[str, Any]:
    wall = [second for run in runs for second in per_step(run, 0)]
    cpu = [second for run in runs for second in per_step(run, 1)]
    lengths = [record["completions/mean_length"] for run in runs for record in run.records[1:]]
    return {
        "step_s_median": round(statistics.median(wall), 4),
        "step_s_by_run": [round(statistics.median(per_step(run, 0)), 4) for run in runs],
        "cpu_s_per_step": round(statistics.mean(cpu), 4),
        "mean_completion_tokens": round(statistics.mean(lengths), 2),
        "max_rss_bytes": max(run.max_rss_bytes for run in runs),
        "rewards": [round(record["reward"], 4) for record in runs[0].records],
    }


def stages(runs: list[Timed]) -> dict[str, float]:
    """Return the time of each stage of our step."""
    names = ("generate", "reward", "score", "train")
    records = [record for run in runs for record in run.records[1:]]
    return {n: round(statistics.median(r[f"time/{n}"] for r in records), 4) for n in names}


def rollouts_of(run_dir: Path, folder: Path, num_steps: int) -> Path:
    """Write what homeostat sampled in the form that trl_grpo_side replays."""
    from homeostat.config import RunConfig
    from homeostat.data.prompts import prepare_prompts
    from homeostat.data.tokenizer import load_tokenizer
    from homeostat.rollout.journal import Journal

    config = RunConfig.model_validate_json((run_dir / "config.json").read_text())
    prompts = prepare_prompts(config.data.train, load_tokenizer(config.model), config.data)
    journal, steps = Journal(run_dir / "journal"), []
    for step in range(1, num_steps + 1):
        found = [journal.read(key, prompts.__getitem__) for key in journal.keys(step)]
        assert found, f"the journal has no step {step}"
        steps.append(
            [
                {
                    "prompt_ids": group.prompt.tokens_T.tolist(),
                    "completion_ids": [s.completion.tokens_T.tolist() for s in group.samples],
                    "rewards": [sum(s.rewards.values()) for s in group.samples],
                }
                for group in (record.group for record in found if record is not None)
            ]
        )
    file = folder / "rollouts.json"
    file.write_text(json.dumps({"steps": steps}), encoding="utf-8")
    return file


def replay(workload: Workload, scratch: Path) -> dict[str, Any]:
    """The same rollouts through both: losses and gradient norms of the first steps."""
    short = replace(workload, steps=NUM_REPLAYED)
    ours = measure("homeostat", short, scratch / "replayed", variant=BEST).records
    rollouts = rollouts_of(scratch / "replayed" / "homeostat", scratch, NUM_REPLAYED)
    task = {"workload": asdict(short), "rollouts": str(rollouts), "variant": BEST}
    line = [sys.executable, str(SIDE), json.dumps(task)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=REPLAY_TIMEOUT_S)
    if done.returncode != 0:
        raise ChildFailedError(f"TRL's replay failed:\n{done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    pairs = {
        "loss": ([record["train/loss"] for record in ours], theirs["losses"]),
        "grad_norm": ([record["grad_norm"] for record in ours], theirs["grad_norms"]),
    }
    return {
        name: {
            "homeostat": left,
            "trl": right,
            "max_difference": max(abs(a - b) for a, b in zip(left, right, strict=True)),
        }
        for name, (left, right) in pairs.items()
    }


def ways(workload: Workload, *, cores: int) -> dict[str, Workload]:
    """Return the variants of each side: one of ours, and those of TRL, of which the best counts."""
    found = {"homeostat": replace(workload, threads=cores), "trl": workload}
    if cores > 1:
        found[f"trl, {cores} threads"] = replace(workload, threads=cores)
        found[f"trl, {cores} processes"] = replace(workload, processes=cores)
    return found


def compare(workload: Workload, scratch: Path, *, repeats: int, cores: int) -> dict[str, Any]:
    runs: dict[str, list[Timed]] = {name: [] for name in ways(workload, cores=cores)}
    failed: dict[str, str] = {}
    for repeat in range(repeats):
        for name, way in ways(workload, cores=cores).items():
            side = name.partition(",")[0]
            place = scratch / f"{name.replace(', ', '_').replace(' ', '_')}_{repeat}"
            try:
                runs[name].append(measure(side, way, place, variant=BEST))
            except ChildFailedError as error:
                if name in ("homeostat", "trl"):
                    raise
                failed[name] = str(error).splitlines()[-1]
                continue
            middle = statistics.median(per_step(runs[name][-1], 0))
            print(f"{name} {repeat + 1}/{repeats}: {middle:.3f} s a step", flush=True)
    found = {name: summary(done) for name, done in runs.items() if done}
    ours = found.pop("homeostat")
    best = min(found, key=lambda name: found[name]["step_s_median"])
    return {
        "ratio": round(found[best]["step_s_median"] / ours["step_s_median"], 3),
        "cpu_ratio": round(found[best]["cpu_s_per_step"] / ours["cpu_s_per_step"], 3),
        "trl_best": best,
        "same_rollouts": replay(workload, scratch),
        "trl_settings": VARIANTS[BEST],
        "homeostat": ours
        | {"stages_s": stages(runs["homeostat"]), "cores": used_cores(scratch / "homeostat_0")},
        **found,
        **({"failed": failed} if failed else {}),
    }


def used_cores(scratch: Path) -> dict[str, int]:
    """Return what our run chose: threads of an operation, and lanes."""
    (file,) = scratch.glob("homeostat/checkpoints/step_*/state.json")
    state = json.loads(file.read_text(encoding="utf-8"))["run"]
    return {name: state[name] for name in ("threads", "lanes")}


def sweep(workload: Workload, scratch: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            run = measure("trl", workload, scratch / name, variant=name)
        except ChildFailedError as error:
            found[name] = {"settings": VARIANTS[name], "failed": str(error).splitlines()[-1]}
        else:
            found[name] = {"settings": VARIANTS[name], **summary([run])}
        print(f"{name}: {found[name].get('step_s_median', 'failed')}", flush=True)
    measured = [name for name, entry in found.items() if "step_s_median" in entry]
    best = min(measured, key=lambda name: found[name]["step_s_median"], default=None)
    return {"best": best, "variants": found}


def main() -> None:
    common.require(("trl", "datasets", "accelerate", "psutil"), extra="bench")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--all-cores", action="store_true", help="not one thread, but all there are"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sweep", nargs="*", choices=list(VARIANTS), help="TRL's variants")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl_") as place:
        folder, scratch = Path(place) / "model", Path(place) / "runs"
        scratch.mkdir()
        facts = build_workload(folder, num_prompts=8 * arguments.steps)
        workload = Workload(str(folder), arguments.steps, loss_type="dapo")
        cores = len(os.sched_getaffinity(0)) if arguments.all_cores else 1
        result = common.machine(PACKAGES) | {"workload": facts | {"cores_used": cores}}
        try:
            if arguments.sweep is not None:
                result |= sweep(workload, scratch, arguments.sweep or list(VARIANTS))
            else:
                result |= compare(workload, scratch, repeats=arguments.repeats, cores=cores)
        except ChildFailedError as error:
            sys.exit(str(error))
    name = "trl_grpo_variants" if arguments.sweep is not None else "grpo_vs_trl"
    common.write_result(name + "_all_cores" * arguments.all_cores, result)


if __name__ == "__main__":
    main()
