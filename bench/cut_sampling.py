"""Claim: cut sampling decodes at 0.85 of uncut speed or more, and its mismatch is no larger.

The native engine samples uncut, with top-p 0.95, top-k 50 and min-p 0.05, one lap each a round, so
that a temporary slow-down affects all of them; a ratio is the median of the rounds' ratios. Laps
with a cut return the kept sets, as training asks for them. Weights are random, so the temperature
is low enough to leave a number of likely tokens, reported as `kept_mean`; a trained model keeps
fewer. Counted is the steady phase: from the moment when every sequence has its first token to the
end; wall seconds on a GPU, CPU seconds of one thread on a CPU (the compiled step).

Mismatch: the mean and the largest |engine's log-prob - trainer's log-prob| of sampled tokens. The
trainer's are `engine.score`, which is its function, over the kept sets where there is a cut.

    python bench/cut_sampling.py                   # GPU: the 0.5 B shape, batches of 1, 32 and 256
    python bench/cut_sampling.py --device cpu      # a small shape and SmolLM2-135M's
    python bench/cut_sampling.py --tiny --device cpu
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
from engine_decode import PROMPT_TOKENS, start
from shapes import DTYPES, END_ID, SHAPES, Shape, random_decoder

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.config.native import NativeEngineConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.rollout.engine import Request, Sampling
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, TokenRow

PACKAGES = ("torch", "triton", "transformers", "numpy")
TEMPERATURE = 0.1
CUTS: dict[str, dict[str, Any]] = {
    "uncut": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
}
ALL_SHAPES = {**SHAPES, "135m": Shape(30, 576, 9, 3, 64, 1536, vocab=49152)}
NUM_SCORED = 16
POLL_S = 60.0


@dataclass(frozen=True, slots=True)
class Lap:
    """One generation: its completions, and tokens a second of its steady phase."""

    completions: list[Completion]
    tokens_per_s: float


def engine_of(
    shape: Shape, device: torch.device, *, max_batch: int, new_tokens: int
) -> NativeEngine:
    model = random_decoder(shape, device=device, dtype=DTYPES[device.type])
    return NativeEngine(
        model,
        NativeEngineConfig(max_concurrency=max_batch),
        device=device,
        max_tokens=PROMPT_TOKENS + new_tokens,
        decode=None,
        chunk_bytes=TrainerConfig().logits_bytes(device.type),
        threads=1,
    )


def requests(
    engine: NativeEngine, batch: int, new_tokens: int, *, cut: str, seed: int
) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(END_ID + 1, engine.vocabulary, (batch, PROMPT_TOKENS))
    sampling = Sampling(new_tokens, temperature=TEMPERATURE, **CUTS[cut])
    return [
        Request(f"{seed}/{row}", tokens_T, sampling, seed=seed, kept_ids=True)
        for row, tokens_T in enumerate(prompts)
    ]


def lap(engine: NativeEngine, wanted: list[Request]) -> Lap:
    clock = time.perf_counter if engine.device.type == "cuda" else time.process_time
    before = engine.stats().new_tokens
    sampled = start(engine, wanted)
    floor.synchronize(engine.device)
    started = clock()
    completions: list[Completion] = []
    while len(completions) < len(wanted):
        completions += engine.poll(timeout_s=POLL_S)
    floor.synchronize(engine.device)
    seconds = clock() - started
    return Lap(completions, (engine.stats().new_tokens - before - sampled) / seconds)


def mismatch(
    engine: NativeEngine, wanted: list[Request], found: list[Completion]
) -> dict[str, Any]:
    """Compare the log-probs of sampled tokens with the trainer's, over the same tokens."""
    by_id = {request.id: request for request in wanted}
    some = sorted(found, key=lambda one: one.request_id)[:NUM_SCORED]
    rows = [_row(by_id[one.request_id].tokens_T, one) for one in some]
    scored_M = np.concatenate(engine.score(rows, temperature=TEMPERATURE)).astype(np.float64)
    gap_M = np.abs(scored_M - np.concatenate([one.sampled_logp_T for one in some]))
    return {"mismatch_mean": float(gap_M.mean()), "mismatch_max": float(gap_M.max())}


