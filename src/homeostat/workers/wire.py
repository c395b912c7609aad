"""Turn values into messages of a channel, and back.

Calls and answers are pickled: arguments are arrays, tensors and dataclasses of any package. To
unpack a pickle runs what whoever packed it wrote, so only messages of a channel whose other end has
proved to know the group's key are unpacked. What a process says of itself first is plain JSON.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass
from typing import Any


def pack(value: Any) -> bytes:
    # Not by multiprocessing's pickler: torch has taught it to share memory instead of copying.
    return pickle.dumps(value, protocol=5)


def unpack(message: bytes) -> Any:
    return pickle.loads(message)


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
