"""Settings of sampling: sizes, sampling parameters, the native engine, and debugging modes.

All sizes follow from one calculation (shown by `homeostat check`): a step samples
`prompts_per_step` prompts x `samples_per_prompt`; that batch is split into
`trainer.updates_per_step` updates.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import PathText, Settings, key
from homeostat.config.vllm import VllmEngineConfig


class RolloutConfig(Settings):
    """The number of samples in a step, and the sampling parameters."""

    prompts_per_step: int = key(32, ge=1, help="Number of prompts in a step.")
    samples_per_prompt: int = key(
        8, ge=2, help="Number of completions for each prompt; together they form a group."
    )
    max_new_tokens: int = key(512, ge=1, help="Largest number of tokens in a completion.")
    temperature: float = key(
        1.0,
        ge=0,
        le=100,
        help="Sampling temperature; log-probs are computed at the same temperature.",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = key(
        (),
        help="Texts that end a completion, in addition to the end-of-turn token. They remain "
        "part of the completion.",
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = key(
        (), help="Token ids that end a completion, in addition to the end-of-turn token."
    )
    keep_journal: bool = key(
        False,
        resume="free",
        help="Keep the rollouts of all steps, so that debug.rollouts can replay them. By "
        "default only the steps that a resumed run would need are kept.",
    )
    deadline_s: float | None = key(
        None,
        gt=0,
        resume="warn",
        help="Time limit of a round of sampling, in seconds. Completions that are unfinished at "
        "that point count as truncated, as at max_new_tokens.",
    )

    @property
    def samples_per_step(self) -> int:
        """Return the number of completions in a step."""
        return self.prompts_per_step * self.samples_per_prompt


class NativeEngineConfig(Settings):
    """homeostat's own engine, in the trainer's process or in its own.

    In the trainer's process it shares the weights, so publishing them costs no copy. With
    `own_process` the weights are sent to it (sync).
    """

    type: Literal["native"] = "native"
    own_process: bool = key(
        False,
        resume="warn",
        help="Run in a separate process, with its own copy of the weights. They are sent "
        "through sync.transport every sync.interval updates.",
    )
    processes: int | None = key(
        None,
        ge=1,
        le=64,
        resume="warn",
        help="Number of processes that sample in parallel on a CPU: the trainer's own, and "
        "helpers with a copy of its weights. Default: 1 if decoding is compiled, because its "
        "threads use all cores; otherwise as many as trainer.lanes, and 1 for small models, "
        "whose steps take less time than sending the weights.",
    )
    max_concurrency: int = key(
        256, ge=1, resume="warn", help="Number of completions that are sampled at the same time."
    )
    memory_share: float = key(
        0.5,
        gt=0,
        le=0.95,
        resume="free",
        help="Share of the free memory that the KV cache may use.",
    )
    prefill_tokens: int = key(
        8192, ge=1, resume="warn", help="Largest number of prompt tokens in one forward pass."
    )
    decode: Literal["auto", "graphs", "fused", "compiled", "compact", "plain"] = key(
        "auto",
        resume="warn",
        help="Decode path. graphs: several steps at a time with fused kernels in CUDA graphs. "
        "fused: the same kernels without graphs. compiled: several steps at a time on a CPU, in "
        "C code that the machine's compiler builds once. compact: in torch on a CPU, over copies "
        "of the weights in a layout that suits decoding. plain: the model's own forward pass, "
        "which is the reference. auto: graphs on a GPU; compiled on a CPU, or compact without a "
        "compiler; plain if none of these can run.",
    )
    stall_s: float = key(
        1800.0,
        gt=0,
        resume="free",
        help="Seconds without any finished completion after which the engine counts as stuck.",
    )
    sleep: bool = key(
        True,
        resume="free",
        help="Free the cache while the trainer works. false keeps it: more memory, no pause.",
    )
    start_timeout_s: float = key(
        300.0,
        gt=0,
        resume="free",
        help="Seconds within which a separate engine process must have loaded the model and "
        "answer.",
    )
    max_restarts: int = key(
        3,
        ge=0,
        resume="free",
        help="How many times a separate engine process is restarted after it died. The new "
        "process receives the weights, and the interrupted round is sampled again from its "
        "start.",
    )

    @property
    def shares_weights(self) -> bool:
        """Return whether the engine computes with the trainer's own tensors."""
        return not self.own_process


AnyEngine = Annotated[NativeEngineConfig | VllmEngineConfig, Field(discriminator="type")]


class InitialReference(Settings):
    """A frozen copy of the policy from which the run starts.

    With an adapter only the adapter is copied, not the base model.
    """

    type: Literal["initial"] = "initial"
    refresh_steps: int | None = key(
        None, ge=1, help="Replace the reference by the current policy every so many steps."
    )


class CheckpointReference(Settings):
    """A separate checkpoint."""

    type: Literal["checkpoint"]
    path: PathText = key(help="Folder of the HF checkpoint, or a .gguf file.")


class AdapterOffReference(Settings):
    """The model without its adapter, even if one was loaded (LoRA only). No copy is needed."""

    type: Literal["adapter_off"]


AnyReference = Annotated[
    InitialReference | CheckpointReference | AdapterOffReference, Field(discriminator="type")
]


class DebugConfig(Settings):
    """Run only sampling or only training, to find out which of the two is at fault."""

    mode: Literal["rollout_only", "train_only", "replay"] = key(
        help="rollout_only: sample and score without training. train_only: train on `rollouts` "
        "without an engine. replay: train on `rollouts`, and let the engine score and evaluate."
    )
    rollouts: PathText | None = key(
        None, help="Run folder whose journal is used in place of sampling."
    )
