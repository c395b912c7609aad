"""Measure how a GRPO step's time grows with the tokens of an update, prompts and length.

Three sweeps with the parts of a run in one process (native engine, local trainer, shared weights):

    tokens     one update on rows of one length, more and more of them
    prompts    a whole step (sample, update), 8 samples each, of one length
    length     a whole step, of longer and longer completions

For each: seconds at every point, the slope on logarithmic axes, and where it bends: below a bend a
fixed cost rules (kernel launches, Python, reading the weights), above it the work itself.

    python bench/scaling.py
    python bench/scaling.py --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import floor
import numpy as np
import torch
from shapes import DTYPES, END_ID, SHAPES, Shape, random_decoder
from slopes import growth

from homeostat.config.loading.load import build_config
from homeostat.config.native import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.models.build import LoadedModel, model_sheet
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.run.learning.updates import StepRows, build_update
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.types import Role, TokenRow

PACKAGES = ("torch", "triton", "transformers", "numpy")
NUM_SAMPLES = 8
REPEATS = 2
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sizes of one device."""

    shape: str
    prompt_tokens: int
    row_tokens: int
    update_rows: tuple[int, ...]
    new_tokens: int
    prompts: tuple[int, ...]
    length_prompts: int
    lengths: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        return self.prompt_tokens + max(*self.lengths, self.new_tokens, self.row_tokens)


SWEEPS = {
    "cuda": Sweep(
        shape="0.5b",
        prompt_tokens=64,
        row_tokens=512,
        update_rows=(1, 4, 16, 64, 256),
        new_tokens=128,
        prompts=(1, 4, 8, 16, 32),
        length_prompts=8,
        lengths=(64, 128, 256, 512, 1024),
    ),
    "cpu": Sweep(
        shape="small",
        prompt_tokens=16,
        row_tokens=64,
        update_rows=(1, 4, 16, 64),
        new_tokens=16,
        prompts=(1, 2, 4, 8),
        length_prompts=4,
        lengths=(8, 16, 32, 64),
    ),
}


class Parts:
    """An engine and a trainer over one model, and the step that they do together."""

    def __init__(self, sweep: Sweep, device: torch.device) -> None:
        dtype, shape = DTYPES[device.type], SHAPES[sweep.shape]
        self.sweep = sweep
        self.config = _config(shape)
        self.rng = np.random.default_rng(0)
        self.vocab = shape.vocab
        model = random_decoder(shape, device=device, dtype=dtype)
        sheet = model_sheet(model, shape.hf_config(dtype), None, {})
        runtime = Runtime(device, dtype, threads=1, pin_memory=device.type == "cuda")
        self.trainer = LocalTrainer(
            {Role.POLICY: RoleModel(LoadedModel(model, sheet), self.config.trainer)},
            self.config.trainer,
            runtime=runtime,
            seed=0,
        )
        self.engine = NativeEngine(
            model,
            NativeEngineConfig(),
            device=device,
            max_tokens=sweep.max_tokens,
            decode=None,
            chunk_bytes=self.config.trainer.logits_chunk_bytes,
        )
        self.device = device
        self.steps = 0

    def prompt(self) -> np.ndarray:
        return self.rng.integers(END_ID + 1, self.vocab, self.sweep.prompt_tokens)

    def random_rows(self, count: int) -> list[TokenRow]:
        """Rows of one length, whose prompts nobody shares."""
        size = self.sweep.row_tokens
        tokens_BT = self.rng.integers(END_ID + 1, self.vocab, (count, size))
        return [self._row(index, tokens_T, 1) for index, tokens_T in enumerate(tokens_BT)]

    def sampled_rows(self, num_prompts: int, new_tokens: int) -> list[TokenRow]:
        self.steps += 1
        requests = [
            Request(f"{p}/{s}", tokens_T, Sampling(new_tokens), seed=self.steps, session_key=str(p))
            for p, tokens_T in enumerate(self.prompt() for _ in range(num_prompts))
            for s in range(NUM_SAMPLES)
        ]
        completions = generate(self.engine, requests, timeout_s=TIMEOUT_S)
        wholes = [
            np.concatenate([request.tokens_T, completion.tokens_T])
            for request, completion in zip(requests, completions, strict=True)
        ]
        return [
            self._row(index, whole_T, self.sweep.prompt_tokens)
            for index, whole_T in enumerate(wholes)
        ]

    def update(self, rows: Sequence[TokenRow]) -> None:
        """As a run does it: the engine is quiet and holds no cache meanwhile."""
        self.steps += 1
        self.engine.begin_update(Quiesce.DRAIN)
        self.engine.sleep()
        plan = build_update(
            _step_rows(rows),
            [np.full(int(row.weights_T.sum()), (-1.0) ** row.row_id) for row in rows],
            chosen=range(len(rows)),
            config=self.config.for_learning,
            sizes=self.config.trainer,
            kl_coefficient=None,
            step=self.steps,
            epoch=0,
        ).plan
        assert plan is not None, "every row has an advantage"
        self.trainer.accumulate(Role.POLICY, plan.micro_batches, plan.loss, step=self.steps)
        self.trainer.apply(Role.POLICY, step=self.steps, learning_rate=0.0)
        self.engine.commit(self.steps)

    def step(self, num_prompts: int, new_tokens: int) -> None:
        self.update(self.sampled_rows(num_prompts, new_tokens))

    @staticmethod
    def _row(index: int, tokens_T: np.ndarray, num_context: int) -> TokenRow:
        is_new_T = (np.arange(len(tokens_T)) >= num_context).astype(np.float32)
        columns = {"engine_logp": np.zeros(len(tokens_T), dtype=np.float32)}
        return TokenRow(index, tokens_T, is_new_T, columns)


