"""Open the engine of a recipe: in this process, with helpers, or in a separate process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from homeostat.config.run import RunConfig
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import EngineDiedError
from homeostat.rollout.backend import EngineBackend, EngineSite
from homeostat.rollout.engine import Engine
from homeostat.rollout.registry import ENGINES
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.server import SERVER
from homeostat.run.publication.fp8_checkpoint import fp8_checkpoint
from homeostat.run.session.restarts import Restarts
from homeostat.run.session.session import Session
from homeostat.run.wiring.helpers import with_helpers
from homeostat.train.local import LocalTrainer
from homeostat.train.trainer import Trainer
from homeostat.types import Role
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec


def open_engine(
    config: RunConfig,
    trainer: Trainer,
    tokenizer: ChatTokenizer,
    session: Session,
    *,
    version: int,
    restarts: Restarts,
) -> Engine | None:
    """Open the engine; None where debug.mode asks for none. One in a process of its own has no
    weights yet that count: run/publication/publish.py sends them."""
    if config.debug is not None and config.debug.mode == "train_only":
        return None
    backend = ENGINES[config.engine.type]
    site = _site(config, trainer, tokenizer, session)
    start = partial(_start, backend, site, config=config, session=session)
    if config.engine.shares_weights:
        assert backend.open_here is not None, "an engine that shares weights is opened here"
        assert isinstance(trainer, LocalTrainer), "combinations asks for weights in this process"
        own = backend.open_here(site, trainer.roles[Role.POLICY].model, tokenizer.decode, version)
        names = [f"helper{number + 1}" for number in range(backend.num_helpers(site, own))]
        starts = [partial(start, name=name) for name in names]
        return with_helpers(own, starts, sync=config.sync, trainer=trainer, session=session)
    while True:
        try:
            return start(name="engine")
        except EngineDiedError as error:
            restarts.count(error, step=version)


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
    backend: EngineBackend, site: EngineSite, *, config: RunConfig, session: Session, name: str
) -> RemoteEngine:
    """Start the engine in a separate process."""
    spec = GroupSpec(
        factory=SERVER,
        kwargs={"factory": backend.factory, "kwargs": backend.factory_arguments(site)},
        kind="engine",
        name=name,
        log_file=session.run_dir.path / f"{name}.log",
        num_gpus=config.engine.num_devices if site.device.type == "cuda" else 0,
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
    # All weights, also where an adapter is trained.
    trainer.export(Role.POLICY, folder, replace(config.for_export, lora=None))
    tokenizer.save(folder)
    return folder
