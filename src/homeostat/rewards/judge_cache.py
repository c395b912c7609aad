"""The answers of a judge, kept in a file of JSON lines so that a resumed run asks nothing twice.

A line is written as soon as its answer is there, and a torn line does not count: a kill loses at
most the answers of the calls that were under way. One process writes. Stdlib only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from homeostat.errors import RewardError
from homeostat.json_text import parse_json


def key_of(url: str, question: Mapping[str, Any]) -> str:
    """Return the key of a question: all that enters the answer, except the API key."""
    return hashlib.sha256(json.dumps([url, question], sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """Answers by key; in memory alone if there is no file."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._answers = {} if file is None else _read(file)
        self._out = None if file is None else _open(file)
        self._lock = Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> str:
        return self._answers[key]

    def add(self, key: str, answer: str) -> None:
        """Keep an answer, in any thread. Raises RewardError where it cannot be written."""
        line = json.dumps({"key": key, "answer": answer}) + "\n"
        with self._lock:
            self._answers[key] = answer
            if self._out is not None:
                self._safely(lambda out: out.write(line.encode("ascii")))

    def sync(self) -> None:
        """Let what was added survive a power cut. Raises RewardError."""
        self._safely(lambda out: os.fsync(out.fileno()))

    def _safely(self, act: Any) -> None:
        if self._out is None:
            return
        try:
            act(self._out)
        except OSError as error:
            what = f"{self.file}: the judge's answers cannot be kept: {error.strerror}"
            raise RewardError(what) from error


def _open(file: Path) -> BinaryIO:
    file.parent.mkdir(parents=True, exist_ok=True)
    out = open(file, "a+b", buffering=0)  # noqa: SIM115 (closed with the process)
    if out.seek(0, os.SEEK_END):
        out.seek(-1, os.SEEK_END)
        # Half a line, left by a kill, must not swallow the next one.
        if out.read(1) != b"\n":
            out.write(b"\n")
    return out


def _read(file: Path) -> dict[str, str]:
    found = {}
    with contextlib.suppress(FileNotFoundError), open(file, "rb") as source:
        for line in source:
            # A torn line does not count: its question is asked again.
            with contextlib.suppress(ValueError, LookupError, TypeError):
                record = parse_json(line)
                key, answer = record["key"], record["answer"]
                if isinstance(key, str) and isinstance(answer, str):
                    found[key] = answer
    return found
