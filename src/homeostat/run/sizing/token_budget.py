"""Choose the number of tokens of a micro-batch if the recipe does not set it.

A large GPU is faster with more tokens at a time, up to `MOST_TOKENS`. Whether they fit is found by
running an update without data (train/estimating) and comparing with the free memory. How an update
is split changes its gradient only by rounding errors; to avoid even these, a resumed run keeps the
number that it chose at its start.
"""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.config.trainer import DEFAULT_TOKENS, TrainerConfig
from homeostat.models.preview import preview_model
from homeostat.precision.bases import base_rewrite
from homeostat.run.sizing.estimate import full_batch, plan_memory
from homeostat.train.runtime import Runtime
from homeostat.train.saving.run_state import RunState

# More tokens than this gave no more speed on the largest GPUs.
MOST_TOKENS = 32_768
# Share of the free memory that may be planned with: allocations leave gaps, and estimates err.
_SHARE = 0.7


def choose_tokens(config: RunConfig, runtime: Runtime, *, kept: int | None = None) -> int | None:
    """Return a device's tokens of a micro-batch; None if the recipe sets them or packing is off.

    `kept` is what the run chose before it was resumed.
    """
    trainer = config.trainer
    if trainer.max_tokens_per_device is not None or not trainer.packing:
        return None
    if kept is not None:
        return kept
    may_grow = runtime.device.type == "cuda" and config.model.implementation == "native"
    # An engine with its own weights takes memory that is not part of the estimate.
    if not may_grow or (config.is_rl and not config.engine.shares_weights):
        return DEFAULT_TOKENS
    return most_that_fit(config, runtime)


def most_that_fit(config: RunConfig, runtime: Runtime) -> int:
    """Return the largest candidate that fits, else the default."""
    # If not even the default fits, trainer.on_oom=halve lowers it during the run.
    candidates = (MOST_TOKENS, MOST_TOKENS // 2)
    return next((n for n in candidates if _fits(config, runtime, n)), DEFAULT_TOKENS)


def as_chosen(config: RunConfig, runtime: Runtime) -> RunConfig:
    """Return the config with the number of tokens that a new run would choose."""
    state = RunState(chosen_tokens=choose_tokens(config, runtime))
    return config.model_copy(update={"trainer": sized(config.trainer, state)})


def sized(trainer: TrainerConfig, state: RunState) -> TrainerConfig:
    """Return the trainer's config with the number of tokens that the run has chosen."""
    if state.chosen_tokens is None or trainer.max_tokens_per_device is not None:
        return trainer
    return trainer.model_copy(update={"max_tokens_per_device": state.chosen_tokens})


def current_sizes(trainer: TrainerConfig, state: RunState) -> TrainerConfig:
    """Return the current micro-batch sizes, which are smaller if memory ran out before."""
    trainer, budget = sized(trainer, state), state.token_budget
    if budget is None or (trainer.packing and budget >= trainer.tokens_per_micro_batch):
        return trainer
    per_device = -(-budget // trainer.backend.ranks_per_micro_batch)
    return trainer.model_copy(update={"packing": True, "max_tokens_per_device": per_device})


def tokens_line(chosen: int | None) -> str:
    """Return the end of a log line that states the choice; empty if none was made."""
    return "" if chosen is None else f"; micro-batches of up to {chosen} tokens"


def _fits(config: RunConfig, runtime: Runtime, tokens: int) -> bool:
    preview = preview_model(
        *(config.model, config.lora),
        dtype=runtime.dtype,
        device=runtime.device,
        on_host=config.trainer.backend.on_host,
        hold=base_rewrite(config.model),
    )
    plan = plan_memory(
        config,
        runtime,
        full_batch(config, tokens * config.trainer.backend.ranks_per_micro_batch),
        preview=preview,
        longest_prompt=config.data.max_length,
    )
    return plan.peak <= _SHARE * plan.capacity
