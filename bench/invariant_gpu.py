"""Claim: in invariant numerics engine and trainer give every token the same log-prob; at this cost.

Qwen2's 0.5 B shape with random weights in bf16, in fast and in invariant numerics:

    decode   tokens a second of a batch of 32 in its steady phase (bench/engine_decode.py)
    train    tokens a second, forward and backward, of 16,384 tokens in rows of 2,048; no optimizer
    score    the same tokens, forward only
    logp     what the engine sampled with, against engine.score and against a training forward that
             keeps its activations, all completions packed: mean and largest difference

    python bench/invariant_gpu.py
    python bench/invariant_gpu.py --profile                  # the longest kernels
    python bench/invariant_gpu.py --tiny --device cpu        # proves the script
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common
import floor
import numpy as np
import torch
from engine_decode import PROMPT_TOKENS, Bench, engine_of, generate, profile
from shapes import DTYPES, SHAPES, random_decoder
from torch import Tensor

from homeostat.config.trainer import TrainerConfig
from homeostat.models.decoder import Decoder
from homeostat.ops.attention import PackedLayout
from homeostat.ops.linear import Numerics
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, TokenRow

PACKAGES = ("torch", "triton", "numpy")
BATCH, NEW_TOKENS = 32, 128
ROWS, ROW_TOKENS = 8, 2048
LAPS = 3


def decoded(bench: Bench, engine: NativeEngine, *, batch: int) -> tuple[float, list[Completion]]:
    """Tokens a second, and what was sampled."""
    generate(engine, bench.requests(batch, min(8, bench.new_tokens), seed=0))
    found = generate(engine, bench.requests(batch, bench.new_tokens, seed=1))
    return found.steady_tokens / found.steady_s, found.completions


def rows_of(bench: Bench, completions: list[Completion]) -> list[TokenRow]:
    prompts = bench.prompts(len(completions))
    rows = []
    for completion in completions:
        prompt_T = prompts[int(completion.request_id.split("/")[1])]
        whole_T = np.concatenate([prompt_T, completion.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= PROMPT_TOKENS).astype(np.float32)
        rows.append(TokenRow(len(rows), whole_T, is_new_T))
    return rows


def trainer_logp(model: Decoder, rows: list[TokenRow], device: torch.device) -> Tensor:
    """[M]: of the tokens of weight > 0, by a forward that a backward pass can follow."""
    lengths = [len(row) for row in rows]
    tokens_N = torch.from_numpy(np.concatenate([row.tokens_T for row in rows])).to(device)
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(device)
    is_new_N = np.concatenate([row.weights_T for row in rows]) > 0
    at_M = torch.from_numpy(np.flatnonzero(is_new_N)).to(device)
    hidden_ND = model.hidden(tokens_N, positions_N, PackedLayout.of(lengths, device))
    return token_logprobs(
        hidden_ND[at_M - 1],
        model.output_weight(),
        tokens_N[at_M],
        chunk_bytes=TrainerConfig().logits_bytes(device.type),
        numerics=model.numerics,
    )


def differences(
    bench: Bench, model: Decoder, engine: NativeEngine, completions: list[Completion]
) -> dict[str, Any]:
    rows = rows_of(bench, completions)
    sampled_M = np.concatenate([completion.engine_logp_T for completion in completions])
    others = {
        "score": np.concatenate(engine.score(rows, temperature=1.0)),
        "training": trainer_logp(model, rows, bench.device).detach().cpu().numpy(),
    }
    found: dict[str, Any] = {"tokens": len(sampled_M)}
    for name, logp_M in others.items():
        gap_M = np.abs(logp_M.astype(np.float64) - sampled_M)
        found[f"{name}_mean"], found[f"{name}_max"] = float(gap_M.mean()), float(gap_M.max())
    return found


def trained(bench: Bench, model: Decoder, *, num_rows: int, length: int) -> dict[str, Any]:
    """Seconds of a pass over the same rows, forward alone and with its backward."""
    rng = np.random.default_rng(0)
    weights_T = np.ones(length, dtype=np.float32)
    weights_T[0] = 0.0
    rows = [
        TokenRow(index, rng.integers(0, bench.shape.vocab, length), weights_T)
        for index in range(num_rows)
    ]

    def forward_backward() -> None:
        model.zero_grad()
        trainer_logp(model, rows, bench.device).mean().neg().backward()

    def forward() -> None:
        with torch.no_grad():
            trainer_logp(model, rows, bench.device)

    both_s = floor.median_seconds(forward_backward, bench.device, laps=LAPS)
    forward_s = floor.median_seconds(forward, bench.device, laps=LAPS)
    num_tokens = num_rows * length
    return {
        "train_tokens_per_s": round(num_tokens / both_s),
        "score_tokens_per_s": round(num_tokens / forward_s),
        "train_s": round(both_s, 4),
        "score_s": round(forward_s, 4),
    }


def measure(bench: Bench, numerics: Numerics, arguments: argparse.Namespace) -> dict[str, Any]:
    place = {"device": bench.device, "dtype": bench.dtype}
    model = random_decoder(bench.shape, numerics=numerics, **place)
    batch, (num_rows, length) = (4, (2, 48)) if arguments.tiny else (BATCH, (ROWS, ROW_TOKENS))
    engine = engine_of(bench, model, max_batch=batch)
    rate, completions = decoded(bench, engine, batch=batch)
    found: dict[str, Any] = {
        "decode_tokens_per_s": round(rate, 1),
        "decode_step_ms": round(1e3 * batch / rate, 3),
        "logp_difference": differences(bench, model, engine, completions),
    }
    if arguments.profile:
        print(profile(bench, engine, batch), flush=True)
    engine.close()
    found |= trained(bench, model, num_rows=num_rows, length=length)
    if arguments.profile:
        print_training(bench, model, num_rows=num_rows, length=length)
    print(f"{numerics}: {found}", flush=True)
    return found


def print_training(bench: Bench, model: Decoder, *, num_rows: int, length: int) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler(activities=activities) as found:
        trained(bench, model, num_rows=num_rows, length=length)
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=60))


def main() -> None:
    arguments = common.gpu_parser(__doc__).parse_args()
    device = torch.device(arguments.device)
    dtype = DTYPES[device.type]
    rates = floor.measure_rates(device, dtype)
    name, new_tokens = ("tiny", 8) if arguments.tiny else ("0.5b", NEW_TOKENS)
    bench = Bench(SHAPES[name], device, dtype, rates, new_tokens)
    facts = common.facts_of(arguments, PACKAGES) | common.device_facts(arguments.device)
    result = facts | rates.to_json()
    result |= {"shape": name, "dtype": str(dtype).removeprefix("torch.")}
    for numerics in ("fast", "invariant"):
        result[numerics] = measure(bench, numerics, arguments)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    fast, invariant = result["fast"], result["invariant"]
    for what in ("decode", "train", "score"):
        key = f"{what}_tokens_per_s"
        result[f"{what}_cost"] = round(fast[key] / invariant[key], 3)
    if arguments.tiny:
        print(json.dumps(result))
    else:
        common.write_result("invariant_gpu", result)


if __name__ == "__main__":
    main()
