"""Settings of the critic: the value model of PPO (algorithm.type=ppo)."""

from __future__ import annotations

from homeostat.config.base import PathText, Settings, key
from homeostat.config.model import HeadInit, ModelConfig
from homeostat.config.optimizer import AdamWConfig, AnyOptimizer
from homeostat.config.trainer import AnySchedule, ConstantSchedule, TrainerConfig


class CriticConfig(Settings):
    """The model that estimates what a completion will still earn, and how it is trained.

    It is a separate model with its own optimizer and schedule, as large as the policy if it starts
    from it. With `lora` it trains its own adapter, and its head.
    """

    path: PathText | None = key(
        None,
        help="Checkpoint that the critic starts from: a causal LM, or a sequence classifier with "
        "one label (a reward model), whose head is kept. Default: the policy's own start.",
    )
    head_init: HeadInit = key(
        "zero",
        help="Where the value head starts that no checkpoint holds. zero: every value is 0 at "
        "first. random: small random numbers.",
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
        help="Gradients with a larger norm are scaled down to this norm; null: never.",
    )
    clip: float | None = key(
        0.2,
        gt=0,
        help="The value loss takes the larger error of the value and of the value clipped to this "
        "distance from the one before the step; null: the value alone.",
    )
    gamma: float = key(1.0, gt=0, le=1, help="Discount factor per token for later rewards.")
    gae_lambda: float = key(
        1.0,
        ge=0,
        le=1,
        help="Generalised advantage estimation: 1 compares what was earned with the value "
        "(no bias), 0 trusts the value of the next token (no variance).",
    )
    bootstrap_truncated: bool = key(
        False,
        help="Add the critic's value of a completion that was cut off to its reward, as if it "
        "continued. Off: it ends there, as the reward judged it.",
    )
    warmup_steps: int = key(
        0, ge=0, help="Number of steps at the beginning in which only the critic learns."
    )
    epochs: int | None = key(
        None,
        ge=1,
        help="Number of passes over the samples of a step. Default: trainer.epochs_per_step.",
    )
    export: bool = key(
        False,
        resume="free",
        help="Write the critic, too, where weights are exported: a sequence classifier in "
        "hf_critic beside hf.",
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
