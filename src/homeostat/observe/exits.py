"""Describe how a process ended: what its signal usually means, and whether memory ran out.

`says_out_of_memory` is the only place that knows the texts of a failed allocation on the host. Code
that has to recognise one (in an exception or in a worker's last lines) calls it.
"""

from __future__ import annotations

import signal
from pathlib import Path

# Messages of host allocators, in any program's log.
ALLOCATOR_TEXTS = (
    # torch's CPU allocator; which of the two messages it uses depends on how torch was built.
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # C++ if an exception cannot leave a thread; OpenMP's runtime.
    "std::bad_alloc",
    "libgomp: Out of memory",
)
# In other programs' logs these may mean something else (memory that cannot be pinned, a GPU's).
# Case matters: the loader's "cannot allocate memory in static TLS block" is no lack of memory.
_OWN_TEXTS = (*ALLOCATOR_TEXTS, "Cannot allocate memory", "MemoryError")

_MEANINGS = {
    "SIGABRT": "a library gave up: an allocation that failed, or an error in a thread where it "
    "cannot be raised. Its last lines say which",
    "SIGBUS": "a mapped file was cut short or its disk failed, or /dev/shm is full. Look at the "
    "free space of both; a damaged file in a cache may be deleted",
    "SIGFPE": "a whole number was divided by zero in compiled code",
    "SIGILL": "the processor does not have an instruction that the code was compiled for, such as "
    "bf16 or AVX-512. Use fp32, or a build for this processor; `homeostat env` lists what it has",
    "SIGKILL": "the system does this when memory runs out, and a scheduler at the end of a job's "
    "time. Lower what needs memory, or ask for more",
    "SIGSEGV": "compiled code touched memory that is not its own: often an extension built for "
    "another version of torch. PYTHONFAULTHANDLER=1 prints where",
    "SIGTERM": "somebody asked it to end: a user, a scheduler, or whoever started it",
    "SIGXCPU": "the limit of CPU time was reached (ulimit -t)",
    "SIGXFSZ": "the limit of a file's size was reached (ulimit -f)",
}
_SIGNALS = {int(number): number.name for number in signal.Signals}


def says_out_of_memory(text: str) -> bool:
    """Return whether a message, or the last lines of a process, report a failed allocation."""
    return any(words in text for words in _OWN_TEXTS)


def describe_exit(code: int | None) -> str:
    """Describe how a process ended, from its return code in subprocess; None means unknown."""
    if code is None:
        return "was killed from outside, together with its guardian"
    return f"ended with exit code {code}" if code >= 0 else describe_signal(-code)


def describe_signal(number: int) -> str:
    """Return "was ended by SIGILL (what that usually means and what to do)"."""
    name = _SIGNALS.get(number, f"signal {number}")
    return f"was ended by {name}" + (f" ({_MEANINGS[name]})" if name in _MEANINGS else "")


def is_death_of_memory(code: int | None, last_lines: str, *, kernel_kills: int) -> bool:
    """Return whether a process that ended by itself ran out of memory.

    The evidence is its own last lines, or for a SIGKILL that the kernel killed a process for lack
    of memory in the meantime: `kernel_kills` is the increase of `num_kernel_kills`.
    """
    if code == -signal.SIGKILL:
        return kernel_kills > 0
    return code != 0 and says_out_of_memory(last_lines)


def num_kernel_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory.

    It is the count of this container if its control group has one, else of the machine; 0 if there
    is no count.
    """
    for file in ("sys/fs/cgroup/memory.events", "proc/vmstat"):
        try:
            lines = (root / file).read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts:
            return int(counts[0])
    return 0
