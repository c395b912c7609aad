"""Group the console logs of one folder into runs, by their names.

    train.log, train.log.1, train.log.2.gz          one rotated log, read from the oldest part on
    slurm-7.out, slurm-7.err                        the two streams of one job
    rank0.log, rank1.log, trainer.log, vllm.log     processes of one run
    run1.log, run2.log                              two runs

The parts of a name that identify a process, a stream or a part are removed; the rest identifies the
run. If fewer than two different names are left, all files belong to one run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from homeostat.health.readers.input.packed import plain_name

LOG_SUFFIXES = (".log", ".out", ".err")
# Rotation appends this to the name: a number, or the date (and time) of the part.
_ROTATED = re.compile(r"(?P<log>.+\.(?:log|out|err))[.-](?P<part>\d[\d_.T:-]*)", re.ASCII)
_WORDS = re.compile(r"[a-z]+|\d+|[^\W\d_]+")
# Words for one of several processes or parts of a run. A number after the word says which one.
_PROCESSES = frozenset({
    "rank", "localrank", "globalrank", "local", "global", "worker", "workers", "node", "host",
    "gpu", "device", "proc", "process", "part", "shard", "chunk", "dp", "tp", "pp", "replica",
    "actor", "critic", "ref", "reference", "reward", "judge", "policy", "rollout", "rollouts",
    "generator", "generation", "sampler", "engine", "engines", "server", "inference", "vllm",
    "sglang", "ray", "orchestrator", "driver", "controller", "learner", "launcher",
})  # fmt: skip
# Words for the content of a log. They do not distinguish runs.
_CONTENTS = frozenset({
    "log", "logs", "txt", "out", "err", "output", "stdout", "stderr", "console", "debug", "error",
    "errors", "warning", "warnings", "info", "train", "training", "trainer", "eval", "evaluation",
    "main",
})  # fmt: skip
# Files that only a Ray session's log folder has. All files in it belong to that session.
_RAY_SESSION = ("raylet", "gcs_server")


def is_rotated(name: str) -> bool:
    """Return whether a name is that of an older part of a rotated log."""
    return _rotated(name) is not None


def _rotated(name: str) -> re.Match[str] | None:
    # Older parts are often compressed: train.log.2.gz.
    return _ROTATED.fullmatch(plain_name(name))


def runs_of(files: Iterable[Path]) -> list[tuple[Path, ...]]:
    """Return the logs of one folder, grouped by run; the files of a run are sorted by name."""
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
    """Return the files in order, with the parts of a rotated log grouped, the oldest part first."""
    parts: dict[Path, list[Path]] = {}
    for file in files:
        found = _rotated(file.name)
        parts.setdefault(file.with_name(found["log"]) if found else file, []).append(file)
    return [tuple(sorted(group, key=_age)) for group in parts.values()]


def _age(file: Path) -> tuple[int, int, str]:
    """Return a key that sorts the oldest part first: log.2, log.1, log; or by date."""
    found = _rotated(file.name)
    if found is None:
        return 1, 0, ""
    # A number with more digits than a count is a date; dates increase.
    is_count = found["part"].isdigit() and len(found["part"]) < 6
    return 0, -int(found["part"]) if is_count else 0, found["part"]


def _run_name(name: str) -> str:
    """Return the part of a file's name that identifies its run; "" if there is none."""
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
