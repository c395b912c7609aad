"""Measure how much of the GPU's matrix-product speed the trainer uses (MFU).

    python bench/train_mfu.py                          # all cases
    python bench/train_mfu.py --only 1.5b-32k --profile
    python bench/train_mfu.py --device cpu --tiny      # that the script works

Shapes of Qwen2 with random weights go through LocalTrainer.accumulate and apply, AdamW included, in
bf16 with fp32 masters: supervised rows of 2,048 packed tokens, or one row of all tokens;
and one GRPO update (32 prompts of 64 tokens x 8 samples of 512, entropy measured).

    model FLOPs = 6 P T + 6 V D M + 6 L H d sum_i l_i^2
        P weights of the layers' matrices, T tokens (a prompt that rows share counts once), V D the
        head, M trained tokens, l_i the rows' lengths: attention is causal, and backward is twice
        forward. Nothing that is computed again counts.
    MFU = model FLOPs / seconds / peak;    peak: bf16 products of 8192 x 8192, in the same run

Two updates warm up, then the median of five counts. Some cases are measured in other ways, too:
`plain` is the same code without kernels, `selective` with trainer.gradient_checkpointing=selective.
The last line printed is the JSON; that of all cases is also written to bench/results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import common
import numpy as np
import torch
from shapes import DTYPES, SHAPES, Shape

from homeostat.algorithms import sft
from homeostat.algorithms.policy import policy_spec
from homeostat.config.algorithm import GrpoConfig, SftConfig
from homeostat.config.optimizer import AdamWConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import LoadedModel, model_sheet
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.ops import kernels
from homeostat.ops.attention import resolve_kernel
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.types import LossSpec, Role, TokenRow, TrainBatch

# Steps 1 to 3 and 10 are measured by the trainer's own probes; those between are not.
WARMUP_STEPS, TIMED_STEPS, PROBED_STEP = (1, 2), (4, 5, 6, 7, 8), 10
ROW_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """`row_tokens` 0: GRPO. `ways`: how it is measured besides."""

    shape: str
    tokens: int
    row_tokens: int
    ways: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        size = f"{self.tokens // 1024}k" if self.tokens >= 1024 else f"{self.tokens}"
        if not self.row_tokens:
            return f"{self.shape}-grpo"
        return f"{self.shape}-{size}-{'one' if self.row_tokens == self.tokens else 'packed'}"


CASES = (
    Case("1.5b", 32_768, ROW_TOKENS, ways=("plain", "selective")),
    Case("0.5b", 36_864, 0, ways=("plain",)),
    Case("1.5b", 32_768, 32_768),
    Case("1.5b", 8192, ROW_TOKENS),
    Case("1.5b", 8192, 8192),
    Case("0.5b", 32_768, ROW_TOKENS),
    Case("0.5b", 32_768, 32_768),
    Case("0.5b", 8192, ROW_TOKENS),
    Case("0.5b", 8192, 8192),
)
TINY_CASES = (
    Case("tiny", 256, 64, ways=("plain", "selective")),
    Case("tiny", 512, 0),
    Case("tiny", 128, 128),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One update: its micro-batches, its loss and its model FLOPs."""

    batches: list[TrainBatch]
    spec: LossSpec
    flops: float

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)


def work_of(case: Case) -> Work:
    shape, rng = SHAPES[case.shape], np.random.default_rng(0)
    rows = list(_sft_rows(case, shape, rng) if case.row_tokens else _grpo_rows(case, shape, rng))
    per_batch = case.tokens // len(rows[0])
    batches = [TrainBatch.of(rows[at : at + per_batch]) for at in range(0, len(rows), per_batch)]
    trained = sum(int((batch.weights_N != 0).sum()) for batch in batches)
    if case.row_tokens:
        spec, distinct = sft.loss_spec(SftConfig(), rows), sum(map(len, rows))
    else:
        how = {"temperature": 1.0, "kl_coefficient": None}
        spec = policy_spec(GrpoConfig(type="grpo"), denominator=float(trained), **how)
        # The first row of each group has the prompt's tokens.
        distinct = trained + sum(len(row) for row in rows[::8]) - trained // 8
    squares = sum(len(row) ** 2 for row in rows)
    attention = 6.0 * shape.layers * shape.heads * shape.head_dim * squares
    matrices = 6.0 * (shape.body_params * distinct + shape.head_params * trained)
    return Work(batches, spec, matrices + attention)


