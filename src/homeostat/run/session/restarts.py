"""Limit the restarts of engines and of the trainer's ranks; tell a death from other failures."""

from __future__ import annotations

import logging
import time

from homeostat.errors import (
    EngineDiedError,
    EngineError,
    NodeLostError,
    SyncError,
    TrainerLostError,
    WorkerError,
)
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.session.session import Session

# The wait before the first restart of the trainer's ranks in a row; each further one doubles it.
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0

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
        """Return whether no restart is left."""
        return self.count_so_far == self.most

    def count(self, death: EngineDiedError, *, step: int) -> None:
        """Record one more restart. Raises EngineError if none is left."""
        if self.is_exhausted:
            raise EngineError(
                f"{death}\nThe engine was already restarted {self.most} times "
                "(engine.max_restarts). Nothing saved is lost: run the same command to resume."
            ) from death
        self.count_so_far += 1
        log.warning("%s\nRestarting it (%d of %d).", death, self.count_so_far, self.most)
        self.session.event("engine_restarted", step, error=str(death), restarts=self.count_so_far)


class TrainerRestarts:
    """Counts the restarts of the trainer's ranks that brought no new checkpoint.

    A run of weeks may lose a machine now and then; one that loses its ranks at the same step again
    and again ends. What was sampled and scored is in the journal, so that nothing is sampled twice.
    """

    def __init__(self, most: int, session: Session) -> None:
        self.most = most
        self.session = session
        self.in_a_row = 0
        self._from_step = -1

    def recover(self, lost: TrainerLostError) -> None:
        """Have the session resume from its last checkpoint, after a wait.

        Raises WorkerError if no restart is left. The loss of a machine is no restart: the wait for
        machines has its own limit.
        """
        point = self.session.last_saved()
        if isinstance(lost, NodeLostError):
            self.session.resume_from(point)
            return
        step = point.found.step if point.found is not None else 0
        if step > self._from_step:
            self.in_a_row = 0
        self._from_step = step
        if self.in_a_row == self.most:
            raise WorkerError(
                f"{lost}\nThe trainer's ranks were restarted {self.most} times in a row before "
                "(cluster.max_restarts). Nothing saved is lost: run the same command to resume."
            ) from lost
        wait_s = min(FIRST_WAIT_SECONDS * 2**self.in_a_row, LONGEST_WAIT_SECONDS)
        self.in_a_row += 1
        text = "%s\nRestarting all ranks from step %d in %.3g s (%d of %d)."
        log.warning(text, lost, step, wait_s, self.in_a_row, self.most)
        fields = {"error": str(lost), "restarts": self.in_a_row, "from_step": step}
        self.session.event("trainer_restarted", self.session.last_step, **fields)
        self.session.resume_from(point)
        time.sleep(wait_s)


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
