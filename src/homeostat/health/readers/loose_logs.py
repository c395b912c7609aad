"""Console logs that lie side by side in a folder: which of them belong to one run, by their names.

    train.log, train.log.1, train.log.2.gz          one log that was rotated, oldest part first
    slurm-7.out, slurm-7.err                        the two streams of one job
    rank0.log, rank1.log, trainer.log, vllm.log     processes of one run
    run1.log, run2.log                              two runs

Whatever names a process, a stream or a part is taken out of a file's name; what is left names the
run. Files of which nothing is left belong to the one run that there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from homeostat.health.readers.packed import plain_name

LOG_SUFFIXES = (".log", ".out", ".err")
# What rotation writes behind the name: a number, or the day (and time) of the part.
_ROTATED = re.compile(r"(?P<log>.+\.(?:log|out|err))[.-](?P<part>\d[\d_.T:-]*)", re.ASCII)
_WORDS = re.compile(r"[a-z]+|\d+|[^\W\d_]+")
# Words for one of several processes or parts of a run; a number behind one says which.
_PROCESSES = frozenset({
    "rank", "localrank", "globalrank", "local", "global", "worker", "workers", "node", "host",
    "gpu", "device", "proc", "process", "part", "shard", "chunk", "dp", "tp", "pp", "replica",
    "actor", "critic", "ref", "reference", "reward", "judge", "policy", "rollout", "rollouts",
    "generator", "generation", "sampler", "engine", "engines", "server", "inference", "vllm",
    "sglang", "ray", "orchestrator", "driver", "controller", "learner", "launcher",
})  # fmt: skip
# Words for what a log holds: they tell no run from another.
_CONTENTS = frozenset({
    "log", "logs", "txt", "out", "err", "output", "stdout", "stderr", "console", "debug", "error",
    "errors", "warning", "warnings", "info", "train", "training", "trainer", "eval", "evaluation",
    "main",
})  # fmt: skip
# Files that only the log folder of a Ray session has: all in it is of one session.
_RAY_SESSION = ("raylet", "gcs_server")


def is_rotated(name: str) -> bool:
    """Return whether a name is that of an older part of a log."""
    return _rotated(name) is not None


def _rotated(name: str) -> re.Match[str] | None:
    # Rotation often compresses the older parts: train.log.2.gz.
    return _ROTATED.fullmatch(plain_name(name))


def runs_of(files: Iterable[Path]) -> list[tuple[Path, ...]]:
    """The loose logs of one folder, run by run; each run's files in the order of their names."""
    groups: dict[str, list[Path]] = {}
    for file in sorted(files):
        groups.setdefault(_run_name(file.name), []).append(file)
    is_session = any(
        file.name.startswith(_RAY_SESSION) for group in groups.values() for file in group
    )
    if is_session or sum(name != "" for name in groups) < 2:
        return [tuple(sorted(file for group in groups.values() for file in group))]
    return [tuple(group) for group in groups.values()]


def with_parts(files: Sequence[Path]) -> list[tuple[Path, ...]]:
    """The files in their order, the parts of a rotated log together, the oldest part first."""
    parts: dict[Path, list[Path]] = {}
    for file in files:
        found = _rotated(file.name)
        parts.setdefault(file.with_name(found["log"]) if found else file, []).append(file)
    return [tuple(sorted(group, key=_age)) for group in parts.values()]


def _age(file: Path) -> tuple[int, int, str]:
    """A key that sorts the oldest part first: log.2, log.1, log; or by the day."""
    found = _rotated(file.name)
    if found is None:
        return 1, 0, ""
    # More digits than a count has are a day, and days grow.
    is_count = found["part"].isdigit() and len(found["part"]) < 6
    return 0, -int(found["part"]) if is_count else 0, found["part"]


def _run_name(name: str) -> str:
    """Return what a file's name says about its run; "" if it says nothing."""
    found = _rotated(name)
    kept: list[str] = []
    is_numbered = False
    for word in _WORDS.findall((found["log"] if found else plain_name(name)).lower()):
        if word in _PROCESSES:
            is_numbered = True
        elif not (is_numbered and word.isdigit()):
            is_numbered = False
            if word not in _CONTENTS:
                kept.append(word)
    return " ".join(kept)
