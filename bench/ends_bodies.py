"""Healthy logs of many frameworks, as lines: the body to which bench/doctor_ends.py adds an end.

A body is composed from a seed in the shape that the framework prints; nothing is taken from a run.
`total` is the planned number of steps, which the body shows where its framework does.
"""
# ruff: noqa: E501 (lines of logs)

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Body:
    """The lines of a healthy run, what it prints when it finishes, and what it shows of its plan.

    `shows_total` is False if the log does not say how long the run is to be; `bad` makes a line of
    metrics that are not finite.
    """

    lines: tuple[str, ...]
    finish: tuple[str, ...]
    shows_total: bool
    bad: tuple[str, ...]
    prefix: str = ""


def _rows(rng: random.Random, steps: int, total: int) -> Iterator[Row]:
    for step in range(1, steps + 1):
        done = step / total
        yield {
            "step": step,
            "sft_loss": round(2.2 - 1.1 * done + rng.gauss(0, 0.03), 4),
            "loss": round(rng.gauss(0.02, 0.01), 5),
            "reward": round(0.25 + 0.4 * done + rng.gauss(0, 0.02), 4),
            "reward_std": round(rng.uniform(0.25, 0.4), 4),
            "kl": round(0.002 + 0.01 * done + abs(rng.gauss(0, 0.0005)), 6),
            "entropy": round(0.8 - 0.15 * done + rng.gauss(0, 0.01), 4),
            "grad_norm": round(rng.lognormvariate(-0.9, 0.15), 4),
            "lr": round(1e-6 * (1 - 0.9 * done), 12),
            "length": round(310 * math.exp(rng.gauss(0, 0.03)), 1),
            "seconds": round(rng.uniform(20, 24), 2),
        }  # fmt: skip


def trl(rows: list[Row], total: int) -> Body:
    lines = ["***** Running training *****", f"  Total optimization steps = {total}"]
    for row in rows:
        lines += [_trl_row(row, total), _bar(row, total)]
    end = {
        "train_runtime": 812.4,
        "train_samples_per_second": 1.9,
        "train_loss": 0.021,
        "epoch": 1.0,
    }
    return Body(tuple(lines), (str(end),), True, (_trl_bad(rows[-1]["step"] + 1, total),))


def _trl_row(row: Row, total: int) -> str:
    shown = {
        "loss": row["loss"], "grad_norm": row["grad_norm"], "learning_rate": row["lr"],
        "reward": row["reward"], "reward_std": row["reward_std"], "kl": row["kl"],
        "completions/mean_length": row["length"], "completions/clipped_ratio": 0.02,
        "frac_reward_zero_std": 0.1, "entropy": row["entropy"], "epoch": round(row["step"] / total, 4),
    }  # fmt: skip
    return str(shown)


def _trl_bad(step: float, total: int) -> str:
    return str({"loss": math.nan, "grad_norm": math.nan, "learning_rate": 1e-7, "reward": 0.0,
                "reward_std": 0.0, "kl": math.nan, "epoch": round(step / total, 4)})  # fmt: skip


def _bar(row: Row, total: int) -> str:
    step = int(row["step"])
    return f" {100 * step // total}%|###       | {step}/{total} [00:{step % 60:02d}<10:00, 3.1s/it]"


def hf(rows: list[Row], total: int) -> Body:
    lines = ["***** Running training *****", f"  Total optimization steps = {total}"]
    for row in rows:
        shown = {"loss": row["sft_loss"], "grad_norm": row["grad_norm"], "learning_rate": row["lr"],
                 "epoch": round(row["step"] / total, 4)}  # fmt: skip
        lines += [str(shown), _bar(row, total)]
    end = {"train_runtime": 412.8, "train_loss": 1.61, "epoch": 1.0}
    bad = {"loss": math.nan, "grad_norm": math.nan, "learning_rate": 1e-7, "epoch": 0.9}
    return Body(tuple(lines), (str(end), "***** train metrics *****"), True, (str(bad),))


