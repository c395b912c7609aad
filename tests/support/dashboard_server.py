"""The dashboard in a thread of this process, on a free port of the loopback address."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from homeostat.dashboard.app import make_app
from homeostat.dashboard.shelf import Shelf


@contextmanager
def served(paths: Sequence[Path], *, look_seconds: float = 0.3) -> Iterator[str]:
    """Serve these runs; yields the address."""
    import uvicorn

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = make_app(Shelf(paths), look_seconds=look_seconds)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
