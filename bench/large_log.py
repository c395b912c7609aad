"""A console log of any size, as an RL run on a cluster leaves it: composed from a seed.

Per step: the row of metrics (verl's, or TRL's after a progress bar), bars that are redrawn behind
carriage returns, what vLLM and SGLang print of themselves, the web server's access lines, warnings
that come again, messages of Ray's workers, and completions in words that never repeat. Nothing here
is taken from a real run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_STEPS = 100_000
_WORDS = [
    "the",
    "a",
    "of",
    "to",
    "number",
    "sum",
    "list",
    "then",
    "first",
    "so",
    "value",
    "equals",
    "answer",
    "step",
    "we",
    "have",
    "because",
    "largest",
    "remainder",
    "prime",
    "even",
    "odd",
    "triangle",
    "angle",
    "let",
    "x",
    "y",
    "compute",
    "multiply",
    "divide",
    "check",
    "total",
    "result",
    "therefore",
    "finally",
    "wait",
    "again",
    "carefully",
    "known",
    "length",
    "width",
    "apples",
    "train",
    "hours",
    "speed",
    "distance",
]
_NAMES = [
    "actor/entropy",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/pg_clipfrac_lower",
    "actor/grad_norm",
    "perf/mfu/actor",
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
    "perf/cpu_memory_used_gb",
    "actor/lr",
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "critic/rewards/mean",
    "critic/rewards/max",
    "critic/rewards/min",
    "critic/advantages/mean",
    "critic/advantages/max",
    "critic/advantages/min",
    "critic/returns/mean",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "prompt_length/max",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/step",
    "timing_per_token_ms/gen",
    "perf/throughput",
]


def write_log(path: Path, *, num_bytes: int, seed: int, style: str = "verl") -> int:
    """Write a log of at least so many bytes. Returns the number of steps in it."""
    rng = random.Random(seed)
    written = step = 0
    with path.open("wb") as file:
        written += file.write("".join(_start(rng)).encode())
        while written < num_bytes:
            step += 1
            written += file.write("".join(_step(rng, step, style)).encode())
    return step


def lines(*, seed: int, num_steps: int, style: str = "verl") -> Iterator[str]:
    """The lines of a log of so many steps."""
    rng = random.Random(seed)
    yield from _start(rng)
    for step in range(1, num_steps + 1):
        for text in _step(rng, step, style):
            yield from text.splitlines(keepends=True) if "\r" not in text else [text]


def _start(rng: random.Random) -> Iterator[str]:
    yield "+ python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_length=4096\n"
    yield f"(TaskRunner pid=4711) Total training steps: {NUM_STEPS}\n"
    for rank in range(64):
        yield (
            f"(WorkerDict pid={9000 + rank}) NCCL INFO Channel {rng.randrange(32):02d}/0 : "
            f"{rank}[{rank % 8}] -> {rank + 1}[{(rank + 1) % 8}] via P2P/CUMEM\n"
        )


def _step(rng: random.Random, step: int, style: str) -> Iterator[str]:
    makers: tuple[tuple[Callable[[random.Random, int], str], int], ...] = (
        (_access, 40), (_vllm, 12), (_sglang, 12), (_message, 25), (_warning, 10), (_words, 25),
    )  # fmt: skip
    lines = [make(rng, step) for make, count in makers for _ in range(count)]
    rng.shuffle(lines)
    yield from lines
    yield _bars(rng)
    yield _verl(rng, step) if style == "verl" else _trl(rng, step)


def _clock(rng: random.Random, step: int) -> str:
    return f"2026-03-{1 + step // 3000 % 28:02d} {step // 60 % 24:02d}:{step % 60:02d}:" + (
        f"{rng.randrange(60):02d},{rng.randrange(1000):03d}"
    )


def _access(rng: random.Random, step: int) -> str:
    route = rng.choice(("generate", "v1/completions", "health", "update_weights_from_tensor"))
    return (
        f"(SGLangHttpServer pid={5000 + rng.randrange(8)}, ip=10.0.0.{rng.randrange(9)}) INFO:     "
        f'10.0.0.{rng.randrange(9)}:{rng.randrange(30000, 60000)} - "POST /{route} HTTP/1.1" '
        "200 OK\n"
    )


def _vllm(rng: random.Random, step: int) -> str:
    return (
        f"(EngineCore_DP{rng.randrange(8)} pid={7000 + rng.randrange(8)}) INFO "
        f"{_clock(rng, step)} [loggers.py:123] Engine 00{rng.randrange(8)}: Avg prompt throughput: "
        f"{rng.uniform(0, 9000):.1f} tokens/s, Avg generation throughput: "
        f"{rng.uniform(0, 9000):.1f} tokens/s, Running: {rng.randrange(256)} reqs, Waiting: "
        f"{rng.randrange(20)} reqs, GPU KV cache usage: {rng.uniform(0, 99):.1f}%, "
        f"Prefix cache hit rate: {rng.uniform(0, 99):.1f}%\n"
    )


def _sglang(rng: random.Random, step: int) -> str:
    return (
        f"(WorkerDict pid={6000 + rng.randrange(8)}) [{_clock(rng, step)} TP{rng.randrange(4)}] "
        f"Decode batch, #running-req: {rng.randrange(256)}, #token: {rng.randrange(99999)}, "
        f"token usage: {rng.random():.2f}, cuda graph: True, gen throughput (token/s): "
        f"{rng.uniform(0, 9000):.2f}, #queue-req: {rng.randrange(20)}\n"
    )


def _message(rng: random.Random, step: int) -> str:
    text = rng.choice(
        (
            f"Bucket {rng.randrange(40)} of weights sent to rank {rng.randrange(64)} "
            f"in {rng.random():.3f} s",
            f"request {rng.getrandbits(64):016x} finished with {rng.randrange(4096)} tokens",
            f"Rewards of batch {rng.randrange(999)} computed by worker {rng.randrange(16)}",
            f"memory allocated: {rng.uniform(10, 70):.2f} GB, reserved: {rng.uniform(60, 75):.2f}",
            f"micro-batch {rng.randrange(64)}/64 packed, {rng.randrange(16384)} tokens",
        )
    )
    return f"(WorkerDict pid={9000 + rng.randrange(64)}) {_clock(rng, step)} INFO {text}\n"


def _warning(rng: random.Random, step: int) -> str:
    return rng.choice(
        (
            f"[rank{rng.randrange(64)}]: /opt/venv/lib/python3.11/site-packages/torch/utils/"
            "checkpoint.py:85: UserWarning: None of the inputs have requires_grad=True.\n",
            "Setting `pad_token_id` to `eos_token_id`:151643 for open-end generation.\n",
            f"(WorkerDict pid={9000 + rng.randrange(64)}) WARNING {_clock(rng, step)} "
            "[scheduler.py:444] The input is too long and was cut at 4096 tokens.\n",
        )
    )


def _words(rng: random.Random, step: int) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randrange(8, 40))) + ".\n"


def _bars(rng: random.Random) -> str:
    total = rng.randrange(24, 64)
    drawn = (
        f"Generating:  {100 * n // total}%|{'#' * (n * 10 // total):10}| {n}/{total} "
        f"[00:{n:02d}<00:{total - n:02d},  {rng.uniform(0.5, 3):.2f}it/s]"
        for n in range(1, total + 1)
    )
    return "\r".join(drawn) + "\n"


def _verl(rng: random.Random, step: int) -> str:
    pairs = " - ".join(f"{name}:{rng.random()!r}" for name in _NAMES)
    return f"(TaskRunner pid=4711) step:{step} - global_seqlen/mean:{rng.random()!r} - {pairs}\n"


def _trl(rng: random.Random, step: int) -> str:
    names = [
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "completions/mean_length",
        "completions/min_length",
        "completions/max_length",
        "completions/clipped_ratio",
        "rewards/accuracy/mean",
        "rewards/accuracy/std",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "kl",
        "entropy",
        "step_time",
    ]
    row = {name: round(rng.random(), 6) for name in names} | {"epoch": step / 1000}
    share = 100 * step // NUM_STEPS
    return f"{row}\n {share}%|#    | {step}/{NUM_STEPS} [1:02:03<4:05:06,  6.60s/it]\n"