def axolotl(rows: list[Row], total: int) -> Body:
    body = hf(rows, total)
    head = (
        "[2026-05-20 21:21:35,020] [INFO] [axolotl.train.train:330] [PID:4242] Starting trainer..."
    )
    end = "[2026-05-20 23:40:02,118] [INFO] [axolotl.train.save_trained_model:231] [PID:4242] Training completed! Saving trained model"
    return Body((head, *body.lines), (*body.finish, end), True, body.bad)


def llama_factory(rows: list[Row], total: int) -> Body:
    lines = [
        f"[INFO|trainer.py:2414] 2026-05-20 21:21:35,020 >>   Total optimization steps = {total}"
    ]
    for row in rows:
        shown = {"loss": row["sft_loss"], "grad_norm": row["grad_norm"], "learning_rate": row["lr"],
                 "epoch": round(row["step"] / total, 4)}  # fmt: skip
        lines += [
            f"[INFO|2026-05-20 21:22:{int(row['step']) % 60:02d}] llamafactory.train.callbacks:157 >> {shown}",
            _bar(row, total),
        ]
    bad = "[INFO|2026-05-20 21:40:01] llamafactory.train.callbacks:157 >> {'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-07, 'epoch': 0.9}"
    return Body(tuple(lines), ("***** train metrics *****", "  train_loss = 1.61"), True, (bad,))


def verl(rows: list[Row], total: int) -> Body:
    lines = [f"(TaskRunner pid=11) Total training steps: {total}"]
    lines += [f"(TaskRunner pid=11) {_verl_row(row)}" for row in rows]
    bad = dict(rows[-1], step=rows[-1]["step"] + 1, loss=math.nan, grad_norm=math.nan)
    return Body(
        tuple(lines),
        ("(TaskRunner pid=11) Final validation metrics: None",),
        True,
        (f"(TaskRunner pid=11) {_verl_row(bad)}",),
        "(WorkerDict pid=12) ",
    )


def _verl_row(row: Row) -> str:
    pairs = {
        "actor/pg_loss": row["loss"], "actor/grad_norm": row["grad_norm"],
        "actor/entropy": row["entropy"], "critic/score/mean": row["reward"],
        "critic/rewards/mean": row["reward"], "actor/kl_loss": row["kl"],
        "response_length/mean": row["length"], "timing_s/gen": row["seconds"],
        "timing_s/step": 2 * row["seconds"], "actor/lr": row["lr"],
    }  # fmt: skip
    return f"step:{int(row['step'])} - " + " - ".join(f"{k}:{v}" for k, v in pairs.items())


def slime(rows: list[Row], total: int) -> Body:
    lines = []
    for row in rows:
        at = int(row["step"]) - 1
        lines += [
            f"(RolloutManager pid=1) rollout.py:119 - perf {at}: {{'rollout/response_len/mean': {row['length']}, 'perf/rollout_time': {row['seconds']}}}",
            f"(MegatronTrainRayActor pid=2) data.py:21 - rollout {at}: {{'rollout/raw_reward': {row['reward']}, 'rollout/truncated': 0.02}}",
            f"(MegatronTrainRayActor pid=2) model.py:62 - step {at}: {{'train/loss': {row['loss']}, 'train/grad_norm': {row['grad_norm']}, 'train/entropy_loss': {row['entropy']}, 'train/step': {at}}}",
        ]
    at = int(rows[-1]["step"])
    bad = f"(MegatronTrainRayActor pid=2) model.py:62 - step {at}: {{'train/loss': nan, 'train/grad_norm': nan, 'train/entropy_loss': nan, 'train/step': {at}}}"
    return Body(
        tuple(lines),
        ("(raylet) Training completed.",),
        False,
        (bad,),
        "(MegatronTrainRayActor pid=2) ",
    )


