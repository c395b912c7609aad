"""Adapters in CUDA graphs: the bits of the same kernels without, near the plain path."""

from __future__ import annotations

import pytest
import torch
from test_gpu_decode import are_near, equal_bits, model, sampled

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.models.decoder import Decoder
from homeostat.models.lora import adapter_state, apply_lora
from homeostat.models.side_by_side import lay_adapters_side_by_side
from homeostat.ops.held import HeldLinear
from homeostat.precision.bases import hold_linear_maps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def adapted(dtype: torch.dtype, *, quantization: str | None = None, rank: int = 16) -> Decoder:
    made = model("qwen2", dtype)
    if quantization is not None:
        weights = {
            name: module.weight.detach()
            for name, module in made.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        config = ModelConfig(path=".", quantization=quantization)
        hold_linear_maps(made, config, dtype=dtype)
        for name, module in made.named_modules():
            if isinstance(module, HeldLinear):
                module.held.to_empty(device="cuda")
                module.held.take(weights[name])
    apply_lora(made, LoraConfig(rank=rank), seed=0)
    for name, tensor in adapter_state(made):
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.05)
    lay_adapters_side_by_side(made)
    return made.requires_grad_(False)


@pytest.mark.parametrize("max_concurrency", [2, 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_in_graphs(dtype: torch.dtype, max_concurrency: int) -> None:
    made = adapted(dtype)
    graphs = sampled(made, "graphs", max_concurrency=max_concurrency)
    assert equal_bits(graphs, sampled(made, "fused", max_concurrency=max_concurrency))
    plain = sampled(made, "plain", max_concurrency=max_concurrency)
    are_near(graphs, plain, 2e-4 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_bases_in_graphs(quantization: str) -> None:
    made = adapted(torch.bfloat16, quantization=quantization)
    graphs = sampled(made, "graphs", max_concurrency=8)
    are_near(graphs, sampled(made, "plain", max_concurrency=8), 0.3)
