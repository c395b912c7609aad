"""Find settings that are valid alone but cannot work together.

Each conflict has its reason and how to resolve it. `find_conflicts` needs only the config.
`find_length_conflicts` also needs the length of the run, and `find_device_conflicts`
(config/combinations/device.py) the device: `check` and `train` call them once these are known.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.combinations.adapters import find_base_conflicts
from homeostat.config.combinations.cluster import find_cluster_conflicts
from homeostat.config.combinations.critic import find_critic_length_conflicts
from homeostat.config.combinations.curriculum import find_late_points, find_mixing_conflicts
from homeostat.config.combinations.ebft import find_ebft_conflicts
from homeostat.config.combinations.fp8 import find_fp8_conflicts, find_late_fp8
from homeostat.config.combinations.int4 import find_int4_conflicts, find_late_int4
from homeostat.config.combinations.moe import find_moe_conflicts
from homeostat.config.combinations.optimizer import find_optimizer_conflicts
from homeostat.config.combinations.preference import (
    find_late_precision,
    find_preference_conflicts,
)
from homeostat.config.combinations.replay import find_replay_conflicts
from homeostat.config.combinations.reward_model import find_reward_model_conflicts
from homeostat.config.combinations.rl import find_rl_conflicts
from homeostat.config.combinations.sequence import longer_rows
from homeostat.config.combinations.source import find_source_conflicts
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem


def find_conflicts(config: RunConfig, *, is_edited: bool = False) -> list[Problem]:
    """Return every conflict that can be found from the config alone.

    An edit during a run may leave a key of the recipe without effect: that is no conflict.
    """
    checks = (_trainer, _schedule, _data, _model, _evaluation, _checkpoint, _export, _sinks)
    checks = checks if is_edited else (*checks, _precision)
    problems = [problem for check in checks for problem in check(config)]
    problems += [*find_rl_conflicts(config), *find_cluster_conflicts(config)]
    problems += [*find_moe_conflicts(config), *find_replay_conflicts(config)]
    problems += [*find_mixing_conflicts(config), *find_fp8_conflicts(config)]
    problems += [*find_int4_conflicts(config), *find_optimizer_conflicts(config)]
    problems += [*find_ebft_conflicts(config), *find_source_conflicts(config)]
    problems += [*find_preference_conflicts(config), *find_reward_model_conflicts(config)]
    if config.trainer.max_steps is not None:
        problems += find_length_conflicts(config, total_steps=config.trainer.max_steps)
    return problems


def find_length_conflicts(config: RunConfig, *, total_steps: int) -> list[Problem]:
    """Return the conflicts that depend on the length of the run.

    `total_steps` is trainer.max_steps, or follows from the epochs once the rows are counted.
    """
    late = [
        *find_late_points(config, total_steps=total_steps),
        *find_late_fp8(config, total_steps=total_steps),
        *find_late_int4(config, total_steps=total_steps),
    ]
    return [*_beyond_the_end(config, total_steps), *late]


def count_steps(config: RunConfig, num_rows: int) -> int:
    """Return the number of steps over so many rows. Raises where settings lie beyond the last."""
    total = config.trainer.total_steps(num_rows, rows_per_step=config.rows_per_step)
    if problems := find_length_conflicts(config, total_steps=total):
        raise ConfigError(problems)
    return total


def _lanes_obstacle(config: RunConfig) -> str:
    """Return why a micro-batch cannot be computed in parallel parts."""
    if config.cluster.processes > 1 or config.trainer.backend.type != "local":
        return "each rank computes one micro-batch at a time"
    if config.model.implementation == "transformers":
        return "lanes need the native decoder, which they share"
    if config.lora is not None and config.lora.dropout > 0:
        return "dropout (lora.dropout) is drawn for a whole micro-batch"
    if config.model.moe.capacity_factor is not None:
        return "the capacity of experts (model.moe.capacity_factor) is that of a whole micro-batch"
    return ""


def _trainer(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.epochs is not None and trainer.max_steps is not None:
        yield Problem(
            "trainer.epochs",
            "trainer.max_steps is set too, and only one of them can decide when the run ends.",
            "Remove one of the two.",
        )
    if trainer.packing and trainer.micro_batch_rows is not None:
        yield Problem(
            "trainer.micro_batch_rows",
            "packing fills micro-batches by tokens, so this key would have no effect.",
            "Set trainer.packing=false, or set the size by trainer.max_tokens_per_device.",
        )
    if not trainer.packing and "max_tokens_per_device" in trainer.model_fields_set:
        yield Problem(
            "trainer.max_tokens_per_device",
            "it sets the size of packed micro-batches, and packing is off.",
            "Set trainer.packing=true, or set the size by trainer.micro_batch_rows.",
        )
    too_small = trainer.max_tokens_per_device is not None and (
        trainer.tokens_per_micro_batch < config.longest_example
    )
    if trainer.packing and too_small and not config.is_rl:
        one = "one row" if config.rows_per_example == 1 else "a pair of rows"
        yield Problem(
            "trainer.max_tokens_per_device",
            f"{trainer.budget_text} cannot hold {one} of data.max_length={config.data.max_length}.",
            f"Raise it, or lower data.max_length{longer_rows(trainer.backend)}.",
        )
    rows = trainer.micro_batch_rows
    over = rows is not None and rows > trainer.batch_rows
    if not trainer.packing and over and not config.is_rl:
        yield Problem(
            "trainer.micro_batch_rows",
            f"{rows} rows are more than an update has (trainer.batch_rows={trainer.batch_rows}).",
            "Lower it.",
        )
    if (trainer.lanes or 1) > 1 and (obstacle := _lanes_obstacle(config)):
        yield Problem("trainer.lanes", f"{obstacle}, so lanes cannot be used.", "Remove it.")
    if trainer.on_nonfinite == "halt" and "max_nonfinite_steps" in trainer.model_fields_set:
        yield Problem(
            "trainer.max_nonfinite_steps",
            "trainer.on_nonfinite=halt ends the run at the first non-finite step, so this key "
            "would have no effect.",
            "Remove it, or set trainer.on_nonfinite=skip.",
        )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule = config.trainer.schedule
    if {"warmup_steps", "warmup_share"} <= schedule.model_fields_set:
        if schedule.warmup_steps is not None:
            yield Problem(
                "trainer.schedule.warmup_share",
                "warmup_steps is set too.",
                "Remove one of the two.",
            )


def _beyond_the_end(config: RunConfig, total_steps: int) -> Iterator[Problem]:
    warmup = config.trainer.schedule.warmup_steps
    steps = total_steps - config.critic_steps
    updates = steps * (config.trainer.updates_in_step if config.is_rl else 1)
    if warmup is not None and warmup > updates:
        yield Problem(
            "trainer.schedule.warmup_steps",
            f"the warm-up is longer than the run ({updates} updates), so the peak learning rate "
            "is never reached.",
            "Lower it.",
        )
    steps = config.observe.profiler.steps if config.observe.profiler is not None else ()
    if late := [step for step in steps if step > total_steps]:
        yield Problem(
            "observe.profiler.steps",
            f"step {late[0]} comes after the last step of the run ({total_steps}).",
            "Name earlier steps.",
        )
    yield from find_critic_length_conflicts(config, total_steps=total_steps)
    yield from find_late_fp8(config, total_steps=total_steps)


def _data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.validation and data.validation_share > 0:
        yield Problem(
            "data.validation_share",
            "data.validation names held-out rows already.",
            "Remove one of the two.",
        )
    for group in ("train", "validation"):
        for index, source in enumerate(getattr(data, group)):
            system, chat = getattr(source, "system", None), getattr(source, "chat", True)
            if system and not chat:
                yield Problem(
                    f"data.{group}.{index}.system",
                    "without the chat template there is no system turn.",
                    "Set chat: true, or put the text into the prompt.",
                )


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.init == "random" and model.path.endswith(".gguf"):
        yield Problem(
            "model.init",
            "random weights need the sizes from a config.json, and a .gguf file has none.",
            "Name a folder in model.path, or set model.init=pretrained.",
        )
    if model.init == "random" and config.lora is not None:
        yield Problem(
            "lora",
            "an adapter on random frozen weights cannot learn anything useful.",
            "Remove lora, or set model.init=pretrained.",
        )
    if model.numerics == "invariant":
        yield from _invariant(config)
    yield from find_base_conflicts(config)
    if model.implementation == "transformers":
        if model.attention == "varlen":
            yield Problem(
                "model.attention",
                "only the native decoder has varlen attention.",
                "Use auto, sdpa or eager, or model.implementation=native.",
            )
        if config.trainer.gradient_checkpointing == "selective":
            yield Problem(
                "trainer.gradient_checkpointing",
                "only the native decoder can recompute a selection of activations.",
                "Set it to true, or model.implementation=native.",
            )
        if not model.meta_init:
            yield Problem(
                "model.meta_init",
                "a transformers model is always built on the meta device first.",
                "Set it to true, or model.implementation=native.",
            )
        if model.path.endswith(".gguf"):
            yield Problem(
                "model.implementation",
                "only the native decoder reads GGUF files.",
                "Set model.implementation=native.",
            )
    if config.lora is not None and "all-linear" in config.lora.targets:
        if len(config.lora.targets) > 1:
            yield Problem(
                "lora.targets",
                "'all-linear' already names every module.",
                "Write ['all-linear'] alone, or list the modules.",
            )


def _invariant(config: RunConfig) -> Iterator[Problem]:
    if config.model.implementation == "transformers":
        yield Problem(
            "model.numerics",
            "only the native decoder has invariant numerics.",
            "Set model.implementation=native, or model.numerics=fast.",
        )
    if config.model.attention not in ("auto", "sdpa"):
        yield Problem(
            "model.attention",
            "invariant numerics always use their own attention kernel.",
            "Remove it, or set model.numerics=fast.",
        )


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    if config.has_validation:
        return
    for name in sorted(config.eval.model_fields_set):
        yield Problem(
            f"eval.{name}",
            "there are no held-out rows to evaluate on.",
            "Set data.validation_share (for example 0.05) or data.validation.",
        )


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.load_step is not None and config.checkpoint.resume == "never":
        yield Problem(
            "checkpoint.load_step",
            "checkpoint.resume=never does not load any checkpoint.",
            "Remove one of the two.",
        )


def _export(config: RunConfig) -> Iterator[Problem]:
    checkpoint, lora = config.checkpoint, config.lora
    is_off = checkpoint.export == "off"
    if is_off and lora is not None and "export" in lora.model_fields_set:
        yield Problem(
            "lora.export",
            "checkpoint.export=off: nothing is exported.",
            "Remove it, or set checkpoint.export=final.",
        )
    if "max_shard_bytes" not in checkpoint.model_fields_set:
        return
    if is_off:
        yield Problem(
            "checkpoint.max_shard_bytes",
            "checkpoint.export=off: nothing is exported.",
            "Remove it, or set checkpoint.export=final.",
        )
    elif lora is not None and lora.export == "adapter":
        yield Problem(
            "checkpoint.max_shard_bytes",
            "an adapter is one file and is never split.",
            "Remove it, or set lora.export=merged.",
        )


def _precision(config: RunConfig) -> Iterator[Problem]:
    yield from find_late_precision(config)
    trainer, observe = config.trainer, config.observe
    if "precision_interval" not in observe.model_fields_set or observe.precision_interval is None:
        return
    if trainer.fp8 is None and trainer.int4 is None:
        yield Problem(
            "observe.precision_interval",
            "without trainer.fp8 and trainer.int4 no layer is quantised, so there is nothing to "
            "measure.",
            "Remove it.",
        )


def _sinks(config: RunConfig) -> Iterator[Problem]:
    """Refuse sinks that collide.

    W&B and trackio support one run per process, and two TensorBoard sinks need two folders.
    """
    taken: set[tuple[str, str]] = set()
    for index, sink in enumerate(config.observe.sinks):
        place = (sink.type, sink.folder if sink.type == "tensorboard" else "")
        if place in taken:
            yield Problem(
                f"observe.sinks.{index}",
                f"another {sink.type} sink writes to the same place.",
                "Remove one of the two.",
            )
        taken.add(place)
