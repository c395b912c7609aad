"""How completions are sampled: sizes, sampling, the engine, and modes for debugging.

One arithmetic for sizes (shown by `homeostat check`): a step samples `prompts_per_step` prompts x
`samples_per_prompt`; that batch is split into `trainer.updates_per_step` updates.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import PathText, Settings, key
from homeostat.config.native import NativeEngineConfig
from homeostat.config.vllm import VllmEngineConfig


class RolloutConfig(Settings):
    prompts_per_step: int = key(32, ge=1, help="Prompts of a step.")
    samples_per_prompt: int = key(8, ge=2, help="Completions of each prompt: its group.")
    max_new_tokens: int = key(512, ge=1, help="Tokens a completion may have.")
    temperature: float = key(1.0, ge=0, le=100, help="Sampling temperature; log-probs are at it.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = key(
        (), help="Texts that end a completion, besides the end-of-turn token. They stay in it."
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = key(
        (), help="Tokens that end a completion, besides the end-of-turn token."
    )
    keep_journal: bool = key(
        False,
        resume="free",
        help="Keep the rollouts of all steps (debug.rollouts can replay them), not only of those "
        "that a resumed run would need.",
    )
    deadline_s: float | None = key(
        None,
        gt=0,
        resume="warn",
        help="Seconds a round of sampling may take. What is not finished then counts as cut off, "
        "like a completion at max_new_tokens.",
    )

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


AnyEngine = Annotated[NativeEngineConfig | VllmEngineConfig, Field(discriminator="type")]


class InitialReference(Settings):
    """A frozen copy of the policy the run starts from; of an adapter's base there is no copy."""

    type: Literal["initial"] = "initial"
    refresh_steps: int | None = key(
        None, ge=1, help="Make the policy the new reference every so many steps."
    )


class CheckpointReference(Settings):
    """A checkpoint of its own."""

    type: Literal["checkpoint"]
    path: PathText = key(help="Folder of the HF checkpoint, or a .gguf file.")


class AdapterOffReference(Settings):
    """The model without its adapter, also where one was loaded (LoRA only): no copy at all."""

    type: Literal["adapter_off"]


AnyReference = Annotated[
    InitialReference | CheckpointReference | AdapterOffReference, Field(discriminator="type")
]


class DebugConfig(Settings):
    """Half a run, to find out which half is sick."""

    mode: Literal["rollout_only", "train_only", "replay"] = key(
        help="rollout_only: sample and score, train nothing. train_only: train on `rollouts`, "
        "start no engine. replay: train on `rollouts`, and let the engine score and evaluate."
    )
    rollouts: PathText | None = key(
        None, help="Run directory whose journal is used in place of sampling."
    )
