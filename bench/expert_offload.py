"""Claim: experts in host memory free most of a GPU, and losses and gradients keep their bits.

Layers like those of Qwen3-30B-A3B (128 experts, 8 of them for a token, 2048 x 768). The same two
updates are made with the experts on the GPU and with `trainer.backend.offload_experts`: peak memory
of the GPU, beside the estimate of `homeostat estimate`; and how many log-probs and summed gradients
of the first update have other bits. (The loss is not compared: a GPU adds up its terms in any
order.)

    python bench/expert_offload.py
    python bench/expert_offload.py --tiny --device cpu      # proves the script
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from homeostat.algorithms.sft import loss_spec
from homeostat.arrays import FloatArray
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.config.loading.load import build_config
from homeostat.train.build import local_trainer
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import Runtime
from homeostat.train.saving.frozen import checksums
from homeostat.types import Role, TokenRow, TrainBatch

PACKAGES = ("torch", "triton", "transformers")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16}
# Two micro-batches of so many rows.
NUM_ROWS, ROW_TOKENS = 16, 1024
LR = 1e-5


def config_of(folder: Path, *, offload: bool, attention: str) -> RunConfig:
    raw = {
        "name": "offload",
        "runs_dir": str(folder),
        "model": {"path": str(folder), "init": "random", "attention": attention},
        "data": {"train": [{"type": "messages", "path": "none.jsonl"}]},
        "trainer": {
            "max_steps": 1,
            "gradient_checkpointing": True,
            "backend": {"type": "local", "offload_experts": offload},
        },
    }
    return build_config(raw, [], file=None)


def batches_of(vocabulary: int, *, num_rows: int, length: int) -> list[TrainBatch]:
    rng = np.random.default_rng(0)
    rows = [
        TokenRow(number, rng.integers(0, vocabulary, length), np.ones(length, np.float32))
        for number in range(num_rows)
    ]
    return [TrainBatch.of(rows[start::2]) for start in range(2)]


def gradient_sums(trainer: LocalTrainer) -> dict[str, int]:
    training = trainer.roles[Role.POLICY].training
    assert training is not None, "the policy is trained"
    sums = checksums(training.optimizer.gradients.present().items())
    return {name: int(total) for name, total in sums.items()}


@dataclass(frozen=True)
class FirstUpdate:
    """Return what is compared of the first update."""

    logp: FloatArray
    gradients: dict[str, int]


def updates(
    config: RunConfig, runtime: Runtime, batches: list[TrainBatch]
) -> tuple[dict[str, Any], FirstUpdate]:
    """Make two updates; the second is timed."""
    is_cuda = runtime.device.type == "cuda"
    trainer = local_trainer(config.for_trainer, runtime)
    spec = loss_spec(SftConfig(), [row for batch in batches for row in batch.rows()])
    found: dict[str, Any] = {}
    first: FirstUpdate | None = None
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    # Later steps, of which the trainer measures nothing by passes over all weights.
    for step in (4, 5):
        started = time.perf_counter()
        trainer.accumulate(Role.POLICY, batches, spec, step=step)
        if is_cuda:
            torch.cuda.synchronize()
        found["gradients_s"] = round(time.perf_counter() - started, 3)
        sums = gradient_sums(trainer) if first is None else {}
        started = time.perf_counter()
        report = trainer.apply(Role.POLICY, step=step, learning_rate=LR)
        found["update_s"] = round(time.perf_counter() - started, 3)
        first = first or FirstUpdate(np.concatenate(report.row_logp), sums)
    estimate = estimate_update(config.for_trainer, runtime, batches[0], spec)
    found |= {"estimated_peak_bytes": estimate.peak, "estimated_host_bytes": estimate.host}
    if is_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    trainer.close()
    assert first is not None, "two updates were made"
    return found, first


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = {**SHAPE, **(TINY if arguments.tiny else {})}
    device = torch.device(arguments.device)
    runtime = Runtime(device, torch.bfloat16, torch.get_num_threads(), device.type == "cuda")
    size = {"num_rows": 4, "length": 32} if arguments.tiny else {}
    size = size or {"num_rows": NUM_ROWS, "length": ROW_TOKENS}
    batches = batches_of(shape["vocab_size"], **size)
    found: dict[str, Any] = {}
    first: dict[str, FirstUpdate] = {}
    with tempfile.TemporaryDirectory(prefix="homeostat-offload-") as text:
        folder = Path(text)
        (folder / "config.json").write_text(json.dumps(shape))
        for name, offload in (("on_device", False), ("offloaded", True)):
            config = config_of(folder, offload=offload, attention=arguments.attention)
            found[name], first[name] = updates(config, runtime, batches)
            print(name, found[name], flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    one, other = first["on_device"], first["offloaded"]
    found["logps"], found["gradients"] = len(one.logp), len(one.gradients)
    found["logps_of_other_bits"] = int((one.logp != other.logp).sum())
    differ = [name for name, total in one.gradients.items() if other.gradients[name] != total]
    found["gradients_of_other_bits"] = len(differ)
    return found


def main() -> None:
    parser = common.gpu_parser(__doc__)
    parser.add_argument("--attention", default="auto", help="model.attention")
    arguments = parser.parse_args()
    facts = common.facts_of(arguments, PACKAGES) | common.device_facts(arguments.device)
    result = facts | {"shape": SHAPE, "tokens": NUM_ROWS * ROW_TOKENS} | measure(arguments)
    if arguments.tiny:
        print(json.dumps(result))
    else:
        common.write_result("expert_offload", result)


if __name__ == "__main__":
    main()
