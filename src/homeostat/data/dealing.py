"""Deal micro-batches to ranks, and put the answers of ranks back in order.

Micro-batches are dealt to data groups in rounds, one to each group; all ranks of a data group get
the same ones, because they share the work on them (config/mesh.py). Every rank has the same number
of rounds: passes over the model have collectives in them, so that a rank without a micro-batch must
still take part. None stands for that, and only the last round has any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from homeostat.config.mesh import Mesh

T = TypeVar("T")


def deal(batches: Sequence[T], mesh: Mesh) -> list[list[T | None]]:
    """Return the micro-batches of each rank, one per round.

    Batches come fullest first, so the groups of a round have about as much to do.
    """
    groups = mesh.num_data_groups
    num_rounds = math.ceil(len(batches) / groups)
    filled = [*batches, *[None] * (num_rounds * groups - len(batches))]
    return [filled[mesh.data_group(rank) :: groups] for rank in range(mesh.world_size)]


def one_per_group(answers: Sequence[T], mesh: Mesh) -> list[T]:
    """Return, of one answer per rank, those of the first rank of each data group.

    The ranks of a group agree on their answer before they give it.
    """
    return [answers[ranks[0]] for ranks in mesh.data_groups]


def in_order(dealt: Sequence[Sequence[T]], mesh: Mesh, *, count: int) -> list[T]:
    """Undo `deal`: return the answers to `count` batches from those of each rank, one per round."""
    per_group = one_per_group(dealt, mesh)
    groups = len(per_group)
    return [per_group[index % groups][index // groups] for index in range(count)]
