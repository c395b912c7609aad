"""Tiny models with experts, and the routes that an engine would record of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import tiny

from homeostat.arrays import IntArray
from homeostat.config.model import ModelConfig
from homeostat.models import hf
from homeostat.models.build import Model, load_model
from homeostat.models.decoder import Decoder
from homeostat.models.lora import merged_state
from homeostat.models.routing import Routing, smallest_dtype
from homeostat.ops.attention import PackedLayout
from homeostat.types import TokenRow

# Changes to the config of a tiny model's folder. Weights are large, so that routers are decided.
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
# A dense layer before those with experts, groups, a shared expert and a bias for the choice.
DOTS: dict[str, Any] = {
    "model_type": "dots1",
    "architectures": ["Dots1ForCausalLM"],
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": None,
    "initializer_range": 0.3,
}


def save_model(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint with random weights; an expert bias has values that bf16 cannot hold."""
    tiny.write_model(folder, **changes)
    loaded = load_model(
        ModelConfig(path=str(folder), init="random"),
        None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        gradient_checkpointing=False,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in loaded.module.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.normal_(std=0.2, generator=generator)
    state = merged_state(loaded.module)
    hf.save_hf(state, folder, source_config=loaded.sheet.source_config)
    return folder


@torch.no_grad()
def routes_of(model: Model, tokens_T: IntArray) -> dict[str, np.ndarray]:
    """Return the routes of a row as an engine records them: its last token was never run."""
    assert isinstance(model, Decoder)
    assert model.moe is not None
    routing = Routing(records=True)
    tokens = torch.from_numpy(np.ascontiguousarray(tokens_T))
    layout = PackedLayout.of([len(tokens)], tokens.device)
    model.hidden(tokens, torch.arange(len(tokens)), layout, routing=routing)
    experts = routing.recorded().to(smallest_dtype(model.moe.num_experts)).numpy()
    weights = routing.recorded_weights().numpy()
    experts[-1], weights[-1] = 0, 0
    return {"routed_experts": experts, "routed_weights": weights}


def with_routes(
    model: Model, rows: Sequence[TokenRow], *names: str, shift: int = 0
) -> list[TokenRow]:
    """Return the rows with routes; `shift` > 0 sends every token to other experts."""
    assert model.moe is not None
    found = []
    for row in rows:
        routes = routes_of(model, row.tokens_T)
        experts = routes["routed_experts"]
        experts[:-1] = (experts[:-1] + shift) % model.moe.num_experts
        own = {name: routes[name] for name in names or ("routed_experts",)}
        found.append(replace(row, columns={**row.columns, **own}))
    return found