def openrlhf(rows: list[Row], total: int) -> Body:
    lines = []
    for row in rows:
        step = int(row["step"])
        status = {"policy_loss": row["loss"], "reward": row["reward"], "kl": row["kl"],
                  "response_length": row["length"], "actor_lr": row["lr"],
                  "policy_entropy": row["entropy"]}  # fmt: skip
        lines += [
            f"Train epoch [1/1]: {100 * step // total}%|#  | {step}/{total} [00:52<06:09, 6.60s/it, pg={row['loss']}, rm={row['reward']}, glen={row['length']:.0f}, kl={row['kl']}]",
            f"✨ Global step {step}: {status}",
        ]
    bad = {"policy_loss": math.nan, "reward": math.nan, "kl": math.nan, "response_length": 300.0}
    step = int(rows[-1]["step"]) + 1
    return Body(
        tuple(lines),
        ("Training finished.",),
        True,
        (f"✨ Global step {step}: {bad}",),
        "(PolicyModelActor pid=77) ",
    )


def prime_rl(rows: list[Row], total: int) -> Body:
    lines = [
        f"14:{int(row['step']) % 60:02d}:51 SUCCESS Step {int(row['step'])} | Time: {row['seconds']}s | Reward: {row['reward']} | Throughput: 5166.5 tokens/s | Seq. Length: {row['length']} tokens/sample | Async Level: 1 | Max. Off-Policy Level: 2"
        for row in rows
    ]
    bad = f"14:59:51 SUCCESS Step {int(rows[-1]['step']) + 1} | Time: 21.0s | Reward: nan | Throughput: 5166.5 tokens/s | Seq. Length: 300.1 tokens/sample | Async Level: 1 | Max. Off-Policy Level: 2"
    return Body(tuple(lines), ("14:59:59 SUCCESS Training finished!",), False, (bad,))


def nemo_rl(rows: list[Row], total: int) -> Body:
    lines = []
    for row in rows:
        lines += _nemo_block(row, total)
    bad = dict(rows[-1], step=rows[-1]["step"] + 1, loss=math.nan, kl=math.nan, grad_norm=math.nan)
    return Body(tuple(lines), ("Training complete.",), True, tuple(_nemo_block(bad, total)))


def _nemo_block(row: Row, total: int) -> list[str]:
    step = int(row["step"])
    return [
        f"========================= Step {step}/{total} =========================",
        "\U0001f4ca Training Results:",
        f"  • Loss: {row['loss']}",
        f"  • Generation KL Error: {0.0021 + row['loss'] / 1e3}",
        f"  • Avg Reward: {row['reward']}",
        f"  • Mean Generation Length: {row['length']}",
        f"  • Total step time: {row['seconds']}s",
        json.dumps({"step": step, "train/grad_norm": row["grad_norm"]}),
    ]


def titan(rows: list[Row], total: int) -> Body:
    def line(row: Row) -> str:
        return (
            f"[rank0]:[titan] 2026-06-21 18:{int(row['step']) % 60:02d}:46,402 - root - INFO - step: {row['step']:2.0f}"
            f"  loss:  {row['sft_loss']:.4f}  grad_norm:  {row['grad_norm']:.4f}  lr: {row['lr']:.4e}"
            "  memory: 41.20GiB(52.1%)  tps: 6,200  tflops: 31.20  mfu: 41.20%"
        )

    head = f"[rank0]:[titan] 2026-06-21 18:00:01,402 - root - INFO - Training starts at step 1, with total steps {total}"
    bad = line(dict(rows[-1], step=rows[-1]["step"] + 1, sft_loss=math.nan, grad_norm=math.nan))
    end = "[rank0]:[titan] 2026-06-21 19:10:46,402 - root - INFO - Training completed"
    return Body((head, *map(line, rows)), (end,), False, (bad,), "[rank0]:")


def xtuner(rows: list[Row], total: int) -> Body:
    def line(row: Row) -> str:
        return (
            f"02/19 22:{int(row['step']) % 60:02d}:31 - mmengine - INFO - Epoch(train)  [1][{int(row['step'])}/{total}]"
            f"  lr: {row['lr']:.4e}  eta: 2:50:00  time: 2.8906  data_time: 0.0040  memory: 10762"
            f"  loss: {row['sft_loss']:.4f}  grad_norm: {row['grad_norm']:.4f}"
        )

    bad = line(dict(rows[-1], step=rows[-1]["step"] + 1, sft_loss=math.nan, grad_norm=math.nan))
    end = "02/19 23:31:31 - mmengine - INFO - Training completed"
    return Body(tuple(map(line, rows)), (end,), False, (bad,))


