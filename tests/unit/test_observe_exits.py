"""How processes end, in words; and what counts as having run out of memory."""

import re
import signal
from pathlib import Path

import pytest
import torch

from homeostat.observe.exits import (
    describe_exit,
    is_death_of_memory,
    num_kernel_kills,
)
from homeostat.ops.memory import is_out_of_memory, reason_of

BAD_ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (None, "was killed from outside"),
        (-4, r"was ended by SIGILL \(the processor does not have an instruction .* fp32"),
        (-6, r"was ended by SIGABRT \(a library gave up: .* last lines"),
        (-7, r"was ended by SIGBUS \(.*/dev/shm"),
        (-9, r"was ended by SIGKILL \(the system does this when memory runs out"),
        (-11, r"was ended by SIGSEGV \(.*PYTHONFAULTHANDLER"),
        (-40, "was ended by signal 40$"),
    ],
)
def test_the_end_of_a_process_in_words(code: int | None, words: str) -> None:
    assert re.search(words, describe_exit(code))


# What two builds of torch say of the same.
CPU_ALLOCATOR = [
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 26843545600 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: "
    "you tried to allocate 26843545600 bytes.",
]


@pytest.mark.parametrize("text", CPU_ALLOCATOR)
def test_out_of_memory_is_recognised_whichever_build_of_torch_says_it(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_out_of_memory_of_this_build_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "mat1 and mat2 shapes cannot be multiplied",
        "libgomp.so.1: cannot allocate memory in static TLS block",
        "a pinned tensor's memory is shared",
    ],
)
def test_other_errors_are_not_out_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_an_abort_is_of_memory_only_where_its_last_lines_say_so() -> None:
    assert is_death_of_memory(-signal.SIGABRT, BAD_ALLOC, kernel_kills=0)
    assert not is_death_of_memory(-signal.SIGABRT, "free(): invalid pointer", kernel_kills=0)
    assert is_death_of_memory(1, "libgomp: Out of memory allocating 64 bytes", kernel_kills=0)
    assert not is_death_of_memory(0, BAD_ALLOC, kernel_kills=0)


def test_a_kill_is_of_memory_only_where_the_kernel_counted_one() -> None:
    assert is_death_of_memory(-signal.SIGKILL, "", kernel_kills=1)
    assert not is_death_of_memory(-signal.SIGKILL, "", kernel_kills=0)


def test_kills_are_counted_for_the_container_before_the_machine(tmp_path: Path) -> None:
    assert num_kernel_kills(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 9\noom_kill 5\n")
    assert num_kernel_kills(tmp_path) == 5
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    events = tmp_path / "sys/fs/cgroup/memory.events"
    events.write_text("low 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert num_kernel_kills(tmp_path) == 2


def test_an_error_without_text_is_told_by_its_class() -> None:
    assert reason_of(MemoryError()) == "MemoryError"
    assert reason_of(RuntimeError("no room\nfor 3 bytes")) == "no room"
