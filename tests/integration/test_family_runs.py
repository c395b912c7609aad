"""Runs of families with a block of their own, and of models that transformers computes.

Each run samples with the engine and trains on it; the log-probs of both are compared by the run
itself (sampling_logp_difference), and a run in two halves is a run in one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import runs, tiny_rl
from transformers import AutoConfig, AutoModelForCausalLM

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.errors import ConfigError, ModelError
from homeostat.observe.jsonl import read_metrics
from homeostat.run.preflight.check import Preflight

GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8, "sliding_window": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 2.0, **GEMMA},
    "gemma3_text": {"model_type": "gemma3_text", **GEMMA},
    "phi3": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "sliding_window": 4,
        "pad_token_id": 0,
    },
    "granite": {"model_type": "granite", "embedding_multiplier": 6.0, "logits_scaling": 2.0},
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "pad_token_id": 0},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
}
# No family of the native decoder: it has norms with biases, and two maps in its MLP.
STARCODER = {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "gemma2"]


def model_of(folder: Path, settings: dict[str, Any]) -> Path:
    """Write a folder with this config; what Qwen's config says of its own block is removed."""
    model = tiny_rl.write_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    for key in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
        config.pop(key, None)
    for key in ("embedding_dropout", "residual_dropout", "attention_dropout"):
        settings = {**settings, key: 0.0}
    config |= {"architectures": None, **settings}
    (model / "config.json").write_text(json.dumps(config))
    return model


def recipe(folder: Path, name: str, steps: int, *overrides: str) -> RunConfig:
    sections = {"checkpoint": {"interval_steps": 2, "export": "final"}}
    raw = tiny_rl.recipe(folder, name=name, **sections)
    keys = [f"trainer.max_steps={steps}", "trainer.schedule={type: constant}", *overrides]
    return build_config(raw, keys, file=None)


def in_one_and_in_halves(folder: Path, *overrides: str) -> RunConfig:
    whole = recipe(folder, "whole", 4, *overrides)
    runs.train(whole)
    for steps in (2, 4):
        halves = recipe(folder, "halves", steps, *overrides)
        runs.train(halves)
    assert runs.final_tensors(whole) == runs.final_tensors(halves)
    assert runs.losses(whole) == runs.losses(halves)
    assert len(runs.losses(whole)) > 0
    return whole


def require_agreement(config: RunConfig) -> None:
    """The engine's log-probs are the trainer's to rounding in every step."""
    records = read_metrics(config.run_dir / "metrics.jsonl")
    errors = [record["sampling/sampling_logp_difference/max"] for record in records]
    assert errors
    assert max(errors) < 1e-4


def require_export(config: RunConfig, model_type: str) -> None:
    (folder,) = config.run_dir.glob("checkpoints/step_00000004/hf")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.config.model_type == model_type
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert model(torch.arange(6)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gemma2", *SLOW])
def test_a_family_learns_by_rl_and_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    model_of(tmp_path, FAMILIES[name])
    config = in_one_and_in_halves(tmp_path)
    require_agreement(config)
    require_export(config, name)


def test_any_model_of_transformers_learns_by_rl_and_resumes_to_the_bit(tmp_path: Path) -> None:
    model_of(tmp_path, STARCODER)
    config = in_one_and_in_halves(tmp_path, "model.implementation=transformers")
    require_agreement(config)
    require_export(config, "starcoder2")


PRECISIONS = {
    "fp8": ("trainer.fp8={recipe: rowwise}",),
    "int4": ("trainer.int4={group_size: 32}",),
    "int4 engine": ("engine.quantization=int4",),
    "nf4": ("lora={rank: 2, alpha: 4}", "model.quantization=nf4"),
    "fp8 cache": ("engine.kv_cache_dtype=fp8",),
    "dora": ("lora={rank: 2, alpha: 4, dora: true}",),
    "invariant": ("model.numerics=invariant",),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["gemma2", "phi3", "glm4", "olmo2"])
def test_precisions_work_for_families(name: str, precision: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, FAMILIES[name])
    # An adapter needs weights to adapt.
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    config = recipe(tmp_path, "run", 2, "model.init=pretrained", *PRECISIONS[precision])
    runs.train(config)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    assert len(records) == 2
    limit = {"invariant": 0.0, "dora": 1e-4, "nf4": 1e-4}.get(precision, 0.5)
    differences = [record["sampling/sampling_logp_difference/max"] for record in records]
    assert max(differences) <= limit


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_memory_is_estimated_for_families(name: str, tmp_path: Path) -> None:
    model_of(tmp_path, FAMILIES[name])
    config = recipe(tmp_path, "run", 2)
    preflight = Preflight(config, progress=lambda done, total: None)
    preflight.read_inputs()
    plan = preflight.memory_plan(config)
    preview = preflight.preview
    assert preview is not None
    assert plan.update.held >= preview.num_bytes
    assert preview.decoder is not None
    assert preview.num_params == preview.decoder.num_params


def test_check_says_that_sampling_through_transformers_is_slower(tmp_path: Path) -> None:
    model_of(tmp_path, STARCODER)
    config = recipe(tmp_path, "run", 2, "model.implementation=transformers")
    items = list(Preflight(config, progress=lambda done, total: None).run())
    told = [item.text for item in items]
    assert any("layers of transformers: slower" in text for text in told), told
    for key in ("own_process=true", "processes=2", "decode=compact", "quantization=int4"):
        with pytest.raises(ConfigError, match=rf"engine\.{key.partition('=')[0]}"):
            recipe(tmp_path, "run", 2, "model.implementation=transformers", f"engine.{key}")


def test_a_model_that_the_engine_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Mamba keeps a state in place of keys and values."""
    sizes = {"state_size": 4, "expand": 2, "conv_kernel": 2, "time_step_rank": 2}
    model = model_of(tmp_path, {"model_type": "mamba", "pad_token_id": 0, **sizes})
    config = json.loads((model / "config.json").read_text())
    del config["num_attention_heads"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"takes no positions.*engine\.type=vllm"):
        runs.train(recipe(tmp_path, "run", 1, "model.implementation=transformers"))
