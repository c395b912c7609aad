"""Publication to several engines behind a router, and replacements for those that die.

    an engine dies -> the router continues with the others -> another process is started meanwhile
    -> at the next publication it is sent the weights that the others have, and joins them

If the last engine dies, the run waits for a replacement. A publication during which engines die
continues with the others; where the transport cannot do that (a broadcast), it begins again without
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from homeostat.config.parts import PublicationSettings
from homeostat.errors import EngineDiedError, SyncError
from homeostat.rollout.engine import Engine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.run.publication.host_weights import PolicyWeights
from homeostat.run.publication.publish import SentWeights
from homeostat.run.session.replacements import Outcome, Replacements
from homeostat.run.session.restarts import Restarts, death_in
from homeostat.run.session.session import Session
from homeostat.sync.bucket import Manifest
from homeostat.sync.publish import WeightSource
from homeostat.sync.verify import Probe
from homeostat.train.saving.run_state import RlState
from homeostat.train.trainer import Trainer

log = logging.getLogger(__name__)


class SentToSeveral(SentWeights):
    """Publishes to the engines of a router."""

    def __init__(
        self,
        engine: Router,
        config: PublicationSettings,
        *,
        trainer: Trainer,
        probe: Probe,
        rl_state: RlState,
        session: Session,
        restarts: Restarts,
        replacements: Replacements,
    ) -> None:
        super().__init__(
            engine,
            config,
            trainer=trainer,
            probe=probe,
            rl_state=rl_state,
            session=session,
            restarts=restarts,
        )
        self.router = engine
        self.replacements = replacements
        self._num_lost = 0
        engine.on_loss = self._lose
        engine.revive = self._await_replacement

    def publish(self, step: int, *, must: bool) -> dict[str, float]:
        """Publish, then let engines that were started meanwhile join, because now the trainer has
        the other engines' weights, or a copy of these is kept."""
        metrics = super().publish(step, must=must)
        while (found := self.replacements.take(wait=False)) is not None:
            engine = self._served(*found)
            if engine is not None:
                self.router.join(engine)
                self._tell_joined(engine)
        return metrics

    def close(self) -> None:
        super().close()
        self.replacements.close()

    def _deliver(self, source: Callable[[], WeightSource], version: int) -> Manifest:
        """Send the weights; again, if engines died and the others were left without them."""
        while True:
            num_lost = self._num_lost
            try:
                manifest = self._send_until_served(source, version)
            except (EngineDiedError, SyncError):
                self._disconnect()
                self.router.cancel_update()
                if self._num_lost == num_lost:
                    raise
                continue
            if self._num_lost > num_lost:
                self._disconnect()
            return manifest

    def _lose(self, engine: Engine, error: EngineDiedError) -> None:
        """Continue without an engine that died, and start another one if restarts are left."""
        assert isinstance(engine, RemoteEngine), engine
        self._num_lost += 1
        if not self._is_sending:
            # A broadcast has a fixed number of receivers: the next publication opens another one.
            with self._turn:
                self._disconnect()
        left = len(self.router.engines) - 1
        self.session.event("engine_lost", self._step, error=str(error), left=left)
        if left:
            log.warning("%s\nIts requests start again in the other %d.", error, left)
        self._begin(engine.name, error, must=not left and not self.replacements.num_starting)

    def _begin(self, name: str, error: EngineDiedError, *, must: bool) -> None:
        """Start a replacement. If no restart is left, raise only where the run `must` have one."""
        if self.restarts.is_exhausted and not must:
            log.warning("All restarts are used up (engine.max_restarts): %s is not replaced.", name)
            return
        self.restarts.count(error, step=self._step)
        self.replacements.begin(name)

    def _await_replacement(self) -> Engine:
        """Return an engine for a router that has none left."""
        while True:
            found = self.replacements.take(wait=True)
            assert found is not None, "it waits, or raises"
            engine = self._served(*found)
            if engine is not None:
                self._tell_joined(engine)
                return engine

    def _served(self, name: str, outcome: Outcome) -> RemoteEngine | None:
        """Send a new engine the weights that the others have. None if its process died."""
        if isinstance(outcome, EngineDiedError):
            self._begin_again(name, outcome)
            return None
        if not isinstance(outcome, RemoteEngine):
            raise outcome
        # The engine gets its own transport, because a broadcast has a fixed number of receivers.
        with self._turn:
            self._disconnect()
        with ExitStack() as undo:
            # Nobody else knows it yet, who could close it.
            undo.callback(outcome.close)
            try:
                self._send_alone(outcome)
            except (EngineDiedError, SyncError) as error:
                self._begin_again(name, death_in(error, outcome))
                return None
            undo.pop_all()
        return outcome

    def _send_alone(self, engine: RemoteEngine) -> None:
        publisher = self._publisher_to(engine)
        try:
            version = self.rl_state.published_version
            self._published(publisher, engine, self._current(), version)
        finally:
            self._end(publisher)

    def _current(self) -> WeightSource:
        """The weights that the other engines have, or are just being sent."""
        if self.is_behind and self._copy is None:
            # All engines are just being sent what the trainer has, and so will this one be.
            return PolicyWeights(self.trainer)
        return self._for_replacement()

    def _begin_again(self, name: str, death: EngineDiedError) -> None:
        others = len(self.router.engines) + self.replacements.num_starting
        self._begin(name, death, must=not others)

    def _tell_joined(self, engine: RemoteEngine) -> None:
        version = self.rl_state.published_version
        self.session.event("engine_joined", self._step, name=engine.name, version=version)
