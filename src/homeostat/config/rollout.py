"""Settings of sampling: sizes, sampling parameters, the native engine, and debugging modes.

All sizes follow from one calculation (shown by `homeostat check`): a step samples
`prompts_per_step` prompts x `samples_per_prompt`; that batch is split into
`trainer.updates_per_step` updates.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import PathText, Settings, key
from homeostat.config.curriculum import AllFailedFilter, AnyFilter, CurriculumConfig
from homeostat.config.engine import EnginePlugin
from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.config.native import NativeEngineConfig
from homeostat.config.plugins import Pluggable
from homeostat.config.sglang import SglangEngineConfig
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
    top_p: float = key(
        1.0,
        gt=0,
        le=1,
        help="Sample only from the most likely tokens whose probabilities add up to this value. "
        "Log-probs, ratios and entropy are then computed over the same tokens.",
    )
    top_k: int | None = key(
        None,
        ge=1,
        le=MAX_KEPT_IDS,
        help="Sample only from this many of the most likely tokens. At most 1,024, because the "
        "tokens that remain are recorded and replayed in training.",
    )
    min_p: float = key(
        0.0,
        ge=0,
        le=1,
        help="Sample only from tokens that are at least this many times as likely as the most "
        "likely one.",
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
        help="Time limit of a round of sampling, in seconds. Completions that are unfinished by "
        "then are cut off and count as truncated, like those that reach max_new_tokens.",
    )

    max_staleness: int | None = key(
        None,
        ge=0,
        le=64,
        help="Asynchronous RL: sample the groups of later steps while the trainer trains. The "
        "engine may start a group with weights that are at most this many versions older than the "
        "weights that are trained on the group. null: no overlap; the synchronous loop samples "
        "and trains in turn. 0: the asynchronous loop without overlap, with bitwise the same "
        "results as null.",
    )
    partial: bool = key(
        False,
        help="true: when new weights are published, interrupt unfinished completions and continue "
        "them with the new weights; each token records the weight version that sampled it. false: "
        "wait until they are finished before publishing.",
    )
    filters: tuple[AnyFilter, ...] = key(
        (),
        help="Filters of groups. If any of them drops a group, the group is not trained on, and "
        "another prompt is sampled in its place. The metric filter/<reason> counts dropped "
        "groups. algorithm.dynamic_sampling is such a filter too, and is applied first.",
    )
    max_rounds: int = key(
        8,
        ge=2,
        help="Largest number of sampling rounds in a step with filters. After that the step "
        "continues with the groups that it has. With algorithm.dynamic_sampling, set "
        "algorithm.dynamic_sampling.max_rounds instead.",
    )
    curriculum: CurriculumConfig | None = key(
        None, help="How prompts are chosen. null: each prompt once per epoch."
    )
    solved_by: str | None = key(
        None,
        share=True,
        help="Name of the reward that decides whether a sample is solved, for rollout.curriculum "
        "and the filter all_failed. Default: as for eval.sampling.solved_by.",
    )
    solved_at: float = key(
        1.0,
        help="A sample is solved if the deciding reward gives it this value or more, before its "
        "weight is applied.",
    )

    @property
    def judges_samples(self) -> bool:
        """Return whether something in the recipe depends on which samples are solved."""
        judged = any(isinstance(one, AllFailedFilter) for one in self.filters)
        return judged or self.curriculum is not None

    @property
    def is_cut(self) -> bool:
        """Return whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    @property
    def samples_per_step(self) -> int:
        """Return the number of completions in a step."""
        return self.prompts_per_step * self.samples_per_prompt


AnyEngine = Annotated[
    NativeEngineConfig | VllmEngineConfig | SglangEngineConfig,
    Field(discriminator="type"),
    Pluggable("engine", (EnginePlugin,)),
]


class InitialReference(Settings):
    """A frozen copy of the policy from which the run starts.

    With LoRA, only the adapter is copied, not the base model.
    """

    type: Literal["initial"] = "initial"
    refresh_steps: int | None = key(
        None,
        ge=1,
        help="Number of steps after which the reference is replaced by the current "
        "policy, again and again. null: never.",
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
    """Run only sampling or only training, to find out which of them causes a problem."""

    mode: Literal["rollout_only", "train_only", "replay"] = key(
        help="rollout_only: sample and score without training. train_only: train on the recorded "
        "rollouts of `rollouts`, without an engine. replay: train on them, and use the engine for "
        "scoring and evaluation."
    )
    rollouts: PathText | None = key(
        None, help="Run folder whose recorded rollouts (its journal) are used instead of sampling."
    )
