"""The one stopwatch of the comparisons: a child process that appends a line per step to a file.

The parent notes wall clock and CPU seconds of the child, and of what it started, as each line
appears, so that both sides are measured by the same hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.02
CHILD_TIMEOUT_S = 3600

# glibc returns blocks of this size to the system at once and allocates them again, page by page.
# Keeping them makes TRL about a fifth faster and us a tenth; both sides get it.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


class ChildFailedError(RuntimeError):
    """A side did not finish; the message holds the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Timed:
    """(wall, CPU seconds) at each line, the lines themselves, and the peak memory."""

    stamps: list[tuple[float, float]]
    records: list[dict[str, Any]]
    max_rss_bytes: int


def run_child(line: list[str], out: Path, scratch: Path, *, threads: int, num_lines: int) -> Timed:
    environment = (
        os.environ
        | ALLOCATOR
        | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
    )
    log = scratch / "console.log"
    with open(log, "wb") as stream:
        child = subprocess.Popen(line, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        stamps, max_rss = _watch(child, out)
    if child.returncode != 0 or len(stamps) < num_lines:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        what = f"{scratch.name} ended with code {child.returncode} after {len(stamps)} lines"
        raise ChildFailedError(f"{what}:\n{tail}")
    records = [json.loads(text) for text in out.read_text().splitlines()]
    return Timed(stamps, records, max_rss)


def _watch(child: subprocess.Popen[bytes], out: Path) -> tuple[list[tuple[float, float]], int]:
    import psutil

    process = psutil.Process(child.pid)
    stamps: list[tuple[float, float]] = []
    size, max_rss, cpu = 0, 0, 0.0
    deadline = time.monotonic() + CHILD_TIMEOUT_S
    while child.poll() is None:
        if time.monotonic() > deadline:
            child.kill()
            raise ChildFailedError(f"{child.args} did not end within {CHILD_TIMEOUT_S} s")
        grown = out.stat().st_size if out.exists() else 0
        try:
            max_rss = max(max_rss, process.memory_info().rss)
            if grown != size:
                tree = [process, *process.children(recursive=True)]
                cpu = sum(sum(one.cpu_times()[:2]) for one in tree)
        except psutil.NoSuchProcess:
            break
        if grown != size:
            lines = out.read_bytes().count(b"\n")
            stamps += [(time.perf_counter(), cpu)] * (lines - len(stamps))
            size = grown
        time.sleep(POLL_S)
    child.wait()
    return stamps, max_rss
