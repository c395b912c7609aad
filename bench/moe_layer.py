"""Claim: a layer of experts trains at a good share of the matmul peak and decodes near its bytes.

A layer like Qwen3-30B-A3B's (128 experts, 8 of them for a token, 2048 -> 768) with random weights:

    train    router, permutation, experts and combination, forward and with the backward pass, at
             16,384 tokens, as a share of the matmul rate that the device measures in the same run;
             torch's grouped products alone and invariant numerics beside it. Counted are the
             products of the experts.
    decode   one step over 1, 32 and 256 rows as a CUDA graph, over several layers, so that weights
             come from memory. The floor counts the bytes of the distinct experts that the rows
             chose, and of the router, over the copy bandwidth that the device measures.
    equal    results and gradients against the plain path in fp32 on the same numbers, relative to
             the norm; the plain path in bf16 beside it

    python bench/moe_layer.py
    python bench/moe_layer.py --profile                  # the longest kernels
    python bench/moe_layer.py --tiny --device cpu        # proves the script
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import floor
import torch
from torch import Tensor

from homeostat.models.blocks import MoeBlock
from homeostat.models.families import DecoderConfig, decoder_config
from homeostat.models.routing import Routing
from homeostat.ops import kernels
from homeostat.ops.grouped_experts import grouped_mm
from homeostat.ops.linear import Numerics
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.pairs import pairs_of

PACKAGES = ("torch", "triton", "numpy")
TOKENS = 16_384
BATCHES = (1, 32, 256)
# Of weights, several times what the cache holds.
DECODE_LAYERS = 4
LAPS = 10
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Bench:
    """One shape on one device."""

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    rates: floor.Rates

    @property
    def shape(self) -> MoeShape:
        assert self.config.moe is not None
        return self.config.moe

    def block(self, *, seed: int, numerics: Numerics = "fast") -> MoeBlock:
        with torch.device("meta"):
            block = MoeBlock(self.config, self.shape, number=0, numerics=numerics)
        block = block.to(self.dtype).to_empty(device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        return block

    def rows(self, count: int, *, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        size = count, self.config.hidden_size
        return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

    def flops(self, num_tokens: int) -> float:
        """Return the operations of the experts' products in a forward pass."""
        pairs = num_tokens * self.shape.top_k
        return 2.0 * pairs * 3 * self.config.hidden_size * self.shape.expert_size


def config_of(*, tiny: bool) -> DecoderConfig:
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    if tiny:
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    return decoder_config(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts_per_tok": 2 if tiny else 8,
            "norm_topk_prob": True,
            "rms_norm_eps": EPS,
            "max_position_embeddings": 512,
            **sizes,
        }
    )


def run_block(block: MoeBlock, x_ND: Tensor) -> Tensor:
    ids_NK, weights_NK = block.gate(x_ND, 0, Routing())
    return block.experts(x_ND, ids_NK, weights_NK)


def gradients(block: MoeBlock, x_ND: Tensor, upstream_ND: Tensor) -> list[Tensor]:
    x_ND = x_ND.detach().requires_grad_()
    out_ND = run_block(block, x_ND)
    leaves = [x_ND, *(p for p in block.parameters() if p.requires_grad)]
    return [out_ND.detach(), *torch.autograd.grad(out_ND, leaves, upstream_ND)]


# ---- training ----------------------------------------------------------------------------------


def measure_training(bench: Bench, num_tokens: int, *, numerics: Numerics) -> dict[str, Any]:
    block = bench.block(seed=0, numerics=numerics)
    x_ND, upstream_ND = bench.rows(num_tokens, seed=1), bench.rows(num_tokens, seed=2)

    def forward() -> None:
        with torch.no_grad():
            run_block(block, x_ND)

    def both() -> None:
        gradients(block, x_ND, upstream_ND)

    forward_s = floor.median_seconds(forward, bench.device, laps=LAPS)
    both_s = floor.median_seconds(both, bench.device, laps=LAPS)
    flops, peak = bench.flops(num_tokens), bench.rates.matmul_flops
    return {
        "tokens": num_tokens,
        "forward_ms": round(1e3 * forward_s, 3),
        "both_ms": round(1e3 * both_s, 3),
        "forward_tflops": round(flops / forward_s / 1e12, 1),
        "both_tflops": round(3 * flops / both_s / 1e12, 1),
        "forward_share_of_peak": round(flops / forward_s / peak, 4),
        "both_share_of_peak": round(3 * flops / both_s / peak, 4),
    }


