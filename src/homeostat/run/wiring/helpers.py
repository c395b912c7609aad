"""Helpers of the engine in the trainer's process: how they get their weights, how one is missed.

They are sent what the trainer has at every commit, whatever `sync` says: to the run they are the
engine that shares its weights, and never behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from homeostat.config.run import RunConfig
from homeostat.config.sync import SharedMemoryConfig
from homeostat.errors import EngineDiedError, SyncError
from homeostat.rollout.engine import Engine, Quiesce
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.split import SplitEngine
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
    config: RunConfig,
    trainer: Trainer,
    session: Session,
) -> Engine:
    """Start the helpers. Returns the engine itself where there are none."""

    def tell(error: EngineDiedError) -> None:
        log.warning("%s\nIts requests begin again in the trainer's process.", error)
        session.event("helper_lost", session.last_step, error=str(error))

    weights = HelperWeights(config, trainer, session)
    with ExitStack() as undo:
        helpers: list[RemoteEngine] = []
        for start in starts:
            try:
                helpers.append(start())
            except EngineDiedError as error:
                tell(error)
            else:
                undo.callback(helpers[-1].close)
        if not helpers:
            return own
        engine = SplitEngine(own, helpers, give_weights=weights.give, on_loss=tell)
        undo.pop_all()
    return engine


class HelperWeights:
    """Sends the trainer's weights to helpers, to each by a transport of its own."""

    def __init__(self, config: RunConfig, trainer: Trainer, session: Session) -> None:
        self.config = config
        self.trainer = trainer
        self.folder = session.run_dir.path
        self._publishers: dict[RemoteEngine, Publisher] = {}
        self._num_opened = 0

    def give(self, helper: RemoteEngine, version: int, how: Quiesce) -> None:
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
            timeout_s=self.config.sync.timeout_s,
        )
        self._publishers[helper] = Publisher(transport, probe=None)
        helper.connect(transport)
        return self._publishers[helper]
