"""From a recipe to the engine that samples: in this process, with helpers, or in one of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from homeostat.config.rollout import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import EngineDiedError
from homeostat.models.decoder import Decoder
from homeostat.rollout.engine import Engine
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.vllm.host import FACTORY as VLLM
from homeostat.rollout.vllm.options import require_installed
from homeostat.rollout.vllm.served import Served
from homeostat.run.session.restarts import Restarts
from homeostat.run.session.session import Session
from homeostat.run.wiring.helpers import with_helpers
from homeostat.train.local import LocalTrainer
from homeostat.train.trainer import Trainer
from homeostat.types import Role
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

SERVER = "homeostat.rollout.remote:serve_engine"
NATIVE = "homeostat.rollout.native.host:build_engine"
# A model of 1 M weights samples a tenth faster in two processes, and loses that by being sent.
MIN_PARAMS_TO_SPLIT = 20_000_000


def open_engine(
    config: RunConfig,
    trainer: Trainer,
    tokenizer: ChatTokenizer,
    session: Session,
    *,
    version: int,
    restarts: Restarts,
) -> Engine | None:
    """None where debug.mode asks for none. One in a process of its own has no weights yet that
    count: run/publication/publish.py sends them."""
    if config.debug is not None and config.debug.mode == "train_only":
        return None
    if config.engine.shares_weights:
        own = _shared(config, trainer, tokenizer, version=version)
        count = sampling_processes(
            config,
            lanes=trainer.runtime.lanes,
            num_params=trainer.sheet.num_params,
            has_threads=own.bursts is not None,
        )
        kwargs = _native_kwargs(config, trainer)
        starts = [
            partial(
                *(_remote, config, trainer, session),
                **{"factory": NATIVE, "kwargs": kwargs, "name": f"helper{number}"},
            )
            for number in range(1, count)
        ]
        return with_helpers(own, starts, config=config, trainer=trainer, session=session)
    if isinstance(config.engine, NativeEngineConfig):
        factory, kwargs = NATIVE, _native_kwargs(config, trainer)
    else:
        require_installed()
        factory, kwargs = VLLM, _vllm_kwargs(config, trainer, tokenizer, session)
    while True:
        try:
            return _remote(config, trainer, session, factory=factory, kwargs=kwargs, name="engine")
        except EngineDiedError as error:
            restarts.count(error, step=version)


def sampling_processes(config: RunConfig, *, lanes: int, num_params: int, has_threads: bool) -> int:
    """Those that sample at one time beside a trainer of so many lanes: see engine.processes.
    `has_threads`: one process can use all cores."""
    if not isinstance(config.engine, NativeEngineConfig) or not config.engine.shares_weights:
        return 1
    pays = not has_threads and num_params >= MIN_PARAMS_TO_SPLIT
    return config.engine.processes or (lanes if pays else 1)


def _remote(
    config: RunConfig,
    trainer: Trainer,
    session: Session,
    *,
    factory: str,
    kwargs: dict[str, Any],
    name: str,
) -> RemoteEngine:
    spec = GroupSpec(
        factory=SERVER,
        kwargs={"factory": factory, "kwargs": kwargs},
        kind="engine",
        name=name,
        log_file=session.run_dir.path / f"{name}.log",
        start_timeout_s=config.engine.start_timeout_s,
    )
    return RemoteEngine(
        lambda: open_group(config.cluster, spec),
        vocabulary=trainer.sheet.vocab_size,
        can_decode=True,
        timeout_s=config.engine.stall_s,
        update_timeout_s=config.sync.timeout_s,
    )


def _shared(
    config: RunConfig, trainer: Trainer, tokenizer: ChatTokenizer, *, version: int
) -> NativeEngine:
    assert isinstance(trainer, LocalTrainer), "combinations asks for weights in this process"
    model = trainer.roles[Role.POLICY].model
    assert isinstance(model, Decoder), "combinations asks for the native decoder"
    assert isinstance(config.engine, NativeEngineConfig), config.engine
    return NativeEngine(
        model,
        config.engine,
        device=trainer.runtime.device,
        max_tokens=config.max_request_tokens,
        decode=tokenizer.decode,
        chunk_bytes=config.trainer.logits_bytes(trainer.runtime.device.type),
        policy_version=version,
        threads=trainer.runtime.lanes * trainer.runtime.threads,
    )


def _native_kwargs(config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    runtime = trainer.runtime
    return {
        "model": config.model,
        "engine": config.engine,
        "device": runtime.device,
        "dtype": runtime.dtype,
        "threads": runtime.threads,
        "seed": config.seed,
        "max_tokens": config.max_request_tokens,
        "chunk_bytes": config.trainer.logits_bytes(runtime.device.type),
    }


def _vllm_kwargs(
    config: RunConfig, trainer: Trainer, tokenizer: ChatTokenizer, session: Session
) -> dict[str, Any]:
    served = Served(
        model_type=str(trainer.sheet.source_config["model_type"]),
        vocabulary=trainer.sheet.vocab_size,
        dtype=str(trainer.runtime.dtype).removeprefix("torch."),
    )
    return {
        "folder": _hf_folder(config, trainer, tokenizer, session),
        "config": config.engine,
        "served": served,
        "max_tokens": config.max_request_tokens,
        "tokenizer": config.model,
    }


def _hf_folder(
    config: RunConfig, trainer: Trainer, tokenizer: ChatTokenizer, session: Session
) -> Path:
    """A checkpoint in HF format of the model's shape: model.path where that is one, else the
    policy of now, written to the run directory."""
    path = Path(config.model.path)
    if config.model.init == "pretrained" and path.is_dir():
        return path
    folder = session.run_dir.path / "engine_model"
    # All weights, also where an adapter is trained.
    trainer.export(Role.POLICY, folder, config.model_copy(update={"lora": None}))
    tokenizer.save(folder)
    return folder
