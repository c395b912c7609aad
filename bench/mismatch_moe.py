"""Models with experts in `bench/mismatch.py`: an engine in e4m3, with and without routing replay.

An engine in e4m3 samples and records its routes; the trainer, in the weights' own dtype, scores the
same tokens as a run does: choosing its experts itself (off), with the engine's experts (ids), and
with the engine's experts and weights (weights). Invariant numerics, engine and trainer alike, are
measured beside them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import e4m3
import numpy as np
import torch

from homeostat.algorithms.mismatch import TokenPairs, mismatch_metrics
from homeostat.columns import ROUTES, dense
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models import hf
from homeostat.models.build import LoadedModel, load_model
from homeostat.models.decoder import Decoder
from homeostat.models.lora import merged_state
from homeostat.rollout.engine import Engine, Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.train.local import LocalTrainer
from homeostat.train.scoring import score
from homeostat.types import Role, TokenRow, TrainBatch

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
NUM_PROMPTS, NUM_SAMPLES, PROMPT_TOKENS = 8, 4, 24
REPLAYED = {
    "off": (),
    "ids": ROUTES[:1],
    "weights": ROUTES,
}
# Factors on random weights that make a trained model's habits: layers that add to the residual
# stream, routers that are decided, and next-token distributions that are neither flat nor sure.
SPREAD = {"o_proj.weight": 8.0, "down_proj": 30.0, "gate.weight": 4.0, "lm_head.weight": 8.0}


def build_model(folder: Path) -> None:
    """Write random weights in HF format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    loaded = load(folder, init="random", device="cpu", dtype=torch.float32, numerics="fast")
    with torch.no_grad():
        for name, parameter in loaded.module.named_parameters():
            factor = next((f for end, f in SPREAD.items() if name.endswith(end)), 1.0)
            parameter.mul_(factor)
    hf.save_hf(merged_state(loaded.module), folder, source_config=SHAPE)


def load(path: Path, *, init: str, device: str, dtype: torch.dtype, numerics: str) -> LoadedModel:
    return load_model(
        ModelConfig(path=str(path), init=init, numerics=numerics),
        None,
        dtype=dtype,
        device=torch.device(device),
        seed=0,
        gradient_checkpointing=False,
    )


def sampled(model: Decoder, *, device: str, new_tokens: int, records: bool) -> list[TokenRow]:
    """Sample from a model; rows have the engine's log-probs and, if it records, its routes."""
    engine: Engine = NativeEngine(
        model,
        NativeEngineConfig(decode="plain"),
        device=torch.device(device),
        max_tokens=PROMPT_TOKENS + new_tokens,
        decode=None,
        chunk_bytes=TrainerConfig().logits_bytes("cpu"),
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS))
    requests = [
        Request(
            f"{p}/{s}",
            tokens_T,
            Sampling(new_tokens),
            seed=0,
            session_key=str(p),
            routed_experts=records,
            routed_weights=records,
        )
        for p, tokens_T in enumerate(prompts)
        for s in range(NUM_SAMPLES)
    ]
    rows = []
    for request, found in zip(requests, generate(engine, requests, timeout_s=600), strict=True):
        tokens_T = np.concatenate([request.tokens_T, found.tokens_T])
        weights_T = (np.arange(len(tokens_T)) >= PROMPT_TOKENS).astype(np.float32)
        logp_T = np.concatenate([np.zeros(PROMPT_TOKENS), found.engine_logp_T])
        columns = {"engine_logp": logp_T.astype(np.float32)}
        if records:
            parts = (found.prompt_columns, found.columns)
            for name in ROUTES:
                columns[name] = np.concatenate([dense(part[name]) for part in parts])
        rows.append(TokenRow(len(rows), tokens_T, weights_T, columns))
    engine.close()
    return rows


def compared(trainer: LocalTrainer, rows: list[TokenRow], names: tuple[str, ...]) -> dict[str, Any]:
    """Score rows with these routes, and compare with what the engine said of them."""
    keep = ("engine_logp", *names)
    rows = [replace(row, columns={name: row.columns[name] for name in keep}) for row in rows]
    batches = [TrainBatch.of(rows[start : start + 8]) for start in range(0, len(rows), 8)]
    trainer_logp_M = np.concatenate(score(trainer, Role.POLICY, batches)).astype(np.float64)
    engine = [dense(row.columns["engine_logp"])[row.weights_T > 0] for row in rows]
    engine_logp_M = np.concatenate(engine).astype(np.float64)
    gap_M = trainer_logp_M - engine_logp_M
    pairs = TokenPairs(
        engine_logp_M=engine_logp_M,
        trainer_logp_M=trainer_logp_M,
        row_of_M=np.repeat(np.arange(len(rows)), [len(part) for part in engine]),
    )
    return {
        "tokens": len(gap_M),
        "mean_logp": float(engine_logp_M.mean()),
        "outside_share": float((np.abs(gap_M) > np.log(2)).mean()),
        # KL of the engine from the trainer, on the engine's own samples (k3: no sign, less noise).
        "kl": float((np.expm1(gap_M) - gap_M).mean()),
        "largest_gap": float(np.abs(gap_M).max()),
        **mismatch_metrics(pairs),
    }


def measure(path: Path, arguments: argparse.Namespace, trainer_of: Any) -> dict[str, Any]:
    """Return, by name of the row, how far engine and trainer are apart."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    place = {"device": arguments.device, "dtype": dtype, "init": "pretrained"}
    how = {"device": arguments.device, "new_tokens": arguments.new_tokens}
    found: dict[str, Any] = {}
    loaded = load(path, numerics="fast", **place)
    trainer = trainer_of(loaded, arguments)
    engine = e4m3.in_e4m3(loaded.module)
    rows = sampled(engine, records=True, **how)
    for mode, names in REPLAYED.items():
        found[f"moe e4m3, {mode}"] = compared(trainer, rows, names)
    loaded = load(path, numerics="invariant", **place)
    rows = sampled(loaded.module, records=False, **how)
    found["moe invariant"] = compared(trainer_of(loaded, arguments), rows, ())
    off, ids = found["moe e4m3, off"], found["moe e4m3, ids"]
    found["replay"] = {
        "outside_share_falls_by": off["outside_share"] / max(ids["outside_share"], 1e-12),
        "kl_falls_by": off["kl"] / ids["kl"],
        "invariant_largest_gap": found["moe invariant"]["largest_gap"],
    }
    return found
