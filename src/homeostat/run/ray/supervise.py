"""Follow the end of an actor and of its process, as of a process of this host.

Ray tells of the death of an actor or its node by itself: nobody has to call the actor for it.
"""

from __future__ import annotations

from typing import Any

from homeostat.run.ray.placement import Place
from homeostat.workers.kept import KeptProcess
from homeostat.workers.log import WorkerLog


class ActorProcess(KeptProcess):
    """A worker's process, which an actor has started.

    An actor that is gone cannot tell of its process, which counts as killed then.
    """

    def __init__(self, actor: Any, place: Place, *, rank: int, log: WorkerLog) -> None:
        self.actor = actor
        self.place = place
        super().__init__(
            actor.watch.remote().future(),
            signal=lambda number: actor.signal.remote(number),
            name=f"the process of rank {rank} on {place.address}",
            keeper=f"the Ray actor of rank {rank} on {place.address}",
            log=log,
        )

    def _reason(self, error: BaseException) -> str:
        """Return the first paragraph of Ray's message, which says why; the rest are ids."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "pid:"))]
        return " ".join(said[:3]) or type(error).__name__
