"""Turn values into messages of a channel, and back.

Calls and answers are pickled: arguments are arrays, tensors and dataclasses of any package.
Unpacking a pickle runs code that its sender chose, so messages are unpacked only from a channel
whose other end has proved that it knows the group's key. The first message of a process, its
greeting, is plain JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import asdict, dataclass
from typing import Any

from homeostat.user_code import FILE_MODULE, module_named


def pack(value: Any) -> bytes:
    # Not with multiprocessing's pickler, because torch makes it share memory instead of copying.
    return pickle.dumps(value, protocol=5)


def unpack(message: bytes) -> Any:
    """Return the value of a message. Files of the user whose classes it needs are imported."""
    try:
        return pickle.loads(message)
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not name.startswith(FILE_MODULE) or name in sys.modules:
            raise
        module_named(name)
    return unpack(message)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a process that checks in: which part of which rank it is."""

    part: str
    rank: int
    pid: int

    def packed(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, message: bytes) -> Greeting:
        return cls(**json.loads(message))