@torch.no_grad()
def measure_products(bench: Bench, num_tokens: int) -> dict[str, float]:
    """The experts' products alone, of rows that lie by expert: two forward, four backward."""
    block, x_ND = bench.block(seed=0), bench.rows(num_tokens, seed=1)
    ids_NK, _ = block.gate(x_ND, 0, Routing())
    ends_E = pairs_of(ids_NK, bench.shape.num_experts, like=x_ND).ends_E
    rows_SD = bench.rows(ids_NK.numel(), seed=3)
    gate_up_EJD, down_EDI = block.experts.gate_up_proj, block.experts.down_proj
    both_SJ = grouped_mm(rows_SD, gate_up_EJD.transpose(1, 2), ends_E)
    gated_SI = both_SJ[:, : bench.shape.expert_size].contiguous()

    def forward() -> None:
        grouped_mm(rows_SD, gate_up_EJD.transpose(1, 2), ends_E)
        grouped_mm(gated_SI, down_EDI.transpose(1, 2), ends_E)

    def both() -> None:
        forward()
        grouped_mm(rows_SD, down_EDI, ends_E)
        grouped_mm(rows_SD.t(), gated_SI, ends_E)
        grouped_mm(both_SJ, gate_up_EJD, ends_E)
        grouped_mm(both_SJ.t(), rows_SD, ends_E)

    flops, peak = bench.flops(len(x_ND)), bench.rates.matmul_flops
    forward_s = floor.median_seconds(forward, bench.device, laps=LAPS)
    both_s = floor.median_seconds(both, bench.device, laps=LAPS)
    return {
        "forward_tflops": round(flops / forward_s / 1e12, 1),
        "both_tflops": round(3 * flops / both_s / 1e12, 1),
        "forward_share_of_peak": round(flops / forward_s / peak, 4),
        "both_share_of_peak": round(3 * flops / both_s / peak, 4),
    }


def measure_differences(bench: Bench, num_tokens: int) -> dict[str, dict[str, float]]:
    """Relative to the norm of the plain path's result in fp32."""
    block = bench.block(seed=0)
    x_ND, upstream_ND = bench.rows(num_tokens, seed=1), bench.rows(num_tokens, seed=2)
    names = ["out", "x", *(name for name, p in block.named_parameters() if p.requires_grad)]
    found = {}
    found["grouped"] = gradients(with_kernel(block, "grouped"), x_ND, upstream_ND)
    with kernels.plain():
        found["plain"] = gradients(with_kernel(block, "plain"), x_ND, upstream_ND)
        exact = gradients(with_kernel(block.float(), "plain"), x_ND.float(), upstream_ND.float())
    return {
        kernel: {
            name: float((ours.float() - wanted).norm() / wanted.norm())
            for name, ours, wanted in zip(names, results, exact, strict=True)
        }
        for kernel, results in found.items()
    }


def with_kernel(block: MoeBlock, kernel: Any) -> MoeBlock:
    block.experts.kernel = kernel
    return block


# ---- decoding ----------------------------------------------------------------------------------


@torch.no_grad()
def measure_decoding(bench: Bench, blocks: list[MoeBlock], batch: int) -> dict[str, Any]:
    """One step over all layers, replayed as a graph with fresh rows."""
    step = DecodeStep(bench, blocks, batch)
    graph = step.captured()
    seconds, floors, distinct = [], [], []
    for lap in range(2 * LAPS):
        step.x_BD.copy_(bench.rows(batch, seed=100 + lap))
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        routes_BLK = step.state.routes_SBLK[0, :batch].long()
        hit = [len(routes_BLK[:, layer].unique()) for layer in range(len(blocks))]
        if lap >= 2:
            seconds.append(started.elapsed_time(ended) / 1e3)
            floors.append(step.floor_bytes(sum(hit)) / bench.rates.copy_bytes_per_s)
            distinct.append(sum(hit) / len(hit))
    layer_s = statistics.median(seconds) / len(blocks)
    floor_s = statistics.mean(floors) / len(blocks)
    return {
        "layer_us": round(1e6 * layer_s, 2),
        "floor_us": round(1e6 * floor_s, 2),
        "share_of_floor": round(floor_s / layer_s, 4),
        "distinct_experts": round(statistics.mean(distinct), 1),
        "difference": step.difference(),
    }


