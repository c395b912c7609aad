"""Lists that signatures and Python code share: a stanza writes "@aftermath" for one of them."""

from __future__ import annotations

from homeostat.health.signatures import counts, places
from homeostat.observe.exits import ALLOCATOR_TEXTS

# A rank that dies takes the others with it: their collectives time out, Ray reports a lost actor,
# the launcher a failed child. The first failure explains these codes: collective timeout, lost
# peer, lost actor, launcher's summary, native crash, dead engine, engine that did not start, engine
# that does not answer, Ray graph that waits, server that does not answer.
AFTERMATH = (
    "ERR100",
    "ERR104",
    "ERR105",
    "ERR132",
    "ERR139",
    "ERR140",
    "ERR141",
    "ERR635",
    "ERR254",
    "ERR255",
    "ERR256",
    "ERR271",
    "ERR133",
    "ERR117",
)

# Lines of torchrun's table for a rank that ended by itself: it raised, called sys.exit, crashed
# or was killed. -15 is SIGTERM, which torchrun sends to the others then.
RANK_FAILED = (
    *(f"exitcode  : {digit}*" for digit in range(1, 10)),
    *(f"exitcode  : -{signal} (pid" for signal in (4, 6, 7, 8, 9, 11)),
)

LISTS: dict[str, tuple[str, ...]] = {
    "aftermath": AFTERMATH,
    "allocator_failed": ALLOCATOR_TEXTS,
    "engine_silent": counts.SILENT,
    "joining": counts.JOINING,
    "out_of_memory": places.OOM,
    "rank_failed": RANK_FAILED,
    "waiting": counts.WAITING,
}