def _sft_rows(case: Case, shape: Shape, rng: np.random.Generator) -> Iterator[TokenRow]:
    for index in range(case.tokens // case.row_tokens):
        tokens_T = rng.integers(0, shape.vocab, case.row_tokens)
        yield TokenRow(index, tokens_T, np.ones(case.row_tokens, dtype=np.float32))


def _grpo_rows(case: Case, shape: Shape, rng: np.random.Generator) -> Iterator[TokenRow]:
    """Groups of eight, one after the other."""
    is_tiny = case.shape == "tiny"
    num_prompts, num_prompt_tokens, num_new = (2, 16, 48) if is_tiny else (32, 64, 512)
    weights_T = np.repeat(np.float32([0, 1]), [num_prompt_tokens, num_new])
    for prompt in range(num_prompts):
        prompt_T = rng.integers(0, shape.vocab, num_prompt_tokens)
        for sample in range(8):
            tokens_T = np.concatenate([prompt_T, rng.integers(0, shape.vocab, num_new)])
            known = {"advantage": (sample - 3.5) / 2.3, "engine_logp": -np.log(shape.vocab)}
            columns = {key: np.full(len(tokens_T), known[key], np.float32) for key in known}
            yield TokenRow(prompt * 8 + sample, tokens_T, weights_T, columns)


def build_trainer(case: Case, device: torch.device, *, way: str) -> LocalTrainer:
    dtype = DTYPES[device.type]
    config = SHAPES[case.shape].hf_config(dtype)
    shape = decoder_config(config)
    kernel = resolve_kernel("auto", device_type=device.type, dtype=dtype, head_dim=shape.head_dim)
    torch.manual_seed(0)
    with torch.device(device):
        module = Decoder(shape, kernel=kernel).to(dtype)
    if way == "selective":
        module.gradient_checkpointing = "selective"
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    runtime = Runtime(device, dtype, threads=1, pin_memory=device.type == "cuda")
    loaded = LoadedModel(module.train(), model_sheet(module, config, None, {"attention": kernel}))
    config = TrainerConfig(optimizer=AdamWConfig(weight_decay=0.01))
    models = {Role.POLICY: RoleModel(loaded, config)}
    return LocalTrainer(models, config, runtime=runtime, seed=0)


def update(trainer: LocalTrainer, work: Work, step: int) -> float:
    """Seconds of one update, from idle to idle."""
    _wait(trainer.runtime.device)
    start = time.perf_counter()
    trainer.accumulate(Role.POLICY, work.batches, work.spec, step=step)
    trainer.apply(Role.POLICY, step=step, learning_rate=1e-6)
    _wait(trainer.runtime.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_syncs(trainer: LocalTrainer, work: Work) -> list[str]:
    """Return where `accumulate` waited for the device, according to torch."""
    if trainer.runtime.device.type != "cuda":
        return []
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.accumulate(Role.POLICY, work.batches, work.spec, step=4)
    torch.cuda.set_sync_debug_mode("default")
    trainer.discard(Role.POLICY)
    return [f"{warning.filename}:{warning.lineno}" for warning in seen]


def measure(case: Case, device: torch.device, *, way: str, profile: bool) -> dict[str, Any]:
    work, is_gpu = work_of(case), device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    trainer = build_trainer(case, device, way=way)
    reserved = []
    with kernels.plain() if way == "plain" else nullcontext():
        first_s = [update(trainer, work, step) for step in WARMUP_STEPS]
        laps = []
        for step in TIMED_STEPS:
            laps.append(update(trainer, work, step))
            reserved.append(torch.cuda.memory_reserved(device) if is_gpu else 0)
        probed_s = update(trainer, work, PROBED_STEP)
        syncs = num_syncs(trainer, work)
        if profile:
            print_profile(trainer, work)
    seconds = statistics.median(laps)
    return {
        "seconds": round(seconds, 4),
        "least_s": round(min(laps), 4),
        "first_s": round(first_s[0], 2),
        "probed_s": round(probed_s, 4),
        "tokens_per_s": round(work.num_tokens / seconds),
        "model_tflop": round(work.flops / 1e12, 2),
        "tflop_per_s": round(work.flops / 1e12 / seconds, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if is_gpu else None,
        "reserved_gib": [round(size / 2**30, 2) for size in reserved] if is_gpu else None,
        "syncs_in_accumulate": syncs,
        "attention": trainer.sheet.facts["attention"],
    }


def print_profile(trainer: LocalTrainer, work: Work) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    is_gpu = trainer.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    with record(activities=activities) as profiler:
        update(trainer, work, TIMED_STEPS[-1])
    order = "self_cuda_time_total" if is_gpu else "self_cpu_time_total"
    kinds = profiler.key_averages()
    # Operators carry the time of the kernels that they launch: only kernels are summed.
    print(kinds.table(sort_by=order, row_limit=25, max_name_column_width=70), flush=True)


def measured_peak(device: torch.device) -> float:
    """FLOP/s of the best of several bursts of products."""
    is_gpu = device.type == "cuda"
    size = 8192 if is_gpu else 512
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    if is_gpu:
        left, right = left.bfloat16(), right.bfloat16()
    best = 0.0
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        for _ in range(10):
            left @ right
        _wait(device)
        best = max(best, 10 * 2.0 * size**3 / (time.perf_counter() - start))
    return best


def guarded(case: Case, device: torch.device, **how: Any) -> dict[str, Any]:
    """Measure a case; return the reason instead of a figure if it does not fit."""
    try:
        return measure(case, device, **how)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).split(". ")[0]}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU trains at once")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--plain", action="store_true", help="all cases, without kernels alone")
    parser.add_argument("--profile", action="store_true", help="the 25 longest kernels of each")
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    peak = measured_peak(device)
    print(f"peak {peak / 1e12:.0f} TFLOP/s", flush=True)
    results: dict[str, Any] = {}
    for case in TINY_CASES if arguments.tiny else CASES:
        if not case.name.startswith(arguments.only):
            continue
        for way in ("plain",) if arguments.plain else ("", *case.ways):
            name = f"{case.name}-{way}" if way else case.name
            found = guarded(case, device, way=way, profile=arguments.profile)
            if "seconds" in found:
                found["floor_s"] = round(found["model_tflop"] * 1e12 / peak, 4)
                found["mfu"] = round(found["floor_s"] / found["seconds"], 4)
            results[name] = found
            print(name, found, flush=True)
    facts = common.machine(("torch", "triton", "numpy"))
    if arguments.commit:
        facts["commit"] = arguments.commit
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    result = {
        **facts,
        "gpu": gpu,
        "peak_tflop_per_s": round(peak / 1e12, 1),
        "shapes": {name: asdict(SHAPES[name]) for name in sorted({c.shape for c in CASES})},
        "cases": results,
    }
    if arguments.tiny or arguments.only or arguments.plain:
        print(json.dumps(result))
    else:
        common.write_result("train_mfu", result)


if __name__ == "__main__":
    main()
