"""Limit the restarts of an engine's process, and distinguish its death from other failures."""

from __future__ import annotations

import logging

from homeostat.errors import EngineDiedError, EngineError, SyncError
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.session.session import Session

log = logging.getLogger(__name__)


class Restarts:
    """Counts the engine restarts of one `homeostat train`.

    Every death of the engine's process counts, no matter whether the process was starting, loading
    the model, receiving weights or sampling.
    """

    def __init__(self, most: int, session: Session) -> None:
        self.most = most
        self.session = session
        self.count_so_far = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether none is left."""
        return self.count_so_far == self.most

    def count(self, death: EngineDiedError, *, step: int) -> None:
        """Record one more restart. Raises EngineError if none is left."""
        if self.is_exhausted:
            raise EngineError(
                f"{death}\nThe engine was started anew {self.most} times before "
                "(engine.max_restarts). Nothing saved is lost: run the same command to resume."
            ) from death
        self.count_so_far += 1
        log.warning("%s\nRestarting it (%d of %d).", death, self.count_so_far, self.most)
        self.session.event("engine_restarted", step, error=str(death), restarts=self.count_so_far)


def death_in(error: EngineDiedError | SyncError, engine: RemoteEngine) -> EngineDiedError:
    """Return the death of the engine that made a publication of weights fail.

    Raises `error` again if the engine is alive.
    """
    death = error if isinstance(error, EngineDiedError) else error.__cause__
    if not isinstance(death, EngineDiedError):
        # A transport may notice the missing receiver before any call to the engine has failed.
        death = engine.death()
    if death is None:
        raise error
    return death
