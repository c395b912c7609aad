"""One side of engine_cpu in a separate process: greedy tokens of the same prompts, timed.

    {"side": "homeostat" | "transformers" | "vllm" | "ceiling", "model": folder, "batch": 8, ...}

Run with one JSON argument. When it is ready, and then for each line that it reads, it prints a line
that begins with SAYS: wall seconds and the tokens. Between lines it rests, so that sides can take
turns. Only homeostat's side imports homeostat, so this file also runs in vLLM's
environment.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WARM_UP_TOKENS = 4
# Libraries print, too.
SAYS = "SAYS"


@dataclass(frozen=True, slots=True)
class Task:
    """The work of a side, and how it is done: `threads` of torch, `processes` or `cache`."""

    side: str
    model: str
    batch: int
    prompt_tokens: int = 64
    new_tokens: int = 64
    threads: int = 1
    processes: int = 1
    cache: str = "dynamic"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Distinct, and the same for every side."""
        rng = random.Random(0)
        return [
            [rng.randrange(1000, min(vocabulary, 40_000)) for _ in range(self.prompt_tokens)]
            for _ in range(self.batch)
        ]

    @property
    def vocabulary(self) -> int:
        return json.loads((Path(self.model) / "config.json").read_text())["vocab_size"]


# Prompts and the number of new tokens -> the new tokens of each.
Generate = Callable[[list[list[int]], int], list[list[int]]]


@contextmanager
def homeostat(task: Task) -> Iterator[Generate]:
    import numpy as np
    import torch

    from homeostat.config.cluster import LOOPBACK, InProcessCluster
    from homeostat.config.model import ModelConfig
    from homeostat.config.native import NativeEngineConfig
    from homeostat.rollout.engine import Request, Sampling, generate
    from homeostat.rollout.native.host import build_engine
    from homeostat.rollout.remote import RemoteEngine
    from homeostat.rollout.router import Router
    from homeostat.rollout.server import SERVER
    from homeostat.workers.context import WorkerContext
    from homeostat.workers.opening import open_group
    from homeostat.workers.spec import GroupSpec

    kwargs = {
        "model": ModelConfig(path=task.model),
        "engine": NativeEngineConfig(own_process=True),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "threads": task.threads,
        "seed": 0,
        "max_tokens": task.prompt_tokens + task.new_tokens,
        "chunk_bytes": 1 << 26,
    }

    def start(log_file: Path) -> Any:
        server = {"factory": "homeostat.rollout.native.host:build_engine", "kwargs": kwargs}
        spec = GroupSpec(
            factory=SERVER,
            kwargs=server,
            kind="engine",
            name="helper",
            log_file=log_file,
        )
        return open_group(InProcessCluster(), spec)

    with TemporaryDirectory() as folder:
        engine: Any = build_engine(WorkerContext(0, 1, 0, "bench", LOOPBACK), **kwargs)
        if task.processes > 1:
            limits = {"timeout_s": 3600.0, "update_timeout_s": 60.0}
            helpers = [
                RemoteEngine(
                    lambda n=n: start(Path(folder) / f"{n}.log"),
                    vocabulary=task.vocabulary,
                    can_decode=True,
                    **limits,
                )
                for n in range(1, task.processes)
            ]
            # Each has read the same weights, and none are sent.
            engine = Router([engine, *helpers], on_loss=_fail)

        def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
            sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0)
            requests = [
                Request(str(n), np.array(tokens), sampling, seed=0)
                for n, tokens in enumerate(prompts)
            ]
            found = generate(engine, requests, timeout_s=3600)
            return [completion.tokens_T.tolist() for completion in found]

        yield run
        engine.close()


def _fail(error: Exception) -> None:
    raise error


@contextmanager
def transformers(task: Task) -> Iterator[Generate]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task.threads)
    torch.set_flush_denormal(True)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                cache_implementation="static" if task.cache == "static" else None,
                disable_compile=True,
            )
        return found[:, ids.shape[1] :].tolist()

    yield run


@contextmanager
def vllm(task: Task) -> Iterator[Generate]:
    import torch

    from vllm import LLM, SamplingParams

    torch.set_flush_denormal(True)
    engine = LLM(
        task.model,
        dtype="float32",
        max_model_len=task.prompt_tokens + task.new_tokens + 1,
        max_num_seqs=max(8, task.batch),
        skip_tokenizer_init=True,
        enforce_eager=task.cache == "eager",
        enable_prefix_caching=False,
    )

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": tokens} for tokens in prompts]
        found = engine.generate(given, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    yield run


def ceiling(task: Task) -> dict[str, Any]:
    """Tokens a second if a decoding step were its matrix products alone, by one core."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    files = sorted(Path(task.model).glob("*.safetensors"))
    tensors = {name: t.float() for file in files for name, t in load_file(file).items()}
    matrices = [t.t().contiguous() for name, t in tensors.items() if t.ndim == 2]
    # A tied embedding exists once, as the head; a separate one is only looked up.
    has_head = any(name.startswith("lm_head") for name in tensors)
    if has_head:
        matrices = [
            m for m in matrices if m.shape != tensors["model.embed_tokens.weight"].t().shape
        ]
        matrices.append(tensors["lm_head.weight"].t().contiguous())
    inputs = {m.shape[0]: torch.randn(task.batch, m.shape[0]) for m in matrices}
    laps = []
    for _ in range(3):
        started = time.perf_counter()
        for matrix in matrices:
            inputs[matrix.shape[0]] @ matrix
        laps.append(time.perf_counter() - started)
    return {"tokens_per_s": task.batch / min(laps), "matrices": len(matrices)}


SIDES = {"homeostat": homeostat, "transformers": transformers, "vllm": vllm}


def say(found: dict[str, Any]) -> None:
    print(SAYS, json.dumps(found), flush=True)


def run_laps(task: Task) -> None:
    prompts = task.prompts(task.vocabulary)
    with SIDES[task.side](task) as run:
        run(prompts, WARM_UP_TOKENS)
        say({})
        for _ in sys.stdin:
            started = time.perf_counter()
            tokens = run(prompts, task.new_tokens)
            wall_s = time.perf_counter() - started
            sizes = [len(one) for one in tokens]
            assert sizes == [task.new_tokens] * task.batch, "not all were sampled"
            say({"wall_s": wall_s, "tokens": tokens})


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    task = Task(**json.loads(sys.argv[1]))
    if task.side == "ceiling":
        say(ceiling(task))
    else:
        run_laps(task)


if __name__ == "__main__":
    main()
