"""The recipes of the clinic's runs without any fault.

A run of RL or preferences starts from a base policy: a model that was trained on its game for a few
steps and gets a part of the answers right. Base policies are trained once and stored in the
clinic's folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homeostat.clinic import bodies

Raw = dict[str, Any]

NUM_ROWS = 2048
# Number of steps after which a policy gets a part of the answers right, but not all.
STEPS_OF_BASE = {
    "sort": 32,
    "reverse": 40,
    "copy": 30,
    "largest": 12,
    "parity": 16,
    "count": 20,
    "shift": 28,
    "evens": 24,
}
# A loss that keeps the loads of experts even.
BALANCED: Raw = {"model.moe": {"balancing": "aux", "aux_loss_coefficient": 0.01}}
# A reward that is measured on held-out prompts and not trained on.
GOLD_REWARD: Raw = {"type": "exact_match", "name": "gold", "role": "eval"}
GOLD: Raw = {
    "data.validation_share": 0.03,
    "eval.interval_steps": 4,
    "rewards.functions": [{"type": "exact_match"}, GOLD_REWARD],
}
# Half of the usual prompts, for faults that need no more.
FEW_PROMPTS: Raw = {"rollout.prompts_per_step": 16}
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
ROW_MAKERS = {
    "prompt_completion": bodies.worked_rows,
    "text": bodies.text_rows,
    "messages": bodies.chat_rows,
}


@dataclass(frozen=True, slots=True)
class Body:
    """A healthy run: its game, its rows, its algorithm and its size.

    `changes` are keys of the recipe ("trainer.lr": 1e-3) that differ from the usual ones.
    """

    game: str = "sort"
    algorithm: str = "grpo"
    rows: str = "prompt_completion"
    width: int = 64
    layers: int = 2
    steps: int = 40
    num_digits: tuple[int, ...] = (5,)
    family: str = "llama"
    # SFT that starts from a base policy, as RL always does.
    pretrained: bool = False
    # The run is stopped after this step and resumed.
    stops_at: int | None = None
    changes: Raw = field(default_factory=dict)

    @property
    def is_rl(self) -> bool:
        return self.algorithm not in ("sft", *PREFERENCES)

    @property
    def base(self) -> Base | None:
        """Return the policy from which it starts."""
        if self.algorithm == "sft" and not self.pretrained:
            return None
        return Base(
            self.game,
            self.width,
            self.layers,
            self.num_digits,
            self.family,
            is_chat=self.rows == "messages",
        )

    def recipe(self, folder: Path, *, bases: Path, seed: int) -> Raw:
        """Write its files to the folder, and return the recipe of a run in folder/runs/run."""
        is_preference = self.algorithm in PREFERENCES
        make = self._rl if self.is_rl else self._preference if is_preference else self._sft
        raw = make(folder, seed)
        if self.base is not None:
            raw["model"] = {"path": str(self.base.weights(bases))}
        raw |= {"name": "run", "runs_dir": str(folder / "runs"), "seed": seed}
        raw["observe"] = {"console": "quiet", "report": False}
        raw["checkpoint"] = {"interval_steps": 10, "export": "off"}
        for key, value in self.changes.items():
            put(raw, key, value)
        return raw

    def _sft(self, folder: Path, seed: int) -> Raw:
        kinds = {"num_digits": self.num_digits}
        make = ROW_MAKERS[self.rows]
        train = bodies.write_rows(
            folder / "train.jsonl", make(self.game, NUM_ROWS, seed=seed, **kinds)
        )
        held_out = bodies.write_rows(
            folder / "eval.jsonl", make(self.game, bodies.NUM_HELD_OUT, seed=seed + 10**6, **kinds)
        )
        source: Raw = {"type": self.rows}
        if self.rows == "prompt_completion":
            source["chat"] = False
        sizes = {"width": self.width, "layers": self.layers}
        model = bodies.write_model(folder / "model", **sizes, family=self.family)
        return {
            "model": {"path": str(model), "init": "random"},
            "data": {
                "train": [{**source, "path": str(train)}],
                "validation": [{**source, "path": str(held_out)}],
                "max_length": 32,
            },
            "algorithm": {"type": "sft"},
            "trainer": {**_trainer(self.steps), "batch_rows": 32, "lr": 3e-3},
            "eval": {"interval_steps": 10},
        }

    def _preference(self, folder: Path, seed: int) -> Raw:
        kinds = {"num_digits": self.num_digits}
        source: Raw = {"type": "preference", "chat": False}
        files = {
            name: bodies.write_rows(
                folder / f"{name}.jsonl", bodies.pair_rows(self.game, count, seed=own, **kinds)
            )
            for name, count, own in (
                ("train", NUM_ROWS, seed),
                ("eval", bodies.NUM_HELD_OUT, seed + 10**6),
            )
        }
        return {
            "data": {
                "train": [{**source, "path": str(files["train"])}],
                "validation": [{**source, "path": str(files["eval"])}],
                "max_length": 32,
            },
            "algorithm": {"type": self.algorithm},
            "trainer": {**_trainer(self.steps), "batch_rows": 32, "lr": 2e-4},
            "eval": {"interval_steps": 10},
        }

    def _rl(self, folder: Path, seed: int) -> Raw:
        rows = bodies.prompt_rows(self.game, NUM_ROWS, seed=seed, num_digits=self.num_digits)
        prompts = bodies.write_rows(folder / "train.jsonl", rows)
        return {
            "data": {
                "train": [
                    {"type": "prompts", "path": str(prompts), "chat": self.rows == "messages"}
                ],
                "max_length": 32,
            },
            "algorithm": {"type": self.algorithm},
            "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_new_tokens": 8},
            "rewards": {"functions": [{"type": "exact_match"}]},
            "trainer": {**_trainer(self.steps), "updates_per_step": 1, "lr": 1e-3},
        }


@dataclass(frozen=True, slots=True)
class Base:
    """A policy that was trained on its game by a short run on worked examples."""

    game: str
    width: int
    layers: int
    num_digits: tuple[int, ...]
    family: str = "llama"
    # It was taught chats, in turns of the chat template.
    is_chat: bool = False

    @property
    def name(self) -> str:
        digits = "".join(map(str, self.num_digits))
        kind = "-chat" if self.is_chat else ""
        return f"{self.game}_{self.family}_{self.width}x{self.layers}_{digits}{kind}"

    def weights(self, bases: Path) -> Path:
        return bases / self.name / "runs" / "run" / "checkpoints" / f"step_{self.steps:08d}" / "hf"

    @property
    def steps(self) -> int:
        return STEPS_OF_BASE[self.game]

    def recipe(self, folder: Path) -> Raw:
        changes: Raw = {"checkpoint.export": "final", "trainer.batch_rows": 64}
        if self.family != "llama":
            # As in pretraining: a base whose experts are all in use.
            changes |= BALANCED
        body = Body(
            self.game,
            "sft",
            rows="messages" if self.is_chat else "prompt_completion",
            width=self.width,
            layers=self.layers,
            steps=self.steps,
            num_digits=self.num_digits,
            family=self.family,
            changes=changes,
        )
        raw = body.recipe(folder, bases=folder, seed=0)
        del raw["data"]["validation"], raw["eval"]
        return raw


def put(raw: Raw, key: str, value: Any) -> None:
    """Set a dotted key of a raw recipe. A value that is a choice (has a type) replaces it whole."""
    *path, last = key.split(".")
    for name in path:
        raw = raw.setdefault(name, {})
    raw[last] = value


def _trainer(steps: int) -> Raw:
    return {
        "device": "cpu",
        "threads": 1,
        "max_steps": steps,
        "max_tokens_per_device": 1024,
        "schedule": {"type": "constant", "warmup_steps": 3},
    }