def _step_rows(rows: Sequence[TokenRow]) -> StepRows:
    """Return rows as a step has them, one to a sample."""
    trained = [row.weights_T > 0 for row in rows]
    lengths_S = np.array([int(mask_T.sum()) for mask_T in trained])
    return StepRows(
        rows=list(rows),
        sample_R=np.arange(len(rows)),
        places=[np.arange(len(row)) for row in rows],
        group_S=np.arange(len(rows)) // NUM_SAMPLES,
        starts_S=np.array([len(row) for row in rows]) - lengths_S,
        policy_numbers=[np.where(mask_T, np.cumsum(mask_T) - 1, -1) for mask_T in trained],
        lengths_S=lengths_S,
        rewards_S=np.zeros(len(rows)),
        trained_S=np.ones(len(rows), dtype=bool),
        penalty_S=np.zeros(len(rows)),
    )


def _config(shape: Shape) -> RunConfig:
    """A recipe of the same work; its files are never read."""
    raw = {
        "name": "scaling",
        "algorithm": {"type": "grpo", "normalise": "token"},
        "model": {"path": f"random, {shape.hidden} wide"},
        "data": {"train": [{"type": "prompts", "path": "none.jsonl"}]},
        "rewards": {"functions": [{"type": "exact_match"}]},
    }
    return build_config(raw, [], file=None)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """The median, after one call that warms up. On a CPU, seconds of it: others may be at work."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    found = []
    for _ in range(REPEATS + 1):
        floor.synchronize(device)
        started = clock()
        work()
        floor.synchronize(device)
        found.append(clock() - started)
    return statistics.median(found[1:])


def series(sizes: Sequence[int], seconds: Sequence[float], *, unit: str) -> dict[str, Any]:
    points = dict(zip(map(str, sizes), (round(second, 5) for second in seconds), strict=True))
    return {"unit": unit, "seconds": points, **growth(sizes, seconds).to_json()}


def measure(parts: Parts) -> dict[str, Any]:
    sweep, device = parts.sweep, parts.device
    tokens = [rows * sweep.row_tokens for rows in sweep.update_rows]
    by_tokens = []
    for count in sweep.update_rows:
        rows = parts.random_rows(count)
        by_tokens.append(timed(lambda rows=rows: parts.update(rows), device))
    print(f"update by tokens: {dict(zip(tokens, by_tokens, strict=True))}", flush=True)
    by_prompts = [
        timed(lambda count=count: parts.step(count, sweep.new_tokens), device)
        for count in sweep.prompts
    ]
    print(f"step by prompts: {dict(zip(sweep.prompts, by_prompts, strict=True))}", flush=True)
    by_length = [
        timed(lambda length=length: parts.step(sweep.length_prompts, length), device)
        for length in sweep.lengths
    ]
    print(f"step by length: {dict(zip(sweep.lengths, by_length, strict=True))}", flush=True)
    return {
        "update_by_tokens": series(tokens, by_tokens, unit="tokens of an update"),
        "step_by_prompts": series(sweep.prompts, by_prompts, unit="prompts of a step"),
        "step_by_length": series(sweep.lengths, by_length, unit="new tokens of a completion"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="the commit measured, where there is no git")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sweep = SWEEPS[arguments.device]
    result = common.machine(PACKAGES) | common.device_facts(arguments.device)
    if arguments.commit:
        result["commit"] = arguments.commit
    result |= {"shape": sweep.shape, "samples_per_prompt": NUM_SAMPLES}
    result |= {"new_tokens": sweep.new_tokens, "length_prompts": sweep.length_prompts}
    result |= measure(Parts(sweep, torch.device(arguments.device)))
    common.write_result(f"scaling_{arguments.device}", result)


if __name__ == "__main__":
    main()
