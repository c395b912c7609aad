"""Record what a worker is doing, in memory that its guardian can read while the worker hangs.

    worker     record.call.begin("accumulate")     record.collective.begin("all_gather layers.3")
    guardian   record.read()                       -> an Activity, for a report on a hang

The memory is shared through a fork, so it can be read when the worker is stopped, busy in C code or
dead. Beginning an entry takes about a microsecond. All ranks of a program begin the same
collectives in the same order, so the numbers of their last collectives show which rank is behind.
Standard library only: a worker imports this before its factory.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Number, bytes, begin in seconds since the epoch, whether it is over, name.
_ENTRY = struct.Struct("<QQd?95s")
_NAME_BYTES = 95


@dataclass(frozen=True, slots=True)
class Doing:
    """A call or a collective that a worker began, and `seconds` ago. Numbers count from 1."""

    name: str
    number: int
    num_bytes: int
    seconds: float
    is_over: bool


@dataclass(frozen=True, slots=True)
class Activity:
    """The last call and the last collective of a worker; None where there was none yet."""

    call: Doing | None = None
    collective: Doing | None = None


class Entry:
    """The last operation of one kind that a worker began. Written by one thread at a time."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset
        self._number = 0

    def begin(self, name: str, *, num_bytes: int = 0) -> None:
        """Record that an operation began. The one before is over, or continues on the device."""
        self._number += 1
        text = name.encode()[:_NAME_BYTES]
        entry = (self._number, num_bytes, time.time(), False, text)
        _ENTRY.pack_into(self._memory, self._offset, *entry)

    def end(self) -> None:
        number, num_bytes, began, _, name = _ENTRY.unpack_from(self._memory, self._offset)
        _ENTRY.pack_into(self._memory, self._offset, number, num_bytes, began, True, name)

    @contextmanager
    def lasting(self, name: str, *, num_bytes: int = 0) -> Iterator[None]:
        """Record the block as an operation. If it raises, it is not marked as over, because the
        worker left it by an error.
        """
        self.begin(name, num_bytes=num_bytes)
        yield
        self.end()

    def read(self) -> Doing | None:
        number, num_bytes, began, is_over, name = _ENTRY.unpack_from(self._memory, self._offset)
        if not number:
            return None
        text = name.rstrip(b"\0").decode("utf-8", "replace")
        return Doing(text, number, num_bytes, max(0.0, time.time() - began), is_over)


class ActivityRecord:
    """Holds the entries of one worker, in anonymous memory that a fork shares."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, 2 * _ENTRY.size + 1)
        self.call = Entry(memory, 0)
        self.collective = Entry(memory, _ENTRY.size)
        self._memory = memory

    @property
    def prints_stacks(self) -> bool:
        """Return whether the worker prints the stacks of its threads when it gets the signal."""
        return bool(self._memory[-1])

    def say_that_it_prints_stacks(self) -> None:
        self._memory[len(self._memory) - 1] = 1

    def read(self) -> Activity:
        return Activity(self.call.read(), self.collective.read())
