"""Where the processes of a group check in: one listening socket, two lines for each rank.

The socket lies in a folder that only this user can enter, and a caller must know a random key.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from homeostat.errors import WorkerDiedError, WorkerError
from homeostat.observe.exits import describe_exit
from homeostat.workers.child import GUARDIAN, WORKER, exit_code_of_worker
from homeostat.workers.link import Line, RankLink
from homeostat.workers.log import WorkerLog

GREETING_SECONDS = 5
LOOK_ROUND_SECONDS = 0.1


class Reception:
    """Open while a group starts. Lines that it took and did not hand out are closed with it."""

    def __init__(self, folder: Path, *, size: int, log: WorkerLog) -> None:
        self.address = str(folder / "socket")
        self.authkey = secrets.token_bytes(32)
        self._size = size
        self._log = log
        self._lines: dict[tuple[str, int], Line] = {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(LOOK_ROUND_SECONDS)
        try:
            self._server.bind(self.address)
        except OSError as error:
            raise WorkerError(
                f"{log.group_name}: no socket can be made at {self.address}: {error}. "
                "Set TMPDIR to a short path on a local disk."
            ) from error
        self._server.listen(2 * size)

    def links(
        self, launchers: Sequence[subprocess.Popen[bytes]], *, timeout_s: float
    ) -> list[RankLink]:
        """Wait until every rank has checked in, worker and guardian."""
        end = time.monotonic() + timeout_s
        while absent := self._absent():
            self._look_after(launchers, absent[0])
            if time.monotonic() > end:
                raise WorkerError(
                    f"{self._log.group_name}: rank {', '.join(map(str, absent))} did not start "
                    f"within {timeout_s:.4g} s." + self._log.last_words(absent[0])
                )
            self._accept()
        lines, self._lines = self._lines, {}
        return [
            RankLink(
                rank,
                worker=lines[WORKER, rank],
                guardian=lines[GUARDIAN, rank],
                log=self._log,
            )
            for rank in range(self._size)
        ]

    def close(self) -> None:
        self._server.close()
        for line in self._lines.values():
            line.connection.close()

    def _absent(self) -> list[int]:
        both = (WORKER, GUARDIAN)
        return [r for r in range(self._size) if any((p, r) not in self._lines for p in both)]

    def _look_after(self, launchers: Sequence[subprocess.Popen[bytes]], absent: int) -> None:
        for rank, process in enumerate(launchers):
            code = process.poll()
            if code is not None:
                is_own = len(launchers) == self._size
                who = f"the process of rank {rank}" if is_own else "the launcher"
                how = describe_exit(exit_code_of_worker(code) if is_own else code)
                raise WorkerDiedError(
                    f"{self._log.group_name}: {who} {how} before rank {absent} had started."
                    + self._log.last_words(rank if is_own else absent)
                )

    def _accept(self) -> None:
        try:
            caller, _ = self._server.accept()
        except TimeoutError:
            return
        with caller:
            line = Connection(os.dup(caller.fileno()))
            try:
                _limit_reads(caller, GREETING_SECONDS)
                deliver_challenge(line, self.authkey)
                answer_challenge(line, self.authkey)
                part, rank, pid = pickle.loads(line.recv_bytes())
                _limit_reads(caller, 0)
            except (AuthenticationError, EOFError, OSError):
                # It died while it spoke, which is noticed elsewhere, or is none of ours.
                line.close()
                return
        self._lines[part, rank] = Line(line, pid)


def _limit_reads(line: socket.socket, seconds: int) -> None:
    """Reads of a blocking socket fail after so long; 0 is for ever."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
