"""Open the engine of a recipe: in this process, with helpers, or in separate processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from homeostat.config.engine import EngineConfig
from homeostat.config.run import RunConfig
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import EngineDiedError, EngineError, NodeLostError, RunDirWriteError
from homeostat.observe.durable import FileErrorsAsOsError, not_written
from homeostat.rollout.backend import EngineSite
from homeostat.rollout.engine import Engine
from homeostat.rollout.registry import backend_of
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.rollout.server import SERVER
from homeostat.run.publication.fp8_checkpoint import fp8_checkpoint
from homeostat.run.session.replacements import Outcome, StartEngine
from homeostat.run.session.restarts import Restarts
from homeostat.run.session.session import Session
from homeostat.run.wiring.helpers import with_helpers
from homeostat.train.local import LocalTrainer
from homeostat.train.trainer import Trainer
from homeostat.types import Role
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

# Devices that a process sees.
VISIBLE = "CUDA_VISIBLE_DEVICES"


def open_engine(
    config: RunConfig,
    trainer: Trainer,
    tokenizer: ChatTokenizer,
    session: Session,
    *,
    version: int,
    restarts: Restarts,
    start: StartEngine,
) -> Engine:
    """Open the engine. Those in separate processes, which `start` starts, have no weights yet
    that count: run/publication sends them."""
    if not config.engine.shares_weights:
        return _started(engine_names(config.engine), start, restarts=restarts, step=version)
    backend = backend_of(config.engine)
    site = _site(config, trainer, tokenizer, session)
    assert backend.open_here is not None, "an engine that shares weights is opened here"
    assert isinstance(trainer, LocalTrainer), "combinations asks for weights in this process"
    own = backend.open_here(site, trainer.roles[Role.POLICY].model, tokenizer.decode, version)
    names = [f"helper{number + 1}" for number in range(backend.num_helpers(site, own))]
    starts = [partial(start, name) for name in names]
    return with_helpers(own, starts, sync=config.sync, trainer=trainer, session=session)


def engine_starter(
    config: RunConfig, trainer: Trainer, tokenizer: ChatTokenizer, session: Session
) -> StartEngine:
    """Return a function that starts the engine process of a given name, from any thread."""
    site = _site(config, trainer, tokenizer, session)
    names = engine_names(config.engine)
    if len(names) > 1 and site.device.type == "cuda":
        # Each process sees its own devices alone.
        site = replace(site, device=torch.device("cuda", 0))
    # Here and not in a thread: it may export the trainer's model.
    arguments = backend_of(config.engine).factory_arguments(site)

    def start(name: str) -> RemoteEngine:
        number = names.index(name) if name in names else 0
        env = engine_environment(config, site.device, number=number)
        return _start(arguments, site, config=config, session=session, name=name, env=env)

    return start


def engine_names(engine: EngineConfig) -> list[str]:
    """Return the names of the engines' processes, which are also those of their log files."""
    size = engine.data_parallel_size
    return ["engine"] if size == 1 else [f"engine{number + 1}" for number in range(size)]


def engine_environment(config: RunConfig, device: torch.device, *, number: int) -> dict[str, str]:
    """Return the variables that give the engine `number` its own devices.

    Empty where there is one engine, where there are no GPUs, and where the launcher places engines.
    """
    engine = config.engine
    if engine.data_parallel_size == 1 or device.type != "cuda":
        return {}
    if config.cluster.launcher("engine") != "spawn":
        return {}
    named = os.environ.get(VISIBLE)
    visible = named.split(",") if named else [str(one) for one in range(torch.cuda.device_count())]
    return {VISIBLE: ",".join(dealt_devices(visible, engine, number=number))}


def dealt_devices(visible: Sequence[str], engine: EngineConfig, *, number: int) -> list[str]:
    """Return the devices of the engine `number`: the next `num_devices` of those that are visible.

    Native engines may share a device. Raises EngineError if there are not enough for others.
    """
    wanted = engine.data_parallel_size * engine.num_devices
    if wanted > len(visible) and not engine.needs_native_decoder:
        raise EngineError(
            f"engine.data_parallel_size={engine.data_parallel_size} engines of "
            f"{engine.num_devices} devices need {wanted} devices, and {len(visible)} are visible "
            f"({VISIBLE}). Lower "
            "engine.data_parallel_size or engine.tensor_parallel_size."
        )
    first = number * engine.num_devices
    return [visible[(first + one) % len(visible)] for one in range(engine.num_devices)]


