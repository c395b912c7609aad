"""The process that tests/support/forks.py forks others from; it imports its modules once.

    root: imports the modules -> a connection: fork -> server of one test process: fork -> child

All test processes of a session (pytest-xdist has several) share a root, because its imports take
seconds; each has a separate server, so that its children are known from those of others. A server
ends with its connection, and the root with its last server.

None of them runs threads or computes, so that a fork is sound. Only the standard library is
imported for itself: a process that is to start without torch is forked from one that has none.

    python -m tests.support.fork_server LISTENER MODULE...
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import types
from typing import Any

MAX_REQUEST_BYTES = 2**17
# Descriptors of a request: output and end, then its standard input and others if it has them.
MAX_STREAMS = 8
FIRST_SECONDS = 120.0


def _accept(listener: socket.socket) -> socket.socket:
    """Fork a server for each connection. Returns in the servers alone, with theirs."""
    servers: set[int] = set()
    is_first = True
    while is_first or servers:
        # A test process that was killed before it could connect leaves a root without a purpose.
        ready = select.select([listener], [], [], FIRST_SECONDS if is_first else 1.0)[0]
        if ready:
            connection = listener.accept()[0]
            server = os.fork()
            if server == 0:
                listener.close()
                return connection
            connection.close()
            servers.add(server)
        servers = {server for server in servers if not os.waitpid(server, os.WNOHANG)[0]}
        is_first = False
    os._exit(0)


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the children alone, with their request."""
    connection.send(str(os.getpid()).encode())
    # SIGCHLD wakes the select below.
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ends: dict[int, int] = {}
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 2**10)
            _reap(ends)
        if connection in ready:
            packed, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_STREAMS)
            if not packed:
                os._exit(0)
            output, end, *more = streams
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (woken, wakes, end, *ends.values()):
                    os.close(number)
                connection.close()
                for stream in (1, 2):
                    os.dup2(output, stream)
                os.close(output)
                if more:
                    os.dup2(more[0], 0)
                    os.close(more[0])
                return {**json.loads(packed), "streams": more[1:]}
            for stream in (output, *more):
                os.close(stream)
            ends[child] = end
            connection.send(str(child).encode())


def _reap(ends: dict[int, int]) -> None:
    """Write down how children ended, as `subprocess` would say it."""
    for child in list(ends):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            end = ends.pop(child)
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(end)


def _become(request: dict[str, Any]) -> types.ModuleType:
    """Make this process that of the request. Returns its main module."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = request["argv"]
    if "path" in request:
        # A worker: it leads a session, and no line of it is lost at its end.
        sys.path[:] = request["path"]
        os.setsid()
        # Importers remember folders, and those of this one may be new.
        importlib.invalidate_caches()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    # Names of temporary files and the like are not to be those of the last child.
    random.seed()
    # Processes that this one spawns import its main module again: it is not to be this file.
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"])["STREAMS"] = request["streams"]
    return sys.modules["__main__"]


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    # The root is no descendant of the test process that needed it first.
    if os.fork():
        os._exit(0)
    os.setsid()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "transformers" in sys.argv:
        from transformers import PreTrainedTokenizerFast  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    request = _serve(_accept(listener))
    status = _run(request["code"], _become(request))
    # What Python does at its end, except for taking apart all modules: that takes half a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _run(code: str, module: types.ModuleType) -> int:
    """Return the exit status that Python would end with."""
    try:
        exec(compile(code, "<string>", "exec"), vars(module))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main()
