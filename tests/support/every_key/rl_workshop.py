"""The workshop of RL keys: tiny real runs that sample, and ones that train on what was sampled.

    base recipe                      one step of 4 prompts x 4 samples, one update   ~0.2 s
    base recipe + SAVED + changes    the same rollouts, trained on again             ~0.04 s

A key of the loss is judged on saved rollouts: nothing but the key differs, and with one update the
ratio of new to old policy is exactly 1, so that what must come out is simple arithmetic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.support import tiny, tiny_moe, tiny_rl
from tests.support.every_key.workshop import EXPORTED, Run, Workshop

from homeostat.observe.completions import read_completions
from homeostat.observe.jsonl import read_metrics

# Two steps of rollouts, and the same of other weights.
SAVED = ("debug={mode: train_only, rollouts: runs/sampled}",)
SAMPLED_ONLY = ("debug={mode: rollout_only}",)
# Weights of the same shape as the policy's, and not the same.
OTHER_REFERENCE = "reference={type: checkpoint, path: other}"
PRETRAINED = ("model.path=initial", "model.init=pretrained")

REWARDS = """
import os
import time
import zlib

def starts_low(completions, bonus=0.0, **columns):
    return [float(text[:1] in "012") + bonus for text in completions]

def starts_high(completions, **columns):
    return [float(text[:1] in "789") for text in completions]

def checksum(prompts, completions, **columns):
    return [float(zlib.crc32(repr(pair).encode()) % 1000) for pair in zip(prompts, completions)]

def fails_on_zero(completions, **columns):
    return [float("nan") if text[:1] == "0" else float(text[:1] in "12") for text in completions]

def process(completions, **columns):
    # Groups are handed out as they come: each worker is to be busy when the next one does.
    time.sleep(0.2)
    return [float(os.getpid())] * len(completions)

def slow(completions, **columns):
    time.sleep(0.5)
    return [1.0] * len(completions)
"""


class RlWorkshop(Workshop):
    """Models, prompts, reward functions and saved rollouts."""

    def fill(self) -> None:
        tiny_rl.recipe(self.folder)
        (self.folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        tiny.write_model(self.folder / "chat")
        tiny_rl.write_model(self.folder / "routed", **tiny_moe.QWEN)
        write_letters(self)
        write_texts(self)
        write_prompts(self)
        self.run("name=sampled", *SAMPLED_ONLY, "trainer.max_steps=2")
        self.run("name=sampled_other", *SAMPLED_ONLY, "seed=1")
        still = ("trainer.lr=0.0", *EXPORTED)
        self.keep_export(self.run(*SAVED, *still), "initial")
        self.keep_export(self.run(*SAVED, *still, "seed=1"), "other")
        adapted = (*SAVED, *PRETRAINED, "lora={rank: 4}", *EXPORTED)
        self.keep_export(self.run(*adapted), "adapter")

    def recipe(self, name: str) -> dict[str, Any]:
        trainer = {"max_steps": 1, "lr": 1e-2, "threads": 1, "device": "cpu"}
        return tiny_rl.recipe(
            self.folder,
            name=name,
            runs_dir="runs",
            # By tokens: the mean advantage of completions is 0, and so would be the loss.
            algorithm={"type": "grpo", "normalise": "token"},
            rewards={"functions": [{"type": "regex_format", "pattern": "[0-2].*"}]},
            trainer=trainer,
            checkpoint={"interval_steps": 100},
        ) | {"trainer": trainer}


def write_letters(workshop: Workshop) -> None:
    """The model with letters in place of some digits, so that there is case to ignore."""
    folder = tiny_rl.write_model(workshop.folder / "letters")
    file = folder / "tokenizer.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    letters = dict(zip("0123", "aAbB", strict=True))
    vocabulary = description["model"]["vocab"]
    description["model"]["vocab"] = {letters.get(k, k): v for k, v in vocabulary.items()}
    file.write_text(json.dumps(description), encoding="utf-8")


def write_texts(workshop: Workshop) -> None:
    """Texts of 30 digits, to be continued."""
    digits = ["".join(str(place * step % 10) for place in range(3, 33)) for step in (7, 3)]
    lines = [json.dumps({"text": text}) for text in digits]
    (workshop.folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")


def write_prompts(workshop: Workshop) -> None:
    """Rows with two columns of prompts; and, in another file, fewer and other rows."""
    rows = [
        {"prompt": f"turn {number}", "question": f"what is {number}?", "letter": "A"}
        for number in range(16)
    ]
    for name, chosen in (("asked.jsonl", rows[:12]), ("others.jsonl", rows[10:])):
        text = "\n".join(json.dumps(row) for row in chosen)
        (workshop.folder / name).write_text(text, encoding="utf-8")
    parts = ("main/train", "main/test", "other/train", "other/test")
    for number, name in enumerate(parts):
        file = workshop.folder / "parts" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(map(json.dumps, rows[number : 8 + number])), encoding="utf-8")


# What can be seen of an RL run.


@dataclass(frozen=True)
class Samples:
    """The completions of a step: arrays over samples, and their texts."""

    group_S: np.ndarray
    reward_S: np.ndarray
    advantage_S: np.ndarray
    length_S: np.ndarray
    prompts: list[str]
    texts: list[str]
    stops: list[str]


def samples(run: Run, step: int = 1) -> Samples:
    rows = read_completions(run.dir / "completions", step)

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], dtype=float)

    return Samples(
        *(column(name) for name in ("group", "reward", "advantage", "num_tokens")),
        *([row[name] for row in rows] for name in ("prompt", "completion", "stop_reason")),
    )


def texts(run: Run) -> list[str]:
    return samples(run).texts


def only(name: str, run: Run) -> float:
    """The metric of a run of one step."""
    (value,) = run.metric(name)
    return value


def transports(run: Run) -> set[str]:
    """Ways that weights took to the engine."""
    return {event["transport"] for event in run.events("weights_published")}


def evaluated(run: Run) -> dict[str, float]:
    """All that was measured on held-out prompts, last."""
    last = list(read_metrics(run.dir / "metrics.jsonl"))[-1]
    return {name: value for name, value in last.items() if name.startswith("eval/")}
