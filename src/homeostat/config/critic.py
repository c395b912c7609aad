"""Settings of the critic: the value model of PPO (algorithm.type=ppo)."""

from __future__ import annotations

from homeostat.config.base import PathText, Settings, key
from homeostat.config.model import HeadInit, ModelConfig
from homeostat.config.optimizer import AdamWConfig, AnyOptimizer
from homeostat.config.trainer import AnySchedule, ConstantSchedule, TrainerConfig


class CriticConfig(Settings):
    """The model that estimates the future reward of an unfinished completion.

    It is a separate model with its own optimizer and schedule. If it starts from the policy, it is
    as large as the policy. With `lora` its own adapter and its head are trained.
    """

    path: PathText | None = key(
        None,
        help="Checkpoint that the critic starts from: a causal LM, or a sequence classifier with "
        "one label (a reward model), whose head is kept. Default: the checkpoint from which the "
        "policy starts.",
    )
    head_init: HeadInit = key(
        "zero",
        help="Initial weights of a value head that does not come from a checkpoint. zero: every "
        "value is 0 at first. random: small random numbers.",
    )
    lr: float | None = key(
        None,
        ge=0,
        resume="warn",
        help="Peak learning rate. Default: 1e-5, ten times as much for an adapter (lora).",
    )
    optimizer: AnyOptimizer = key(AdamWConfig(), help="The critic's optimizer.")
    schedule: AnySchedule = key(
        ConstantSchedule(type="constant"),
        resume="warn",
        help="How the critic's learning rate changes over the run.",
    )
    max_grad_norm: float | None = key(
        1.0,
        gt=0,
        resume="warn",
        help="Largest gradient norm; larger gradients are scaled down to it. null: no limit.",
    )
    clip: float | None = key(
        0.2,
        gt=0,
        help="Clip range of the value loss. The loss is the larger of two errors: that of the "
        "value, and that of the value clipped to within this distance of the value before the "
        "step. null: no clipping.",
    )
    gamma: float = key(1.0, gt=0, le=1, help="Discount factor per token for later rewards.")
    gae_lambda: float = key(
        1.0,
        ge=0,
        le=1,
        help="Lambda of generalised advantage estimation. 1: compare the value with the rewards "
        "that followed (no bias). 0: compare it with the critic's value of the next token (low "
        "variance).",
    )
    bootstrap_truncated: bool = key(
        False,
        help="If a completion was cut off, add the critic's value at its end to its reward, as if "
        "it continued. false: its reward is final.",
    )
    warmup_steps: int = key(
        0, ge=0, help="Number of steps at the start of the run in which only the critic is trained."
    )
    epochs: int | None = key(
        None,
        ge=1,
        help="Number of passes over the samples of a step. Default: trainer.epochs_per_step.",
    )
    export: bool = key(
        False,
        resume="free",
        help="When weights are exported, also export the critic: a sequence classifier in the "
        "folder hf_critic, next to hf.",
    )

    def trained_as(self, trainer: TrainerConfig) -> TrainerConfig:
        """Return the trainer's settings with the critic's optimizer, schedule and clipping."""
        own = {name: getattr(self, name) for name in ("lr", "optimizer", "schedule")}
        return trainer.model_copy(update={**own, "max_grad_norm": self.max_grad_norm})

    def start(self, policy: ModelConfig) -> ModelConfig:
        """Return the model that the critic starts from."""
        if self.path is None:
            return policy
        return policy.model_copy(update={"path": self.path, "init": "pretrained"})
