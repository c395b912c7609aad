"""Settings that are fine alone and cannot work together: the reason and the way out.

`find_conflicts` needs nothing but the config. `find_device_conflicts` also needs to know where
the run would take place, and is asked by `check` and `train` once that is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_conflicts(config: RunConfig) -> list[Problem]:
    checks = (_trainer, _schedule, _data, _model, _evaluation, _checkpoint)
    return [problem for check in checks for problem in check(config)]


def find_device_conflicts(config: RunConfig, *, device: str) -> list[Problem]:
    """`device` is 'cpu' or 'cuda': what trainer.device came out as."""
    return list(_on_cpu(config)) if device == "cpu" else []


def _trainer(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.epochs is not None and trainer.max_steps is not None:
        yield Problem(
            "trainer.epochs",
            "trainer.max_steps is set too, and the run can end in one place only.",
            "Remove one of the two.",
        )
    if trainer.packing and trainer.micro_batch_rows is not None:
        yield Problem(
            "trainer.micro_batch_rows",
            "packing fills micro-batches by tokens, so it would have no effect.",
            "Set trainer.packing=false, or size with trainer.max_tokens_per_device.",
        )
    if not trainer.packing and "max_tokens_per_device" in trainer.model_fields_set:
        yield Problem(
            "trainer.max_tokens_per_device",
            "it sizes packed micro-batches, and packing is off.",
            "Set trainer.packing=true, or size with trainer.micro_batch_rows.",
        )
    if trainer.packing and trainer.max_tokens_per_device < config.data.max_length:
        yield Problem(
            "trainer.max_tokens_per_device",
            f"{trainer.max_tokens_per_device} tokens cannot hold one row of "
            f"data.max_length={config.data.max_length}.",
            "Raise it, or lower data.max_length.",
        )
    rows = trainer.micro_batch_rows
    if not trainer.packing and rows is not None and rows > trainer.batch_rows:
        yield Problem(
            "trainer.micro_batch_rows",
            f"{rows} rows are more than an update has (trainer.batch_rows={trainer.batch_rows}).",
            "Lower it.",
        )
    if config.observe.profiler is not None and trainer.max_steps is not None:
        late = [step for step in config.observe.profiler.steps if step > trainer.max_steps]
        if late:
            yield Problem(
                "observe.profiler.steps",
                f"step {late[0]} comes after the last one (trainer.max_steps={trainer.max_steps}).",
                "Name earlier steps.",
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
    total, warmup = config.trainer.max_steps, schedule.warmup_steps
    if total is not None and warmup is not None and warmup > total:
        yield Problem(
            "trainer.schedule.warmup_steps",
            f"the warm-up is longer than the run (trainer.max_steps={total}), so the peak "
            "learning rate is never reached.",
            "Lower it.",
        )


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
            if source.type == "prompt_completion" and source.system and not source.chat:
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
            "a random start needs a config.json, and a .gguf file has none.",
            "Name a folder in model.path, or set model.init=pretrained.",
        )
    if model.init == "random" and config.lora is not None:
        yield Problem(
            "lora",
            "an adapter on random frozen weights learns nothing of use.",
            "Remove lora, or set model.init=pretrained.",
        )
    if model.implementation == "transformers":
        if model.attention == "varlen":
            yield Problem(
                "model.attention",
                "varlen attention belongs to the native decoder.",
                "Use auto, sdpa or eager, or model.implementation=native.",
            )
        if not model.meta_init:
            yield Problem(
                "model.meta_init",
                "transformers always builds without memory first.",
                "Set it to true, or model.implementation=native.",
            )
        if model.path.endswith(".gguf"):
            yield Problem(
                "model.implementation",
                "GGUF files are read by the native decoder.",
                "Set model.implementation=native.",
            )
    if config.lora is not None and "all-linear" in config.lora.targets:
        if len(config.lora.targets) > 1:
            yield Problem(
                "lora.targets",
                "'all-linear' already names every module.",
                "Write ['all-linear'] alone, or list the modules.",
            )


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    if config.has_validation:
        return
    for name in sorted(config.eval.model_fields_set):
        yield Problem(
            f"eval.{name}",
            "there are no held-out rows to evaluate on.",
            "Set data.validation_share (0.05, say) or data.validation.",
        )


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.load_step is not None and config.checkpoint.resume == "never":
        yield Problem(
            "checkpoint.load_step",
            "checkpoint.resume=never forbids loading one.",
            "Remove one of the two.",
        )


def _on_cpu(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.pin_memory:
        yield Problem(
            "trainer.pin_memory",
            "page-locked memory speeds up copies to a GPU, and this run is on the CPU.",
            "Remove it.",
        )
    if trainer.empty_cache_interval > 0:
        yield Problem(
            "trainer.empty_cache_interval",
            "it returns cached GPU memory, and this run is on the CPU.",
            "Remove it.",
        )
    if config.model.attention == "varlen":
        yield Problem(
            "model.attention",
            "varlen attention has no CPU kernel.",
            "Use auto, sdpa or eager.",
        )
