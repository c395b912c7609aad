"""Sound logs and metric files of every format that the doctor reads, composed from a seed.

A seed is a file name and its bytes, or a folder of them. Nothing here is taken from a real run.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator

Files = dict[str, bytes]
NUM_ROWS = 24


def _rows(rng: random.Random) -> Iterator[dict[str, float]]:
    """Return the metrics of an ordinary RL run."""
    reward, length = rng.uniform(0.0, 0.5), rng.uniform(80, 900)
    for step in range(1, NUM_ROWS + 1):
        reward = min(1.0, reward + rng.gauss(0.01, 0.03))
        length *= math.exp(rng.gauss(0, 0.05))
        yield {
            "step": step,
            "loss": round(rng.gauss(0.02, 0.02), 5),
            "reward": round(reward, 4),
            "reward_std": round(rng.uniform(0, 0.5), 4),
            "kl": round(abs(rng.gauss(0.02, 0.02)), 6),
            "entropy": round(rng.uniform(0.05, 0.6), 4),
            "grad_norm": round(rng.lognormvariate(-1, 0.7), 4),
            "learning_rate": 1e-6 * step / NUM_ROWS,
            "length": round(length, 1),
            "seconds": round(rng.uniform(10, 40), 2),
        }


def _encode(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def trl_dict(rng: random.Random) -> Files:
    lines = ["***** Running training *****", "  Num Epochs = 1", "  Total optimization steps = 99"]
    for row in _rows(rng):
        shown = {
            "loss": row["loss"], "grad_norm": row["grad_norm"], "reward": row["reward"],
            "learning_rate": row["learning_rate"], "reward_std": row["reward_std"],
            "completions/mean_length": row["length"], "rewards/format/mean": row["reward"],
            "kl": row["kl"], "entropy": row["entropy"], "epoch": row["step"] / 100,
        }  # fmt: skip
        lines += [
            str(shown),
            f" {int(row['step'])}%|#         | {int(row['step'])}/99 [00:21<04:28]",
        ]
    return {"train.log": _encode(lines)}


def hf_dict(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        lines.append(str({"loss": f"{2 - row['step'] / 30:.4f}", "epoch": row["step"] / 10}))
        if row["step"] % 5 == 0:
            lines.append(str({"eval_loss": 2.0, "eval_runtime": 48.2, "epoch": row["step"] / 10}))
    return {"train.log": _encode(lines)}


def verl_step(rng: random.Random) -> Files:
    lines = [
        "(TaskRunner pid=11) Total training steps: 99",
        "(WorkerDict pid=12) wrapped with FSDP",
    ]
    for row in _rows(rng):
        pairs = {
            "actor/pg_loss": row["loss"], "actor/grad_norm": row["grad_norm"],
            "actor/entropy": row["entropy"], "critic/score/mean": row["reward"],
            "response_length/mean": row["length"], "timing_s/gen": row["seconds"],
            "actor/lr": row["learning_rate"], "perf/max_memory_allocated_gb": 41.2,
        }  # fmt: skip
        text = " - ".join(f"{name}:{value}" for name, value in pairs.items())
        lines.append(f"(TaskRunner pid=11) step:{int(row['step'])} - {text}")
    return {"train.log": _encode(lines)}


def slime_dict(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        at = int(row["step"]) - 1
        perf = {"rollout/response_len/mean": row["length"], "perf/rollout_time": row["seconds"]}
        train = {"train/loss": row["loss"], "train/grad_norm": row["grad_norm"], "train/step": at}
        lines += [
            f"(RolloutManager pid=1) rollout.py:119 - perf {at}: {perf}",
            f"(RolloutManager pid=1) rollout {at} sample: 'First list ...' finish_reason=stop",
            f"(MegatronTrainRayActor pid=2) data.py:21 - rollout {at}: "
            f"{ {'rollout/raw_reward': row['reward'], 'rollout/truncated': 0.04} }",
            f"(MegatronTrainRayActor pid=2) model.py:62 - step {at}: {train}",
        ]
    return {"train.log": _encode(lines)}


def openrlhf(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        step = int(row["step"])
        lines.append(
            f"Train epoch [1/1]:  {step}%|#  | {step}/99 [00:52<06:09, 6.60s/it, "
            f"pg={row['loss']}, rm={row['reward']}, glen={row['length']:.0f}, kl={row['kl']}]"
        )
        status = {"policy_loss": row["loss"], "reward": row["reward"], "kl": row["kl"]}
        lines.append(f"\u2728 Global step {step}: {status}")
    return {"train.log": _encode(lines)}


def prime(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        step = int(row["step"])
        lines += [
            f"14:02:51    INFO Starting orchestrator step {step}",
            f"14:02:51 SUCCESS Step {step} | Time: {row['seconds']}s | Reward: {row['reward']} | "
            f"Throughput: 5166.5 tokens/s | Seq. Length: {row['length']} tokens/sample | "
            "Async Level: 1 | Max. Off-Policy Level: 2",
        ]
    return {"train.log": _encode(lines)}


def nemo(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        step = int(row["step"])
        lines += [
            f"========================= Step {step}/500 =========================",
            "\u25b6 Training policy...",
            "\U0001f4ca Training Results:",
            f"  \u2022 Loss: {row['loss']}",
            f"  \u2022 Generation KL Error: {row['kl']}",
            f"  \u2022 Avg Reward: {row['reward']}",
            f"  \u2022 Total step time: {row['seconds']}s",
            json.dumps({"step": step, "train/grad_norm": row["grad_norm"]}),
        ]
    return {"train.log": _encode(lines)}


def forge(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        lines += [
            f"=== [global_reduce] - METRICS STEP {int(row['step'])} ===",
            f"  grpo_loss/kl_divergence_mean: {row['kl'] * 1e6:,.1f}",
            f"  grpo_loss/total_loss: {row['loss']}",
            f"  reward/evaluate_response/avg_MathReward_reward: {row['reward']}",
            "==============================",
        ]
    return {"train.log": _encode(lines)}


def titan(rng: random.Random) -> Files:
    return {
        "train.log": _encode(
            [
                f"[rank0]:[titan] 2026-06-21 18:12:46,402 - root - INFO - step: {row['step']:2.0f}"
                f"  loss:  {7 - row['step'] / 9:.4f}  grad_norm:  {row['grad_norm']:.4f}"
                f"  lr: {row['learning_rate']:.4f}  memory: 41.20GiB(52.1%)  tps: 6,200"
                for row in _rows(rng)
            ]
        )
    }


def mmengine(rng: random.Random) -> Files:
    return {
        "train.log": _encode(
            [
                f"02/19 22:31:31 - mmengine - INFO - Epoch(train)  [1][{int(row['step']) * 10}/735]"
                f"  lr: 1.9960e-04  eta: 2:50:00  time: 2.8906  data_time: 0.0040  memory: 10762"
                f"  loss: {3 - row['step'] / 20:.4f}  grad_norm: {row['grad_norm']:.4f}"
                for row in _rows(rng)
            ]
        )
    }


def litgpt(rng: random.Random) -> Files:
    return {
        "train.log": _encode(
            [
                f"Epoch 1 | iter {int(row['step'])} step {int(row['step'])} | loss train: "
                f"{2 - row['step'] / 30:.3f}, val: n/a | iter time: 301.20 ms (step)"
                for row in _rows(rng)
            ]
        )
    }


def engines(rng: random.Random) -> Files:
    lines = []
    for row in _rows(rng):
        lines += [
            "(EngineCore_DP0 pid=2) INFO 03-26 22:45:43 [loggers.py:12] Engine 000: Avg prompt "
            f"throughput: 410.2 tokens/s, Avg generation throughput: {row['length']} tokens/s, "
            "Running: 12 reqs, Waiting: 3 reqs, GPU KV cache usage: 62.1%",
            f"[sglang] Decode batch, #running-req: 7, token usage: {row['entropy']:.2f}, "
            "gen throughput (token/s): 812.10, #queue-req: 1",
        ]
    return {"engine.log": _encode(lines)}


def traceback_log(rng: random.Random) -> Files:
    error = rng.choice(
        [
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.42 GiB.",
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)",
            "ValueError: No available memory for the cache blocks.",
            "KeyError: 'answer'",
            "ModuleNotFoundError: No module named 'flash_attn'",
        ]
    )
    lines = [
        "+ python train.py --lr 1e-6 --max-tokens-per-gpu 9216 trainer.n_gpus_per_node=8",
        "Namespace(lr=1e-06, n_samples_per_prompt=8, colocate=True)",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/opt/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 9',
        "[rank0]:     loss.backward()",
        f"[rank0]: {error}",
    ]
    return {"console.log": _encode(lines)}


def swift_jsonl(rng: random.Random) -> Files:
    lines = [
        json.dumps(
            {
                "loss": row["loss"],
                "grad_norm": row["grad_norm"],
                "memory(GiB)": 61.4,
                "completions/mean_length": row["length"],
                "reward": row["reward"],
                "global_step/max_steps": f"{int(row['step'])}/99",
                "percentage": "1.00%",
            }
        )
        for row in _rows(rng)
    ]
    return {"logging.jsonl": _encode(lines)}


def metrics_jsonl(rng: random.Random) -> Files:
    lines = [json.dumps({**row, "time": 1.7e9 + row["step"]}) for row in _rows(rng)]
    lines[rng.randrange(len(lines))] = json.dumps({"step": 7, "loss": "nan", "reward": "inf"})
    return {"metrics.jsonl": _encode(lines)}


def metrics_csv(rng: random.Random) -> Files:
    rows = list(_rows(rng))
    lines = [",".join(rows[0])] + [",".join(map(str, row.values())) for row in rows]
    return {"metrics.csv": _encode(lines)}


def trainer_state(rng: random.Random) -> Files:
    history = [{**row, "step": int(row["step"])} for row in _rows(rng)]
    state = {"global_step": NUM_ROWS, "max_steps": 99, "log_history": history}
    return {"trainer_state.json": json.dumps(state, indent=2).encode()}


def notebook_table(rng: random.Random) -> Files:
    lines = ["Step\tTraining Loss\treward\treward_std\tkl"]
    for row in _rows(rng):
        lines.append(f"{int(row['step'])}\t{row['loss']}\t{row['reward']}\t{row['kl']}\t0.1")
    return {"table.txt": _encode(lines)}


def tensorboard(rng: random.Random) -> Files:
    """Event files: length, its checksum, a protobuf, its checksum. Checksums are not looked at."""
    data = b""
    for row in _rows(rng):
        for tag in ("train/loss", "train/grad_norm", "train/learning_rate"):
            value = row[tag.removeprefix("train/")]
            name = tag.encode()
            inner = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", value)
            summary = b"\x0a" + bytes([len(inner)]) + inner
            event = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + bytes([int(row["step"])])
            event += b"\x2a" + bytes([len(summary)]) + summary
            data += struct.pack("<Q", len(event)) + b"\0\0\0\0" + event + b"\0\0\0\0"
    return {"events.out.tfevents.1700000000.host.1.0": data}


def wandb_folder(rng: random.Random) -> Files:
    """An offline folder; its log holds history records as W&B's LevelDB-like file has them."""
    rows = list(_rows(rng))
    data = b":W&B\x6e\xee\x00"
    for row in rows:
        record = b""
        for name in ("loss", "reward"):
            text = json.dumps(row[name]).encode()
            item = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x82\x01" + bytes([len(text)])
            item += text
            record += b"\x0a" + bytes([len(item)]) + item
        whole = b"\x12" + bytes([len(record)]) + record
        data += struct.pack("<IHB", 0, len(whole), 1) + whole
    summary = {**rows[-1], "_step": NUM_ROWS}
    return {
        "wandb/offline-run-20260101_000000-abc/run-abc.wandb": data,
        "wandb/offline-run-20260101_000000-abc/files/wandb-summary.json": json.dumps(
            summary
        ).encode(),
        "wandb/offline-run-20260101_000000-abc/files/config.yaml": b"lr:\n  value: 1e-06\n",
        "wandb/offline-run-20260101_000000-abc/files/output.log": trl_dict(rng)["train.log"],
    }


