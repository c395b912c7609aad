"""Claim: fitted to two measured configurations, the simulator predicts six others within 15 %.

Eight small recipes are trained for real in this process (native engine, local trainer; weights are
random): other numbers of prompts and samples, lengths, widths, updates, rewards that sleep, ragged
lengths, an engine in its own process. The rates of the machine are fitted to the stages of two of
them (`CALIBRATION`), and the duration of a step of the others is predicted.

    python bench/simulator.py                  # eight configurations on one CPU core
    python bench/simulator.py --device cuda
    python bench/simulator.py --again FILE     # fit and predict again from what was measured

The configurations take turns, `--rounds` times, and medians are compared. The time that this
process and its children wait for a core is subtracted on Linux: other programs of the machine
would otherwise be measured, too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
from rich.console import Console
from shapes import DTYPES, END_ID, Shape, write_folder

from homeostat.config.loading.load import build_config
from homeostat.observe.jsonl import read_metrics
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session
from homeostat.run.wiring.hooks import Hooks
from homeostat.simulator.fit import Measured, fit, predicted
from homeostat.simulator.layout import Layout
from homeostat.simulator.loop import simulate
from homeostat.simulator.machine import Machine, load_machine
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.workload import Lengths, Workload

STAGES = {
    "generate": "time/generate",
    "reward": "time/reward",
    "score": "time/score",
    "train": "time/train",
    "publish": "sync/seconds",
}
# The clock of the run stands while its process waits for a core, so the reward's does, too.
REWARD = """
import pathlib
import time

def waiting(completions, seconds=0.0, process=0, **columns):
    end = now(process) + seconds
    while (left := end - now(process)) > 0:
        time.sleep(min(left, 0.005))
    return [float(sum(map(ord, text)) % 7) for text in completions]

def now(process):
    file = pathlib.Path(f"/proc/{process}/schedstat")
    waited = int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0
    return time.perf_counter() - waited
"""
SIZES = {
    "narrow": Shape(4, 128, 4, 2, 32, 384, vocab=512),
    "middle": Shape(4, 256, 4, 2, 64, 768, vocab=512),
    "wide": Shape(4, 384, 6, 2, 64, 1152, vocab=512),
    # Qwen2's 0.5 B with a smaller vocabulary, and half of its layers.
    "0.4b": Shape(24, 896, 14, 2, 64, 4864, vocab=32_768),
    "0.2b": Shape(12, 896, 14, 2, 64, 4864, vocab=32_768),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration; every field is a number that the simulator is given, too."""

    shape: str
    prompts: int
    samples: int
    new: int
    prompt: int = 32
    updates: int = 1
    has_kl: bool = False
    reward_s: float = 0.0
    # A token ends a completion with the probability of 1 / this.
    ends: int = 0
    own_process: bool = False
    max_tokens: int = 2048
    concurrency: int = 256


CPU = {
    "calibration: narrow, 2 updates": Case("narrow", 8, 4, 48, updates=2),
    "calibration: wide, own process": Case("wide", 4, 8, 32, own_process=True),
    "middle": Case("middle", 8, 4, 48),
    "longer": Case("narrow", 4, 8, 160),
    "more prompts": Case("middle", 24, 4, 24, prompt=48),
    "4 updates and KL": Case("middle", 8, 8, 32, updates=4, has_kl=True),
    "ragged, slow rewards": Case("wide", 8, 4, 96, ends=32, reward_s=0.15),
    "middle, own process": Case("middle", 8, 8, 64, own_process=True),
}
# Of two batch sizes and one width: each of another makes the GPU's kernels be compiled again.
CUDA = {
    "calibration: 24 layers, 16 x 8 x 256, 2 updates": Case("0.4b", 16, 8, 256, updates=2),
    "calibration: 12 layers, 8 x 8 x 768": Case("0.2b", 8, 8, 768),
    "24 layers, 8 x 8 x 512": Case("0.4b", 8, 8, 512),
    "12 layers, 16 x 8 x 512": Case("0.2b", 16, 8, 512),
    "24 layers, 16 x 8 x 256, slow rewards": Case("0.4b", 16, 8, 256, reward_s=0.05),
    "24 layers, 8 x 8 x 256, 4 updates and KL": Case("0.4b", 8, 8, 256, updates=4, has_kl=True),
    "12 layers, 8 x 8 x 1536": Case("0.2b", 8, 8, 1536),
    "24 layers, 16 x 8 x 256, two waves": Case("0.4b", 16, 8, 256, concurrency=64),
}
CALIBRATION = 2