class DecodeStep:
    """The blocks of experts of a decoding step, as rollout/native/cuda/forward.py runs them."""

    def __init__(self, bench: Bench, blocks: list[MoeBlock], batch: int) -> None:
        from dataclasses import replace

        from homeostat.rollout.native.cuda.experts import ExpertScratch
        from homeostat.rollout.native.cuda.state import DecodeState

        self.bench, self.blocks = bench, blocks
        moe = replace(bench.shape, layers=tuple(range(len(blocks))))
        place = {"block_tokens": 16, "layers": len(blocks), "device": bench.device}
        self.state = DecodeState(max_rows=batch, max_tokens=64, moe=moe, **place)
        self.scratch = ExpertScratch(moe.num_experts, max_rows=batch, device=bench.device)
        self.x_BD = bench.rows(batch, seed=0)
        self.norm_D = torch.ones_like(self.x_BD[0])

    def run(self) -> Tensor:
        from homeostat.rollout.native.cuda import narrow, rows
        from homeostat.rollout.native.cuda.experts import narrow_experts, wide_experts

        x_BD, state, added_BD = self.x_BD.clone(), self.state.rows(len(self.x_BD)), None
        for block in self.blocks:
            if len(x_BD) <= narrow.MAX_ROWS:
                narrow_experts(x_BD, self.norm_D, block, state, self.scratch, eps=EPS)
            else:
                normed_BD = rows.add_norm(x_BD, added_BD, self.norm_D, eps=EPS)
                added_BD = wide_experts(normed_BD, block, state)
        return x_BD if added_BD is None else x_BD + added_BD

    def captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def floor_bytes(self, num_distinct: int) -> float:
        size = self.bench.dtype.itemsize
        expert = 3 * self.bench.config.hidden_size * self.bench.shape.expert_size
        router = len(self.blocks) * self.bench.shape.num_experts * self.bench.config.hidden_size
        return float((num_distinct * expert + router) * size)

    def difference(self) -> float:
        """Compare what the blocks add with the plain path, relative to the norm."""
        x_BD = self.x_BD.clone()
        with kernels.plain():
            for block in self.blocks:
                scale_B1 = (x_BD.float().square().mean(1, keepdim=True) + EPS).rsqrt()
                normed_BD = (x_BD.float() * scale_B1).to(x_BD.dtype)
                x_BD = x_BD + run_block(with_kernel(block, "plain"), normed_BD)
        gap_BD = (self.run() - x_BD).float()
        return float(gap_BD.norm() / (x_BD - self.x_BD).float().norm())


def measure_all_decoding(bench: Bench) -> dict[str, Any]:
    blocks = []
    for number in range(DECODE_LAYERS):
        block = bench.block(seed=number)
        block.number = number
        blocks.append(block)
    found = {}
    for batch in BATCHES:
        found[f"batch_{batch}"] = measure_decoding(bench, blocks, batch)
        print(f"  decode {batch}: {found[f'batch_{batch}']}", flush=True)
    return found


def profile(work: Callable[[], object]) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    work()
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    averages = found.key_averages()
    return averages.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70)


def print_profiles(bench: Bench) -> None:
    block, x_ND = bench.block(seed=0), bench.rows(TOKENS, seed=1)
    print(profile(lambda: gradients(block, x_ND, x_ND)), flush=True)
    with torch.no_grad():
        for batch in BATCHES:
            step = DecodeStep(bench, [block], batch)
            print(batch, profile(step.run), flush=True)


def main() -> None:
    arguments = common.gpu_parser(__doc__).parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16
    rates = floor.measure_rates(device, dtype)
    bench = Bench(config_of(tiny=arguments.tiny), device, dtype, rates)
    facts = common.facts_of(arguments, PACKAGES) | common.device_facts(arguments.device)
    result = facts | rates.to_json()
    num_tokens = 64 if arguments.tiny else TOKENS
    for numerics in ("fast", "invariant"):
        found = measure_training(bench, num_tokens, numerics=numerics)
        result[f"training_{numerics}"] = found
        print(f"  training, {numerics}: {found}", flush=True)
    result["grouped_mm_alone"] = measure_products(bench, num_tokens)
    print(f"  grouped_mm alone: {result['grouped_mm_alone']}", flush=True)
    result["differences"] = measure_differences(bench, num_tokens // 4)
    print(f"  differences: {result['differences']}", flush=True)
    if device.type == "cuda":
        result["decoding"] = measure_all_decoding(bench)
        if arguments.profile:
            print_profiles(bench)
    if arguments.tiny:
        print(json.dumps(result))
    else:
        common.write_result("moe_layer", result)


if __name__ == "__main__":
    main()
