"""Claim: the native engine decodes at a good share of what the memory bandwidth allows.

Batches of 1, 32 and 256 prompts of 64 tokens, Qwen2's 0.5 B and 1.5 B shapes with random weights,
built on the device. Counted is the steady phase: from the moment when every sequence has its first
token to the end. The floor of a decoding step is its bytes (all weights once, keys and values of
every live token) over the copy bandwidth that the device measures in the same run. The peer is
transformers' `generate` at batch 32 on the same weights. Of a model with experts (eight layers of
Qwen3-30B-A3B's shape) the floor counts the distinct ones that a step hit, by the routes that the
engine recorded; it has no peer.

The log-probs that the engine gives what it samples are compared with `engine.score`, which is the
trainer's function.

    python bench/engine_decode.py
    python bench/engine_decode.py --peer dynamic static      # static: minutes of compilation
    python bench/engine_decode.py --shapes 0.5b --batches 256 --profile
    python bench/engine_decode.py --shapes 30b-a3b/6
    python bench/engine_decode.py --tiny --device cpu        # proves the script
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import common
import floor
import numpy as np
import torch
from shapes import DTYPES, END_ID, SHAPES, Shape, random_decoder

from homeostat.columns import dense
from homeostat.config.native import NativeEngineConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models.decoder import Decoder
from homeostat.rollout.engine import Quiesce, Request, Sampling
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, TokenRow

PACKAGES = ("torch", "triton", "transformers", "numpy")
PROMPT_TOKENS = 64
# Of a batch of one, fewer tokens are enough.
NEW_TOKENS, NEW_TOKENS_ALONE = 512, 256
PEER_BATCH, PEER_NEW_TOKENS = 32, 128
# Repeats of a measurement: as many as fit, and no more than MAX_ROUNDS.
ROUNDS_S, MAX_ROUNDS = 8.0, 3
POLL_S = 60.0
NUM_SCORED = 16
NUM_PROFILED = 20
PEERS: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}


@dataclass(frozen=True, slots=True)
class Bench:
    """One shape on one device, and the rates that its floor is computed from."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    rates: floor.Rates
    new_tokens: int

    def prompts(self, batch: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        return rng.integers(END_ID + 1, self.shape.vocab, (batch, PROMPT_TOKENS))

    def requests(self, batch: int, new_tokens: int, *, seed: int) -> list[Request]:
        sampling, has_experts = Sampling(new_tokens), self.shape.experts > 0
        return [
            Request(f"{seed}/{row}", tokens_T, sampling, seed=seed, routed_experts=has_experts)
            for row, tokens_T in enumerate(self.prompts(batch))
        ]

    def floor_step_s(self, batch: int, new_tokens: int, experts_hit: float | None) -> float:
        size = {"batch": batch, "context": PROMPT_TOKENS + (new_tokens + 1) / 2}
        read = floor.decode_bytes(self.shape, self.dtype, experts_hit=experts_hit, **size)
        return read / self.rates.copy_bytes_per_s

    def experts_hit(self, completions: list[Completion]) -> float | None:
        """The mean number of distinct experts in a step and layer; None of a dense model."""
        if not self.shape.experts:
            return None
        routes = [[dense(s.columns["routed_experts"]) for s in one.segments] for one in completions]
        routes_BSLK = np.stack([np.concatenate(parts) for parts in routes])
        # The last token of a row is never run.
        routes_SLX = (
            routes_BSLK[:, :-1]
            .transpose(1, 2, 0, 3)
            .reshape(routes_BSLK.shape[1] - 1, routes_BSLK.shape[2], -1)
        )
        hit = [len(np.unique(chosen_X)) for chosen_LX in routes_SLX for chosen_X in chosen_LX]
        return statistics.mean(hit)


@dataclass(frozen=True, slots=True)
class Round:
    """One generation: tokens and seconds of its steady phase."""

    completions: list[Completion]
    steady_tokens: int
    steady_s: float


def engine_of(bench: Bench, model: Decoder, *, max_batch: int) -> NativeEngine:
    return NativeEngine(
        model,
        NativeEngineConfig(max_concurrency=max_batch),
        device=bench.device,
        max_tokens=PROMPT_TOKENS + bench.new_tokens,
        decode=None,
        chunk_bytes=TrainerConfig().logits_bytes(bench.device.type),
    )


def start(engine: NativeEngine, requests: list[Request]) -> int:
    """Submits, and returns when every sequence has a token: how many there are by then."""
    before = engine.stats().new_tokens
    for request in requests:
        engine.submit(request)
    done = 0
    while (sampled := engine.stats().new_tokens - before) < len(requests):
        done += len(engine.poll(timeout_s=0.0))
        assert not done, "a request ended before all had begun"
    return sampled


def generate(engine: NativeEngine, requests: list[Request]) -> Round:
    before = engine.stats().new_tokens
    sampled = start(engine, requests)
    floor.synchronize(engine.device)
    started = time.perf_counter()
    completions: list[Completion] = []
    while len(completions) < len(requests):
        completions += engine.poll(timeout_s=POLL_S)
    floor.synchronize(engine.device)
    seconds = time.perf_counter() - started
    return Round(completions, engine.stats().new_tokens - before - sampled, seconds)


def logp_differences(
    bench: Bench, engine: NativeEngine, completions: list[Completion], batch: int
) -> dict[str, float]:
    """Compare the log-probs with which the engine sampled with those of the trainer's function."""
    prompts = bench.prompts(batch)
    rows, sampled = [], []
    for completion in completions[:NUM_SCORED]:
        prompt_T = prompts[int(completion.request_id.split("/")[1])]
        whole_T = np.concatenate([prompt_T, completion.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= PROMPT_TOKENS).astype(np.float32)
        rows.append(TokenRow(len(rows), whole_T, is_new_T))
        sampled.append(completion.engine_logp_T)
    scored_M = np.concatenate(engine.score(rows, temperature=1.0))
    gap_M = np.abs(scored_M.astype(np.float64) - np.concatenate(sampled))
    return {"logp_difference_mean": float(gap_M.mean()), "logp_difference_max": float(gap_M.max())}


def measure(bench: Bench, engine: NativeEngine, batch: int) -> dict[str, Any]:
    new_tokens = min(bench.new_tokens, NEW_TOKENS_ALONE) if batch == 1 else bench.new_tokens
    started = time.perf_counter()
    generate(engine, bench.requests(batch, min(8, new_tokens), seed=0))
    warm_up_s = time.perf_counter() - started
    rounds: list[Round] = []
    started = time.perf_counter()
    while len(rounds) < MAX_ROUNDS and (
        not rounds or time.perf_counter() - started + rounds[-1].steady_s < ROUNDS_S
    ):
        requests = bench.requests(batch, new_tokens, seed=1 + len(rounds))
        rounds.append(generate(engine, requests))
    rate = statistics.median(one.steady_tokens / one.steady_s for one in rounds)
    experts_hit = bench.experts_hit(rounds[-1].completions)
    floor_s = bench.floor_step_s(batch, new_tokens, experts_hit)
    return ({} if experts_hit is None else {"experts_hit": round(experts_hit, 2)}) | {
        "new_tokens": new_tokens,
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_by_round": [round(one.steady_tokens / one.steady_s, 1) for one in rounds],
        "step_ms": round(1e3 * batch / rate, 4),
        "floor_step_ms": round(1e3 * floor_s, 4),
        "share_of_floor": round(floor_s * rate / batch, 4),
        "first_use_s": round(warm_up_s, 3),
        **logp_differences(bench, engine, rounds[-1].completions, batch),
    }


def measure_handover(engine: NativeEngine) -> dict[str, float]:
    """Measure what it takes to publish weights, to sleep and to wake.

    The weights are the trainer's own: they stay where they are, and no memory is allocated.
    """
    places = [tensor.data_ptr() for tensor in engine.model.parameters()]

    def publish() -> None:
        engine.begin_update(Quiesce.DRAIN)
        engine.commit(engine.policy_version + 1)

    found: dict[str, float] = {}
    for name, call in (("publish", publish), ("sleep", engine.sleep), ("wake", engine.wake)):
        held = torch.cuda.memory_allocated() if engine.device.type == "cuda" else 0
        floor.synchronize(engine.device)
        started = time.perf_counter()
        call()
        floor.synchronize(engine.device)
        found[f"{name}_ms"] = round(1e3 * (time.perf_counter() - started), 3)
        if engine.device.type == "cuda":
            found[f"{name}_bytes"] = torch.cuda.memory_allocated() - held
    assert places == [tensor.data_ptr() for tensor in engine.model.parameters()], "weights moved"
    return found


def profile(bench: Bench, engine: NativeEngine, batch: int) -> str:
    """Show where the time of some decoding steps goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    start(engine, bench.requests(batch, bench.new_tokens, seed=99))
    until = engine.stats().new_tokens + min(NUM_PROFILED, bench.new_tokens - 2) * batch
    with profiler(activities=activities) as found:
        while engine.stats().new_tokens < until:
            finished = engine.poll(timeout_s=0.0)
            assert not finished, "a request ended while it was profiled"
        floor.synchronize(bench.device)
    engine.abort()
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=90)


def peer_model(bench: Bench, model: Decoder) -> Any:
    """transformers' Qwen2 with the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**bench.shape.hf_config(bench.dtype))
    with torch.device(bench.device):
        peer = Qwen2ForCausalLM(config).to(bench.dtype).eval()
    missing = peer.load_state_dict(model.causal_lm.state_dict(), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    return peer


@torch.no_grad()
def measure_peer(bench: Bench, peer: Any, *, kind: str, batch: int) -> dict[str, Any]:
    """Steady tokens a second: of two lengths, so that prefill cancels out."""
    prompts_BT = torch.from_numpy(bench.prompts(batch)).to(bench.device)
    new_tokens = min(PEER_NEW_TOKENS, bench.new_tokens)

    def seconds(count: int) -> float:
        floor.synchronize(bench.device)
        started = time.perf_counter()
        peer.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            do_sample=True,
            top_k=0,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            **PEERS[kind],
        )
        floor.synchronize(bench.device)
        return time.perf_counter() - started

    first_s = seconds(new_tokens)
    long_s, short_s = seconds(new_tokens), seconds(new_tokens // 4)
    rate = batch * (new_tokens - new_tokens // 4) / max(long_s - short_s, 1e-9)
    return {"batch": batch, "tokens_per_s": round(rate, 1), "first_use_s": round(first_s, 3)}


def measure_shape(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    model = random_decoder(bench.shape, device=bench.device, dtype=bench.dtype)
    started = time.perf_counter()
    engine = engine_of(bench, model, max_batch=max(arguments.batches))
    found: dict[str, Any] = {"engine_start_s": round(time.perf_counter() - started, 3)}
    for batch in arguments.batches:
        found[f"batch_{batch}"] = measure(bench, engine, batch)
        print(f"  batch {batch}: {found[f'batch_{batch}']}", flush=True)
        if arguments.profile:
            print(profile(bench, engine, batch), flush=True)
    found["cache_bytes"] = engine.stats().cache_bytes
    found["handover"] = measure_handover(engine)
    print(f"  handover: {found['handover']}", flush=True)
    engine.close()
    if bench.device.type == "cuda":
        found["max_alloc_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    has_peer = arguments.peer and not bench.shape.experts
    return found | (_beside(bench, model, found, arguments) if has_peer else {})


def _beside(
    bench: Bench, model: Decoder, ours: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    batch = min(PEER_BATCH, max(arguments.batches))
    peer = peer_model(bench, model)
    peers = {kind: measure_peer(bench, peer, kind=kind, batch=batch) for kind in arguments.peer}
    found: dict[str, Any] = {"transformers": peers}
    if f"batch_{batch}" in ours:
        best = max(one["tokens_per_s"] for one in peers.values())
        found["ratio"] = round(ours[f"batch_{batch}"]["tokens_per_s"] / best, 3)
    print(f"  transformers: {found}", flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = common.gpu_parser(__doc__)
    parser.add_argument("--result", default="engine_decode", help="name of the file of results")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--peer", nargs="*", choices=list(PEERS), default=["dynamic"])
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shapes, arguments.batches = ["tiny", "tiny-moe"], [1, 8]
    return arguments


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    dtype = DTYPES[device.type]
    rates = floor.measure_rates(device, dtype)
    facts = common.facts_of(arguments, PACKAGES) | common.device_facts(arguments.device)
    result = facts | rates.to_json()
    result["prompt_tokens"] = PROMPT_TOKENS
    new_tokens = 16 if arguments.tiny else NEW_TOKENS
    for name in arguments.shapes:
        print(name, flush=True)
        bench = Bench(SHAPES[name], device, dtype, rates, new_tokens)
        result[name] = measure_shape(bench, arguments)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if arguments.tiny:
        print(json.dumps(result))
    else:
        common.write_result(arguments.result, result)


if __name__ == "__main__":
    main()
