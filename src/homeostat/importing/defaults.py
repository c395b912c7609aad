"""Defaults of other frameworks that differ from ours and change what is learnt.

A recipe states them, because its user never wrote them down. They are those of TRL 1.16 (which
LLaMA-Factory shares through transformers), axolotl 0.10, verl 0.6, OpenRLHF 0.8 and Megatron-LM's
argument parser (slime, miles); an older version may differ, so each is marked in the recipe.
"""

from __future__ import annotations

from typing import Any

_TRANSFORMERS: dict[str, Any] = {
    "trainer.epochs": 3,
    "trainer.schedule.type": "linear",
    "trainer.schedule.warmup_steps": 0,
    "trainer.optimizer.weight_decay": 0.0,
}
# Framework -> our key -> its default there.
OF_ALL: dict[str, dict[str, Any]] = {
    "trl": _TRANSFORMERS,
    "llama_factory": {**_TRANSFORMERS, "trainer.lr": 5e-5},
    "axolotl": {
        "trainer.schedule.type": "cosine",
        "trainer.schedule.min_lr_share": 0.0,
        "trainer.optimizer.weight_decay": 0.0,
    },
    "slime": {"trainer.schedule.type": "linear", "trainer.schedule.warmup_steps": 0},
    "miles": {"trainer.schedule.type": "linear", "trainer.schedule.warmup_steps": 0},
    "openrlhf": {"trainer.optimizer.weight_decay": 0.0, "trainer.optimizer.beta2": 0.95},
}
# They sample one completion of a prompt by default; fewer than two are not possible here.
_OF_ONE_SAMPLE = ("verl", "openrlhf", "slime", "miles")
# The same for RL alone, and for runs that do not sample.
OF_RL: dict[str, dict[str, Any]] = {
    "trl": {"trainer.lr": 1e-6, "algorithm.normalise": "token"},
    "axolotl": {"algorithm.normalise": "token"},
    "verl": {
        "trainer.lr": 1e-6,
        "trainer.epochs": 30,
        "data.max_length": 512,
        "algorithm.normalise": "token",
        "trainer.schedule.type": "constant",
        "trainer.schedule.warmup_steps": 0,
    },
}
OF_ROWS: dict[str, dict[str, Any]] = {
    "trl": {"data.max_length": 1024},
    "openrlhf": {"trainer.batch_rows": 128, "trainer.lr": 1e-5, "data.max_length": 512},
    "verl": {
        "trainer.lr": 1e-5,
        "trainer.epochs": 4,
        "trainer.batch_rows": 256,
        "trainer.schedule.type": "cosine",
        "trainer.schedule.min_lr_share": 0.0,
        "trainer.schedule.warmup_share": 0.1,
        "trainer.optimizer.beta2": 0.95,
        "data.max_length": 1024,
    },
}
# Those of transformers' TrainingArguments, which a TRL script may pass in place of TRL's own class.
OF_TRAINING_ARGUMENTS: dict[str, Any] = {"trainer.lr": 5e-5}
_LR_OF_TRL = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward_model": 1e-4}
# They train preferences with TRL's losses, or with its defaults.
_ROWS_OF_TRL = ("trl", "axolotl", "llama_factory")
_OF_OPENRLHF: dict[str, dict[str, Any]] = {
    "sft": {"trainer.lr": 5e-6, "trainer.epochs": 2, "data.max_length": 2048},
    "reward_model": {"trainer.lr": 9e-6},
}
# verl's usual loss bounds the ratio of bad completions; its other losses have no such bound.
_DUAL_CLIP = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo")
# Keys of which one replaces the other.
_INSTEAD = {
    "trainer.epochs": "trainer.max_steps",
    "trainer.schedule.warmup_steps": "trainer.schedule.warmup_share",
    "trainer.schedule.warmup_share": "trainer.schedule.warmup_steps",
}


def defaults_of(framework: str, *, algorithm: str, is_rl: bool) -> dict[str, Any]:
    """Return our key -> the framework's default, where it differs from ours."""
    part = OF_RL if is_rl else OF_ROWS
    found = {**OF_ALL.get(framework, {}), **part.get(framework, {})}
    if is_rl and framework in _OF_ONE_SAMPLE:
        found["rollout.samples_per_prompt"] = 2
    if algorithm in ("rloo", "sapo") and framework in ("trl", "axolotl"):
        # Their losses are means over sequences there, as here by default.
        del found["algorithm.normalise"]
    if algorithm == "rloo" and framework == "trl":
        found["rollout.samples_per_prompt"] = 2
    if algorithm == "gspo":
        # All of these frameworks clip its ratios as those of tokens unless told otherwise.
        found |= {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}
    if algorithm == "simpo" and framework in _ROWS_OF_TRL:
        found |= {"preference.beta": 0.1, "algorithm.target_margin": 0.5}
    if framework == "openrlhf":
        found |= _OF_OPENRLHF.get(algorithm, {})
    if framework == "verl" and algorithm in _DUAL_CLIP:
        found["algorithm.dual_clip"] = 3.0
    if framework == "trl" and algorithm in _LR_OF_TRL:
        found["trainer.lr"] = _LR_OF_TRL[algorithm]
    return found


def adapter_of(framework: str, *, is_object: bool, is_rl: bool) -> dict[str, Any]:
    """Return our key -> the default of an adapter, where it differs from ours.

    `is_object`: a script makes a LoraConfig of peft, whose defaults are not those of TRL's options.
    """
    if framework == "trl":
        # Of the families that peft knows by name, all that are here have these two.
        targets = {"lora.targets": ["q_proj", "v_proj"]}
        if is_object:
            return {"lora.rank": 8, "lora.alpha": 8, **targets}
        return targets if is_rl else {"lora.dropout": 0.05, **targets}
    if framework in ("verl", "openrlhf"):
        return {"lora.alpha": 16, "lora.targets": ["all-linear"]}
    return {}


def replaced_by(key: str) -> str:
    """Return the key that, if it is set, replaces this one; empty if none does."""
    return _INSTEAD.get(key, "")