def litgpt(rows: list[Row], total: int) -> Body:
    def line(row: Row) -> str:
        return (
            f"Epoch 1 | iter {int(row['step'])} step {int(row['step'])} | loss train: "
            f"{row['sft_loss']:.3f}, val: n/a | iter time: 301.20 ms (step)"
        )

    bad = line(dict(rows[-1], step=rows[-1]["step"] + 1, sft_loss=math.nan))
    return Body(
        tuple(map(line, rows)), ("Training time: 412.10s", "Training completed."), False, (bad,)
    )


def swift(rows: list[Row], total: int) -> Body:
    def line(row: Row) -> str:
        return json.dumps(
            {"loss": row["loss"], "grad_norm": row["grad_norm"], "learning_rate": row["lr"],
             "memory(GiB)": 61.4, "completions/mean_length": row["length"], "kl": row["kl"],
             "reward": row["reward"], "reward_std": row["reward_std"],
             "global_step/max_steps": f"{int(row['step'])}/{total}"}
        )  # fmt: skip

    bad = line(dict(rows[-1], step=rows[-1]["step"] + 1, loss=math.nan, grad_norm=math.nan))
    end = json.dumps({"train_runtime": 812.4, "train_loss": 0.021})
    return Body(tuple(map(line, rows)), (end,), True, (bad,))


def skyrl(rows: list[Row], total: int) -> Body:
    lines = []
    for row in rows:
        step = int(row["step"])
        lines += [
            f"(skyrl_entrypoint pid=31) 2026-04-11 02:{step % 60:02d}:51.109 | INFO     | skyrl_train.trainer:train:301 - {{'reward/avg_raw_reward': {row['reward']}, 'policy/policy_loss': {row['loss']}, 'policy/raw_grad_norm': {row['grad_norm']}, 'policy/policy_kl': {row['kl']}, 'policy/policy_entropy': {row['entropy']}, 'trainer/global_step': {step}}}",
            f"(skyrl_entrypoint pid=31) Training Batches Processed: {100 * step // total}%|#| {step}/{total} [10:00<20:00, 40.1s/it]",
        ]
    step = int(rows[-1]["step"]) + 1
    bad = f"(skyrl_entrypoint pid=31) 2026-04-11 02:59:51.109 | INFO     | skyrl_train.trainer:train:301 - {{'reward/avg_raw_reward': nan, 'policy/policy_loss': nan, 'policy/raw_grad_norm': nan, 'trainer/global_step': {step}}}"
    return Body(
        tuple(lines),
        ("(skyrl_entrypoint pid=31) Training done!",),
        True,
        (bad,),
        "(skyrl_entrypoint pid=31) ",
    )


def jsonl(rows: list[Row], total: int) -> Body:
    def line(row: Row) -> str:
        return json.dumps({"step": int(row["step"]), "loss": row["sft_loss"], "lr": row["lr"],
                           "grad_norm": row["grad_norm"]})  # fmt: skip

    bad = line(dict(rows[-1], step=rows[-1]["step"] + 1, sft_loss=math.nan, grad_norm=math.nan))
    return Body(tuple(map(line, rows)), (), False, (bad,))


BODIES: dict[str, Callable[[list[Row], int], Body]] = {
    make.__name__: make
    for make in (trl, hf, axolotl, llama_factory, verl, slime, openrlhf, prime_rl, nemo_rl, titan,
                 xtuner, litgpt, swift, skyrl, jsonl)
}  # fmt: skip


@cache
def body(name: str, *, seed: int, steps: int, total: int) -> Body:
    """Return the healthy log of a framework after so many of its steps."""
    return BODIES[name](list(_rows(random.Random(seed), steps, total)), total)