def _row(prompt_T: np.ndarray, one: Completion) -> TokenRow:
    whole_T = np.concatenate([prompt_T, one.tokens_T])
    is_new_T = (np.arange(len(whole_T)) >= len(prompt_T)).astype(np.float32)
    kept = one.columns.get(KEPT_IDS)
    if not isinstance(kept, Ragged):
        return TokenRow(0, whole_T, is_new_T)
    offsets_T = np.concatenate([np.zeros(len(prompt_T), dtype=np.int64), kept.offsets_T])
    return TokenRow(0, whole_T, is_new_T, {KEPT_IDS: Ragged(kept.values, offsets_T)})


def kept_facts(completions: list[Completion]) -> dict[str, float]:
    """Return the mean number of kept ids, and the mean probability that they hold."""
    columns = [one.columns.get(KEPT_IDS) for one in completions]
    sizes = np.concatenate([kept.sizes_T for kept in columns if isinstance(kept, Ragged)] or [[]])
    if not len(sizes):
        return {}
    masses = [np.exp(one.engine_logp_T - one.sampled_logp_T) for one in completions]
    return {
        "kept_mean": round(float(sizes.mean()), 1),
        "kept_max": float(sizes.max()),
        "kept_mass": round(float(np.concatenate(masses).mean()), 4),
    }


def measure(engine: NativeEngine, batch: int, *, new_tokens: int, rounds: int) -> dict[str, Any]:
    for cut in CUTS:
        lap(engine, requests(engine, batch, min(20, new_tokens), cut=cut, seed=0))
    laps: dict[str, list[Lap]] = {cut: [] for cut in CUTS}
    for number in range(rounds):
        for cut, made in laps.items():
            made.append(lap(engine, requests(engine, batch, new_tokens, cut=cut, seed=1 + number)))
    found: dict[str, Any] = {}
    for cut, made in laps.items():
        pairs = zip(made, laps["uncut"], strict=True)
        ratio = statistics.median(one.tokens_per_s / base.tokens_per_s for one, base in pairs)
        wanted = requests(engine, batch, new_tokens, cut=cut, seed=rounds)
        found[cut] = {
            "tokens_per_s": round(statistics.median(one.tokens_per_s for one in made), 1),
            "ratio_to_uncut": round(ratio, 4),
            **kept_facts(made[-1].completions),
            **mismatch(engine, wanted, made[-1].completions),
        }
        print(f"  batch {batch}, {cut}: {found[cut]}", flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: proves the script")
    parser.add_argument("--shapes", nargs="+", choices=list(ALL_SHAPES))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.shapes = arguments.shapes or (["0.5b"] if on_gpu else ["small", "135m"])
    arguments.batches = arguments.batches or ([1, 32, 256] if on_gpu else [1, 16])
    arguments.new_tokens = arguments.new_tokens or (256 if on_gpu else 48)
    if arguments.tiny:
        arguments.shapes, arguments.batches, arguments.new_tokens = ["tiny"], [1, 8], 16
    return arguments


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    result = common.machine(PACKAGES) | common.device_facts(arguments.device)
    if arguments.commit:
        result["commit"] = arguments.commit
    size = {"new_tokens": arguments.new_tokens, "rounds": arguments.rounds}
    result |= {"prompt_tokens": PROMPT_TOKENS, "temperature": TEMPERATURE, **size}
    for name in arguments.shapes:
        print(name, flush=True)
        engine = engine_of(
            ALL_SHAPES[name],
            device,
            max_batch=max(arguments.batches),
            new_tokens=arguments.new_tokens,
        )
        with torch.no_grad():
            result[name] = {
                f"batch_{batch}": measure(engine, batch, **size) for batch in arguments.batches
            }
        engine.close()
    if arguments.tiny:
        print(json.dumps(result))
    else:
        common.write_result(f"cut_sampling_{device.type}", result)


if __name__ == "__main__":
    main()
