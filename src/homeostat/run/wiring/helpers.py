"""Helpers: engines in other processes that sample beside the engine in the trainer's process.

They are sent what the trainer has at every commit, whatever `sync` says: to the run they are the
engine that shares its weights, and never behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from homeostat.config.sync import SharedMemoryConfig, SyncConfig
from homeostat.errors import EngineDiedError, SyncError
from homeostat.rollout.engine import Engine, Quiesce
from homeostat.rollout.mirror import MirrorEngine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.run.publication.host_weights import PolicyWeights
from homeostat.run.session.restarts import death_in
from homeostat.run.session.session import Session
from homeostat.sync.publish import Publisher
from homeostat.sync.transports import open_transport
from homeostat.train.trainer import Trainer

log = logging.getLogger(__name__)


def with_helpers(
    own: Engine,
    starts: Sequence[Callable[[], RemoteEngine]],
    *,
    sync: SyncConfig,
    trainer: Trainer,
    session: Session,
) -> Engine:
    """Start the helpers. Returns a router over the engine and them, or the engine itself where no
    helper is wanted or none lives."""

    def tell(error: EngineDiedError) -> None:
        log.warning("%s\nIts requests start again in the other processes.", error)
        session.event("helper_lost", session.last_step, error=str(error))

    weights = HelperWeights(sync, trainer, session)
    with ExitStack() as undo:
        mirrors: list[MirrorEngine] = []
        for start in starts:
            try:
                remote = start()
                undo.callback(remote.close)
                version = own.policy_version
                mirrors.append(MirrorEngine(remote, version=version, send_weights=weights.send))
            except EngineDiedError as error:
                tell(error)
        engine = Router([own, *mirrors], on_loss=lambda _, error: tell(error)) if mirrors else own
        undo.pop_all()
    return engine


class HelperWeights:
    """Sends the trainer's weights to helpers, each through its own transport."""

    def __init__(self, sync: SyncConfig, trainer: Trainer, session: Session) -> None:
        self.sync = sync
        self.trainer = trainer
        self.folder = session.run_dir.path
        self._publishers: dict[RemoteEngine, Publisher] = {}
        self._num_opened = 0

    def send(self, helper: RemoteEngine, version: int, how: Quiesce) -> None:
        """Raises EngineDiedError where the helper is found dead."""
        try:
            publisher = self._publishers.get(helper) or self._connected(helper)
            source = PolicyWeights(self.trainer)
            publisher.publish(source, helper, version=version, quiesce=how, on_ended=list)
        except (EngineDiedError, SyncError) as error:
            death = death_in(error, helper)
            self._publishers.pop(helper).close()
            raise death from error

    def _connected(self, helper: RemoteEngine) -> Publisher:
        self._num_opened += 1
        transport = open_transport(
            SharedMemoryConfig(),
            folder=self.folder / f"helper{self._num_opened}",
            device=self.trainer.runtime.device,
            timeout_s=self.sync.timeout_s,
        )
        self._publishers[helper] = Publisher(transport, probe=None, policy_id=helper.policy_id)
        helper.connect(transport)
        return self._publishers[helper]