def _started(
    names: Sequence[str], start: StartEngine, *, restarts: Restarts, step: int
) -> RemoteEngine | Router:
    """Start engines, all at the same time. One that dies as it starts is started again."""

    def attempt(name: str) -> Outcome:
        try:
            return start(name)
        except (EngineError, NodeLostError) as error:
            return error

    with ExitStack() as undo:
        with ThreadPoolExecutor(len(names), thread_name_prefix="start") as threads:
            outcomes = dict(zip(names, threads.map(attempt, names), strict=True))
        engines = []
        for outcome in outcomes.values():
            if isinstance(outcome, RemoteEngine):
                undo.callback(outcome.close)
        for name, outcome in outcomes.items():
            while isinstance(outcome, EngineDiedError):
                restarts.count(outcome, step=step)
                outcome = attempt(name)
            if not isinstance(outcome, RemoteEngine):
                raise outcome
            engines.append(outcome)
            undo.callback(outcome.close)
        undo.pop_all()
    return engines[0] if len(engines) == 1 else Router(engines)


def _site(
    config: RunConfig, trainer: Trainer, tokenizer: ChatTokenizer, session: Session
) -> EngineSite:
    runtime, sheet = trainer.runtime, trainer.sheet
    checkpoint = fp8_checkpoint(config)
    return EngineSite(
        engine=config.engine,
        model=config.model,
        device=runtime.device,
        dtype=runtime.dtype,
        threads=runtime.threads,
        lanes=runtime.lanes,
        seed=config.seed,
        max_tokens=config.max_request_tokens,
        chunk_bytes=config.trainer.logits_bytes(runtime.device.type),
        vocabulary=sheet.vocab_size,
        num_params=sheet.num_params,
        model_type=str(sheet.source_config["model_type"]),
        checkpoint=partial(_hf_folder, config, trainer, tokenizer, session),
        fp8=config.engine_fp8,
        fp8_checkpoint=None if checkpoint is None else checkpoint.settings,
        adapter=config.published_adapter,
    )


def _start(
    arguments: Mapping[str, Any],
    site: EngineSite,
    *,
    config: RunConfig,
    session: Session,
    name: str,
    env: Mapping[str, str],
) -> RemoteEngine:
    """Start the engine in a separate process."""
    backend = backend_of(config.engine)
    spec = GroupSpec(
        factory=SERVER,
        kwargs={"factory": backend.factory, "kwargs": arguments},
        kind="engine",
        name=name,
        log_file=session.run_dir.path / f"{name}.log",
        env=env,
        num_gpus=config.engine.num_devices if site.device.type == "cuda" else 0,
        on_span=session.timeline.add,
        start_timeout_s=config.engine.start_timeout_s,
    )
    return RemoteEngine(
        lambda: open_group(config.cluster, spec),
        vocabulary=site.vocabulary,
        can_decode=True,
        timeout_s=config.engine.stall_s,
        update_timeout_s=config.sync.timeout_s,
    )


def _hf_folder(
    config: RunConfig, trainer: Trainer, tokenizer: ChatTokenizer, session: Session
) -> Path:
    """Return a checkpoint in HF format of the model's shape.

    It is model.path if that is one, else the current policy, written to the run directory.
    """
    path = Path(config.model.path)
    if config.model.init == "pretrained" and path.is_dir():
        return path
    folder = session.run_dir.path / "engine_model"
    try:
        with FileErrorsAsOsError():
            # All weights, also where an adapter is trained.
            trainer.export(Role.POLICY, folder, replace(config.for_export, lora=None))
            tokenizer.save(folder)
    except OSError as error:
        raise RunDirWriteError(
            f"{not_written(folder, error)} The engine reads the model from there (runs_dir)."
        ) from None
    return folder
