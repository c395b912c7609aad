"""Find settings of a critic that cannot work together or would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.algorithm import PpoConfig
from homeostat.config.critic import CriticConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_critic_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of an RL recipe's critic, with its reason and remedy."""
    algorithm, critic = config.algorithm, config.critic
    if not isinstance(algorithm, PpoConfig):
        if critic is not None:
            yield Problem(
                "critic",
                f"algorithm.type={algorithm.type} compares samples with each other and has no "
                "critic.",
                "Remove it, or set algorithm.type=ppo.",
            )
        return
    if algorithm.scale != "none":
        yield Problem(
            "algorithm.scale",
            "ppo already scales advantages, because it whitens them over the batch.",
            "Remove it.",
        )
    if config.model.implementation != "native":
        yield Problem(
            "model.implementation",
            "the value head of a critic needs the native decoder.",
            "Set model.implementation=native, or use an algorithm without a critic (grpo).",
        )
    if critic is not None:
        yield from _critic(config, critic, masks_cut=algorithm.overlong.type == "mask")


def _critic(config: RunConfig, critic: CriticConfig, *, masks_cut: bool) -> Iterator[Problem]:
    if critic.bootstrap_truncated and masks_cut:
        yield Problem(
            "critic.bootstrap_truncated",
            "with algorithm.overlong.type=mask, completions that were cut off are not trained on.",
            "Remove one of the two.",
        )
    if critic.export and config.checkpoint.export == "off":
        yield Problem(
            "critic.export",
            "checkpoint.export=off: nothing is exported.",
            "Remove it, or set checkpoint.export=final.",
        )
    schedule = critic.schedule
    if {"warmup_steps", "warmup_share"} <= schedule.model_fields_set:
        if schedule.warmup_steps is not None:
            yield Problem(
                "critic.schedule.warmup_share",
                "warmup_steps is set too.",
                "Remove one of the two.",
            )


def find_critic_length_conflicts(config: RunConfig, *, total_steps: int) -> Iterator[Problem]:
    """Yield the conflicts that depend on the length of the run."""
    critic = config.critic
    if critic is None:
        return
    if critic.warmup_steps >= total_steps:
        yield Problem(
            "critic.warmup_steps",
            f"the run has {total_steps} steps, so the critic would be trained alone in all of "
            "them.",
            "Lower it.",
        )
    epochs = critic.epochs or config.trainer.epochs_per_step
    updates = total_steps * config.trainer.updates_per_step * epochs
    if (critic.schedule.warmup_steps or 0) > updates:
        yield Problem(
            "critic.schedule.warmup_steps",
            f"the warm-up is longer than the run ({updates} updates of the critic), so the peak "
            "learning rate is never reached.",
            "Lower it.",
        )
