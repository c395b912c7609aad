"""A judge on the loopback interface that misbehaves in the order that a test gives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What a request is answered with, in place of the judge's text.
Act = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class JudgeServer:
    """`acts` are used up first, one per request; then `answer` says what the judge writes."""

    url: str = ""
    answer: Callable[[dict[str, Any]], str] = lambda body: "Score: 7"
    acts: list[Act] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def status(code: int, text: str = "no", **headers: str) -> Act:
    def act(handler: BaseHTTPRequestHandler) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        _send(handler, code, text.encode(), named)

    return act


def garbage(handler: BaseHTTPRequestHandler) -> None:
    _send(handler, 200, b"<html>a proxy's page</html>")


def truncated(handler: BaseHTTPRequestHandler) -> None:
    """Announce the whole reply and break off in the middle of its JSON."""
    body = reply("Score: 9")
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])


def slow(seconds: float) -> Act:
    """Send a byte now and then, so that no single read takes long."""

    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)

    return act


def endless(*, start: bytes, again: bytes) -> Act:
    """Begin a reply, and continue with the same bytes now and then until the caller gives up."""

    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while True:
            handler.wfile.write(again)
            time.sleep(0.02)

    return act


def reply(text: str) -> bytes:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]}).encode()


@contextmanager
def judge_server(**settings: Any) -> Iterator[JudgeServer]:
    """Serve until the block ends."""
    judge = JudgeServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with judge.lock:
                judge.bodies.append(body | {"path": self.path})
                judge.headers.append(dict(self.headers))
                judge.running += 1
                judge.most_running = max(judge.most_running, judge.running)
                act = judge.acts.pop(0) if judge.acts else None
            try:
                text = None if act is not None else reply(judge.answer(body))
            finally:
                # Before the answer is sent: the caller may ask again as soon as it has it.
                with judge.lock:
                    judge.running -= 1
            try:
                if act is not None:
                    act(self)
                else:
                    _send(self, 200, text)
            except ConnectionError:
                pass  # the caller has given up

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _send(
    handler: BaseHTTPRequestHandler,
    code: int,
    body: bytes,
    headers: dict[str, str] | None = None,
) -> None:
    handler.send_response(code)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