def recipe(case: Case, name: str, place: Path, *, steps: int, device: str) -> dict[str, Any]:
    """The configuration as a recipe of `homeostat train`."""
    folder = place / case.shape
    prompts = {"type": "prompts", "path": str(folder / "prompts.jsonl"), "chat": False}
    options = {"seconds": case.reward_s, "process": os.getpid()}
    reward = {"type": "function", "path": f"{place / 'reward.py'}:waiting", "options": options}
    vocab = SIZES[case.shape].vocab
    stops = range(END_ID + 1, END_ID + 1 + (vocab // case.ends if case.ends else 0))
    return {
        "name": name,
        "runs_dir": str(place / "runs"),
        "algorithm": {"type": "grpo", **({"kl": {"coefficient": 0.01}} if case.has_kl else {})},
        "model": {"path": str(folder)},
        "data": {"train": [prompts], "max_length": 128},
        "engine": {"own_process": case.own_process, "max_concurrency": case.concurrency},
        "rollout": {
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "max_new_tokens": case.new,
            "stop_token_ids": list(stops),
        },
        "rewards": {"functions": [reward]},
        "trainer": {
            "device": device,
            "max_steps": steps,
            "lr": 1e-6,
            "threads": 1 if device == "cpu" else None,
            "updates_per_step": case.updates,
            "max_tokens_per_device": case.max_tokens if device == "cpu" else 18432,
        },
        "checkpoint": {"export": "off", "interval_steps": 10**6},
        "observe": {"console": "quiet", "report": False, "row_losses": False},
    }


def workload(case: Case, *, device: str) -> Workload:
    """The same configuration as the simulator is given it."""
    # Rows after the first update need log-probs from before it; KL needs those of a reference.
    scored = 1 - 1 / case.updates + case.has_kl
    return Workload(
        case.prompts,
        case.samples,
        case.prompt,
        _lengths(case),
        updates=case.updates,
        max_tokens=case.max_tokens if device == "cpu" else 18432,
        scored=scored,
        holds_reference=case.has_kl,
        reward_s=case.reward_s,
    )


def _lengths(case: Case) -> Lengths:
    if not case.ends:
        return Lengths(case.new, case.new)
    ended, reached = [], 0.0
    for length in range(1, case.new + 1):
        reached = 1 - (1 - 1 / case.ends) ** length if length < case.new else 1.0
        ended += [length] * (round(1000 * reached) - len(ended))
    return Lengths(statistics.fmean(ended), case.new, given=tuple(ended))


def model_shape(name: str) -> ModelShape:
    """The sizes of a shape of the benchmarks, as the simulator takes them."""
    own = SIZES[name]
    sizes = (own.layers, own.hidden, own.heads, own.kv_heads, own.head_dim, own.intermediate)
    return ModelShape(name, *sizes, own.vocab, tied=True)


class EnoughError(Exception):
    """Ends a run after its last step, before it saves a checkpoint, which nobody wants here."""


class Stop(Hooks):
    """Raises `EnoughError` after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def after_step(self, step: int, parts: Any) -> None:
        """End the run after the last step that is wanted."""
        if step == self.steps:
            raise EnoughError


@contextmanager
def fair_clock() -> Iterator[None]:
    """Let the clock of the loop stand while this process or a child waits for a core."""
    import psutil

    real, me = time.perf_counter, psutil.Process()
    known: dict[int, float] = {}

    def waited() -> float:
        for pid in [me.pid, *(child.pid for child in me.children(recursive=True))]:
            try:
                known[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):
                continue
        return sum(known.values())

    if not Path("/proc/self/schedstat").exists():
        yield
        return
    with patch.object(time, "perf_counter", lambda: real() - waited()):
        yield


def measure(
    case: Case, name: str, place: Path, *, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Train, and return the seconds of each stage in each step after those that warm up."""
    steps, device = arguments.steps, arguments.device
    config = build_config(recipe(case, name, place, steps=steps + 1, device=device), [], file=None)
    console = Console(file=io.StringIO())
    how = {"recipe": "", "command": ["bench"], "console": console, "log_level": "error"}
    with suppress(EnoughError), open_session(config, **how) as session:
        train_recipe(config, session, Stop(steps))
    records = [r for r in read_metrics(config.run_dir / "metrics.jsonl") if "time/step" in r]
    records = records[arguments.skip :]
    found = {stage: [r.get(key, 0.0) for r in records] for stage, key in STAGES.items()}
    found["step"] = [r["time/step"] for r in records]
    found["mean_length"] = [r["completions/mean_length"] for r in records]
    return found


def measure_all(cases: dict[str, Case], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all configurations in turn, and return what was measured of each."""
    import torch

    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory(prefix="simulator_") as scratch:
        place = Path(scratch)
        (place / "reward.py").write_text(REWARD, encoding="utf-8")
        for name in {case.shape: case for case in cases.values()}:
            write_folder(
                SIZES[name],
                place / name,
                device=device,
                dtype=DTYPES[device.type],
                num_prompts=256,
                prompt_tokens=32,
            )
        for number in range(arguments.rounds):
            for index, (name, case) in enumerate(cases.items()):
                with fair_clock():
                    found = measure(case, f"c{index}_{number}", place, arguments=arguments)
                for stage, values in found.items():
                    seconds[name].setdefault(stage, []).extend(values)
                line = {stage: round(statistics.median(v), 4) for stage, v in found.items()}
                print(name, line, flush=True)
                if arguments.out:
                    Path(arguments.out).write_text(json.dumps(seconds), encoding="utf-8")
    return seconds


def judge(
    cases: dict[str, Case], seconds: dict[str, Any], machine: Machine, *, device: str
) -> dict[str, Any]:
    """Fit the machine to the first configurations, and compare the others with what it predicts."""
    measured = []
    for name, case in cases.items():
        stages = {stage: statistics.median(values) for stage, values in seconds[name].items()}
        parts = sum(stages[stage] for stage in STAGES)
        stages["other"] = max(0.0, stages["step"] - parts)
        if not case.own_process:
            stages["publish"] = 0.0
        if workload(case, device=device).scored == 0:
            stages["other"], stages["score"] = stages["other"] + stages["score"], 0.0
        measured.append(
            Measured(
                name,
                model_shape(case.shape),
                workload(case, device=device),
                stages,
                max_concurrency=case.concurrency,
                sends_weights=case.own_process,
            )
        )
    fitted = fit(machine, measured[:CALIBRATION])
    rows = [_compared(one, fitted) for one in measured]
    held_out = [abs(row["error"]) for row in rows[CALIBRATION:]]
    return {
        "rows": rows,
        "worst_error": max(held_out),
        "within_15_percent": sum(error <= 0.15 for error in held_out),
        "rates": fitted.rates.as_dict(),
    }


def _compared(one: Measured, machine: Machine) -> dict[str, Any]:
    step = simulate(
        one.shape,
        one.workload,
        Layout(1, 1),
        machine,
        max_concurrency=one.max_concurrency,
        sends_weights=one.sends_weights,
    )
    found = predicted(step)
    return {
        "name": one.name,
        "step_s": round(one.seconds["step"], 4),
        "predicted_s": round(found["step"], 4),
        "error": round(found["step"] / one.seconds["step"] - 1, 4),
        "stages_s": {k: [round(one.seconds[k], 4), round(v, 4)] for k, v in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--skip", type=int, default=1, help="steps that warm up, not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", help="file for the raw seconds, written after every run")
    parser.add_argument("--again", help="raw seconds of an earlier call; nothing is trained")
    arguments = parser.parse_args()
    cases = CPU if arguments.device == "cpu" else CUDA
    if arguments.again:
        seconds = json.loads(Path(arguments.again).read_text(encoding="utf-8"))
    else:
        seconds = measure_all(cases, arguments)
    machine = load_machine("cpu_core" if arguments.device == "cpu" else "h200")
    result = common.machine(("torch", "triton")) | common.device_facts(arguments.device)
    result |= judge(cases, seconds, machine, device=arguments.device)
    for row in result["rows"]:
        print(
            f"{row['name']:40} {row['step_s']:8.3f} {row['predicted_s']:8.3f} {row['error']:+.1%}"
        )
    common.write_result(f"simulator_{arguments.device}", result)


if __name__ == "__main__":
    main()
