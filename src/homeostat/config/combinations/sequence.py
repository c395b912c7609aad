"""Find settings that cannot work if several ranks share a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.cluster import AnyBackend, FsdpBackend
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

CP, SP = "trainer.backend.context_parallel_size", "trainer.backend.sequence_parallel_size"


def find_sequence_conflicts(config: RunConfig, backend: FsdpBackend) -> Iterator[Problem]:
    """Yield every conflict of the two sizes with other settings, with its reason and remedy."""
    if backend.ranks_per_micro_batch == 1:
        return
    if config.cluster.ranks_per_host < config.cluster.processes:
        yield from _one_host(backend, config.cluster.ranks_per_host)
    yield from _experts(config, backend)
    if backend.context_parallel_size > 1:
        yield from _ring(config)


def longer_rows(backend: AnyBackend) -> str:
    """Return the words that name how ranks make room for longer rows, where there are ranks."""
    return f", or raise {CP}" if isinstance(backend, FsdpBackend) else ""


def _one_host(backend: FsdpBackend, ranks_per_host: int) -> Iterator[Problem]:
    size = backend.sequence_parallel_size
    if ranks_per_host % size:
        yield Problem(
            SP,
            f"the {size} ranks that exchange heads must be on one machine, and {ranks_per_host} "
            f"ranks of a machine cannot be divided into groups of {size} ({ranks_per_host} = "
            f"{ranks_per_host // size} x {size} + {ranks_per_host % size}).",
            f"Set it to a divisor of {ranks_per_host}; {CP} may span machines.",
        )


def _experts(config: RunConfig, backend: FsdpBackend) -> Iterator[Problem]:
    moe, key = config.model.moe, CP if backend.context_parallel_size > 1 else SP
    why = f"each rank has only some tokens of each row ({key}={_size(backend, key)})"
    if moe.balancing == "sequence_aux":
        yield Problem(
            "model.moe.balancing",
            f"sequence_aux compares the load of experts within whole rows, and {why}.",
            "Use aux, which compares it within the whole update, or set the size to 1.",
        )
    if moe.capacity_factor is not None:
        yield Problem(
            "model.moe.capacity_factor",
            f"an expert accepts only the first tokens of a micro-batch, and {why}.",
            "Remove it, or set the size to 1.",
        )


def _ring(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if config.model.numerics == "invariant":
        yield Problem(
            CP,
            "invariant numerics sum over a query's keys in one fixed order on one device, and "
            "ring attention merges results of several ranks.",
            f"Use {SP}, which keeps every bit, or set model.numerics=fast.",
        )
    if trainer.share_prompts and "share_prompts" in trainer.model_fields_set:
        yield Problem(
            "trainer.share_prompts",
            "ring attention splits each whole row into chunks over its ranks, so it cannot "
            "compute a prompt once for several rows.",
            f"Remove it or set it to false, or use {SP}, which shares prompts.",
        )
    if config.is_strided:
        yield Problem(
            CP,
            "with ebft.mode=strided, rows are computed as a tree in which shared prefixes occur "
            "once, and ring attention needs whole rows.",
            f"Use {SP}.",
        )


def _size(backend: FsdpBackend, key: str) -> int:
    return backend.context_parallel_size if key == CP else backend.sequence_parallel_size
