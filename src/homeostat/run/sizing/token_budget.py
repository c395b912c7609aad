"""Chooses how many tokens a micro-batch has if the recipe does not say: as many as help and fit.

A large GPU is faster with more tokens at a time, up to `MOST_TOKENS`; what they take is found by
doing an update without data (train/estimate.py) against the memory that is free. A gradient is the
same however an update is split, to rounding. So a run chooses once, and a resumed one keeps it.
"""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.config.trainer import DEFAULT_TOKENS, TrainerConfig
from homeostat.models.preview import preview_model
from homeostat.run.sizing.estimate import full_batch, plan_memory
from homeostat.train.run_state import RunState
from homeostat.train.runtime import Runtime

# Beyond it, nothing more is gained on the largest GPUs of today.
MOST_TOKENS = 32_768
# Of what is free: allocations leave gaps, and an estimate is no proof.
_SHARE = 0.7


def choose_tokens(config: RunConfig, runtime: Runtime, *, kept: int | None = None) -> int | None:
    """`kept`: what the run chose before. None where it is the recipe's to say."""
    trainer = config.trainer
    if trainer.max_tokens_per_device is not None or not trainer.packing:
        return None
    if kept is not None:
        return kept
    may_grow = runtime.device.type == "cuda" and config.model.implementation == "native"
    # Another engine takes memory that is not there to be counted.
    if not may_grow or (config.is_rl and not config.engine.shares_weights):
        return DEFAULT_TOKENS
    return most_that_fit(config, runtime)


def most_that_fit(config: RunConfig, runtime: Runtime) -> int:
    """The default at least: on_oom=halve sees to what does not fit."""
    candidates = (MOST_TOKENS, MOST_TOKENS // 2)
    return next((n for n in candidates if _fits(config, runtime, n)), DEFAULT_TOKENS)


def as_chosen(config: RunConfig, runtime: Runtime) -> RunConfig:
    """The config of a run that begins now."""
    state = RunState(chosen_tokens=choose_tokens(config, runtime))
    return config.model_copy(update={"trainer": sized(config.trainer, state)})


def sized(trainer: TrainerConfig, state: RunState) -> TrainerConfig:
    """With the run's own choice in place."""
    if state.chosen_tokens is None or trainer.max_tokens_per_device is not None:
        return trainer
    return trainer.model_copy(update={"max_tokens_per_device": state.chosen_tokens})


def current_sizes(trainer: TrainerConfig, state: RunState) -> TrainerConfig:
    """Return the micro-batch sizes in force now: memory may have run out since the start."""
    trainer, budget = sized(trainer, state), state.token_budget
    if budget is None or (trainer.packing and budget >= trainer.tokens_per_micro_batch):
        return trainer
    return trainer.model_copy(update={"packing": True, "max_tokens_per_device": budget})


def tokens_line(chosen: int | None) -> str:
    return "" if chosen is None else f"; micro-batches of up to {chosen} tokens"


def _fits(config: RunConfig, runtime: Runtime, tokens: int) -> bool:
    preview = preview_model(config.model, config.lora, dtype=runtime.dtype, device=runtime.device)
    plan = plan_memory(
        config,
        runtime,
        full_batch(config, tokens),
        preview=preview,
        longest_prompt=config.data.max_length,
    )
    return plan.peak <= _SHARE * plan.capacity