def run_folder(rng: random.Random) -> Files:
    """A run of ours, as much of it as the doctor reads."""
    config = {"name": "r", "algorithm": {"type": "grpo"}, "trainer": {"lr": 1e-6}}
    records = [
        {"step": int(row["step"]), "time": 1.7e9, "train/loss": row["loss"], "kl": row["kl"],
         "reward": row["reward"], "learning_rate": 1e-6, "time/step": row["seconds"]}
        for row in _rows(rng)
    ]  # fmt: skip
    events = [{"kind": "step_skipped", "step": 3, "time": 1.7e9, "reason": "loss"}]
    return {
        "config.json": json.dumps(config).encode(),
        "metrics.jsonl": _encode([json.dumps(record) for record in records]),
        "events.jsonl": _encode([json.dumps(event) for event in events]),
        "console.log": b"step 1 loss 0.3\nsaved checkpoints/step_10\n",
        "traceback.txt": traceback_log(rng)["console.log"],
    }


FORMATS: dict[str, Callable[[random.Random], Files]] = {
    make.__name__: make
    for make in (
        trl_dict, hf_dict, verl_step, slime_dict, openrlhf, prime, nemo, forge, titan, mmengine,
        litgpt, engines, traceback_log, swift_jsonl, metrics_jsonl, metrics_csv, trainer_state,
        notebook_table, tensorboard, wandb_folder, run_folder,
    )
}  # fmt: skip
