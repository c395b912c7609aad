"""Claim: LoRA decodes at 0.9 of the full model's speed or more, and trains at least 1.1x faster.

Qwen2's 0.5 B shape with random weights (on a CPU one thread, and SmolLM2's 135 M); adapters of rank
16 on all seven kinds of linear maps, with B away from zero. Decoding: tokens per second of the
native engine's steady phase at batches of 1, 32 and 256, on a GPU also of Qwen2's 1.5 B. Training:
seconds of an update of 32 x 8 rows of 64 + 512 tokens, as a GRPO step has them, by micro-batches of
36,864 tokens, and of half as many, where launching takes longer than computing. Both sides are
measured in one process, decoding in turns, and medians compared. The log-probs that the engine
gives what it samples are compared with the trainer's function, for both.

    python bench/lora_gpu.py
    python bench/lora_gpu.py --profile              # the longest kernels of the adapted side
    python bench/lora_gpu.py --device cpu --only decode --batches 1 8 --new-tokens 48
    python bench/lora_gpu.py --tiny --device cpu    # proves the script
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from typing import Any

import common
import engine_decode
import floor
import torch
import train_mfu
from shapes import DTYPES, SHAPES, random_decoder

from homeostat.config.model import LoraConfig
from homeostat.config.trainer import AdamWConfig, TrainerConfig
from homeostat.models.build import LoadedModel, model_sheet
from homeostat.models.decoder import Decoder
from homeostat.models.lora import adapter_state, apply_lora
from homeostat.models.side_by_side import lay_adapters_side_by_side
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.types import Role

PACKAGES = ("torch", "triton", "transformers", "numpy")
ADAPTER = LoraConfig(rank=16, alpha=32.0)
SIDES = ("full", "lora")
ROUNDS = 3
B_STD = 0.02


def model_of(side: str, size: str, *, device: torch.device) -> Decoder:
    """Return the model, with adapters that change what it computes if `side` is lora."""
    model = random_decoder(SHAPES[size], device=device, dtype=DTYPES[device.type])
    if side == "lora":
        apply_lora(model, ADAPTER, seed=0)
        for name, tensor in adapter_state(model):
            if "lora_B" in name:
                torch.nn.init.normal_(tensor, std=B_STD)
        if device.type == "cuda":
            lay_adapters_side_by_side(model)
    return model


def decoding(size: str, *, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    rates, dtype = floor.measure_rates(device, DTYPES[device.type]), DTYPES[device.type]
    new_tokens = 24 if arguments.tiny else arguments.new_tokens
    bench = engine_decode.Bench(SHAPES[size], device, dtype, rates, new_tokens)
    batches = [2, 6] if arguments.tiny else arguments.batches
    models = {side: model_of(side, size, device=device).requires_grad_(False) for side in SIDES}
    found: dict[str, Any] = {}
    for batch in batches:
        engines = {
            side: engine_decode.engine_of(bench, model, max_batch=batch)
            for side, model in models.items()
        }
        rounds: dict[str, list[float]] = {side: [] for side in SIDES}
        gaps: dict[str, Any] = {}
        for number in range(ROUNDS + 1):
            for side, engine in engines.items():
                seed = 1 + number
                done = engine_decode.generate(engine, bench.requests(batch, new_tokens, seed=seed))
                # The first round captures graphs.
                if number:
                    rounds[side].append(done.steady_tokens / done.steady_s)
                else:
                    gaps[side] = engine_decode.logp_differences(
                        bench, engine, done.completions, batch
                    )
        if arguments.profile:
            print(engine_decode.profile(bench, engines["lora"], batch), flush=True)
        speeds = {side: statistics.median(rounds[side]) for side in SIDES}
        found[str(batch)] = {
            **{side: {"tokens_per_s": round(speeds[side], 1), **gaps[side]} for side in SIDES},
            "ratio": round(speeds["lora"] / speeds["full"], 3),
        }
        print(json.dumps({"batch": batch, **found[str(batch)]}), flush=True)
        for engine in engines.values():
            engine.close()
    return found


def trainer_of(side: str, size: str, *, device: torch.device) -> LocalTrainer:
    model = model_of(side, size, device=device)
    dtype = DTYPES[device.type]
    sheet = model_sheet(model, SHAPES[size].hf_config(dtype), None, {"attention": model.kernel})
    runtime = Runtime(device, dtype, threads=1, pin_memory=device.type == "cuda")
    config = TrainerConfig(optimizer=AdamWConfig(weight_decay=0.01))
    models = {Role.POLICY: RoleModel(LoadedModel(model.train(), sheet), config)}
    return LocalTrainer(models, config, runtime=runtime, seed=0)


def training(size: str, tokens: int, *, device: torch.device, profile: bool) -> dict[str, Any]:
    """Measure updates by micro-batches of so many tokens."""
    work = train_mfu.work_of(train_mfu.Case(size, tokens, 0))
    found: dict[str, Any] = {}
    for side in SIDES:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer = trainer_of(side, size, device=device)
        laps = [train_mfu.update(trainer, work, step) for step in range(1, 3 + ROUNDS)][2:]
        if profile and side == "lora":
            train_mfu.print_profile(trainer, work)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        found[side] = {
            "update_s": round(statistics.median(laps), 4),
            "peak_gib": None if peak is None else round(peak, 2),
        }
        print(json.dumps({side: found[side]}), flush=True)
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found["ratio"] = round(found["full"]["update_s"] / found["lora"]["update_s"], 3)
    print(json.dumps({"tokens": tokens, "ratio": found["ratio"]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: proves the script")
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 32, 1])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tokens", nargs="+", type=int, default=[36_864, 18_432])
    parser.add_argument("--profile", action="store_true", help="the longest kernels of LoRA")
    common.add_commit(parser)
    parser.add_argument("--only", choices=("decode", "train"), help="one part of it")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = "tiny" if arguments.tiny else {"cuda": "0.5b", "cpu": "135m"}[device.type]
    if device.type == "cpu":
        torch.set_num_threads(1)
    result = common.facts_of(arguments, PACKAGES) | common.device_facts(arguments.device)
    result |= {"shape": size, "rank": ADAPTER.rank}
    if arguments.only != "train":
        result["decode"] = decoding(size, device=device, arguments=arguments)
        if device.type == "cuda" and not arguments.tiny:
            result["decode_1_5b"] = decoding("1.5b", device=device, arguments=arguments)
    if arguments.only != "decode":
        result["train"] = {
            str(tokens): training(size, tokens, device=device, profile=arguments.profile)
            for tokens in ([512] if arguments.tiny else arguments.tokens)
        }
    print(json.dumps(result), flush=True)
    if not arguments.tiny:
        part = "" if arguments.only is None else f"_{arguments.only}"
        common.write_result(f"lora_{device.type}{part}", result)


if __name__ == "__main__":
    main()
