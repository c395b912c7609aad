"""Find settings that cannot work with sampling ahead of the trainer, or have no effect without."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.algorithm import PolicyGradientConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

_STALE = "rollout.max_staleness"


def find_async_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of rollout.max_staleness, with its reason and remedy."""
    if not config.samples_ahead:
        yield from _without_effect(config)
    if config.rollout.max_staleness is None:
        return
    if config.debug is not None:
        yield Problem(
            _STALE,
            f"debug.mode={config.debug.mode} runs only sampling or only training, so the two "
            "cannot overlap.",
            "Remove it, or remove debug.",
        )
    if config.steps_between_publications > 1:
        yield Problem(
            "sync.interval",
            "with rollout.max_staleness the weights of every step are published, and "
            "max_staleness sets how old the engine's weights may be.",
            f"Set it to {config.trainer.updates_in_step} or less.",
        )
    if config.samples_ahead:
        yield from _ahead(config)
    if config.rollout.partial:
        yield from _partial(config)


def _without_effect(config: RunConfig) -> Iterator[Problem]:
    """Find settings that need sampling and training at the same time."""
    if config.rollout.partial:
        yield Problem(
            "rollout.partial",
            "without overlap nothing is sampled while the weights change, so no completion would "
            "be interrupted.",
            "Set rollout.max_staleness to 1 or more, or remove it.",
        )
    if config.sync.overlap != "never" and not config.engine.shares_weights:
        yield Problem(
            "sync.overlap",
            "the engine and the trainer take turns, so nothing is sampled while weights are sent.",
            "Set rollout.max_staleness to 1 or more, or remove it.",
        )
    if not config.eval.sampling.blocking:
        yield Problem(
            "eval.sampling.blocking",
            "the engine and the trainer take turns, so an evaluation has to end before the next "
            "step.",
            "Set rollout.max_staleness to 1 or more, or remove it.",
        )


def _ahead(config: RunConfig) -> Iterator[Problem]:
    """Find what an engine cannot do while the trainer trains."""
    rollout, algorithm = config.rollout, config.algorithm
    assert isinstance(algorithm, PolicyGradientConfig)
    if config.engine.shares_weights:
        yield Problem(
            _STALE,
            "the engine computes with the trainer's own tensors, which change while it trains, so "
            "the two have to take turns.",
            "Set engine.own_process=true, or rollout.max_staleness=0.",
        )
    if "sleep" in config.engine.model_fields_set and config.engine.sleep:
        yield Problem(
            "engine.sleep",
            "the engine samples while the trainer works, so it never sleeps.",
            "Remove it, or set rollout.max_staleness=0.",
        )
    by_difficulty = rollout.curriculum is not None and rollout.curriculum.difficulty is not None
    if by_difficulty and (rollout.filters or algorithm.dynamic_sampling is not None):
        yield Problem(
            "rollout.curriculum.difficulty",
            "with filters, a step draws more prompts after later steps have already drawn theirs.",
            "Remove it or the filters (rollout.filters, algorithm.dynamic_sampling), or set "
            "rollout.max_staleness=0.",
        )
    if not config.eval.sampling.blocking:
        yield from _beside_training(config)


def _beside_training(config: RunConfig) -> Iterator[Problem]:
    """Find what evaluations that do not block cannot serve."""
    if config.eval.interval_steps == 1:
        yield Problem(
            "eval.interval_steps",
            "the metrics of an evaluation that does not block are recorded with the next step, "
            "which would have an evaluation of its own to record.",
            "Set it to 2 or more, or eval.sampling.blocking=true.",
        )
    if config.eval.keep_best:
        yield Problem(
            "eval.keep_best",
            "the result of an evaluation that does not block is known one step later, when the "
            "evaluated weights can no longer be saved.",
            "Set it to false, or eval.sampling.blocking=true.",
        )


def _partial(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.deadline_s is not None:
        yield Problem(
            "rollout.deadline_s",
            "with rollout.partial, completions continue over several steps, and each step would "
            "restart the time limit.",
            "Remove it, or set rollout.partial=false.",
        )
