"""The paths of the dashboard's server, and who may ask.

    /                         the page            /static/...                its files
    /api/runs                 the runs            /api/runs/ID               one of them
    /api/curves               series to plot      /api/runs/ID/health        what the doctor says
    /api/differences          settings            /api/runs/ID/completions   texts that were sampled
    /api/changes              runs that have grown

On the loopback address anybody on this machine may ask, by its own name only: a page of the web
whose name leads here is refused. Elsewhere every request needs the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from homeostat.config.ranks import LOOPBACK
from homeostat.dashboard import answers
from homeostat.dashboard.samples import Wanted
from homeostat.dashboard.shelf import Shelf
from homeostat.errors import HomeostatError

STATIC = Path(__file__).parent / "static"
LOCAL_NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})
# Its name ends in a part of the token's checksum: browsers share cookies between ports.
COOKIE = "homeostat_token_"
# Seconds between looks at the runs' files, for pages that are open.
LOOK_SECONDS = 2.0
# Seconds between looks at whether the server closes.
_CLOSING_SECONDS = 0.2
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(
    shelf: Shelf,
    *,
    token: str | None = None,
    look_seconds: float = LOOK_SECONDS,
    is_closing: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Return the application. With a token, every request must have it; without, be local.

    As soon as `is_closing` says so, pages are no longer told about changes: the server waits for
    these answers to end.
    """

    def one_run(request: Request) -> dict[str, Any]:
        return answers.describe(shelf, request.path_params["id"])

    def one_judged(request: Request) -> dict[str, Any]:
        return answers.judge(shelf, request.path_params["id"])

    def some_curves(request: Request) -> dict[str, Any]:
        asked = request.query_params
        return answers.curves(
            shelf,
            asked.getlist("run"),
            asked.getlist("name"),
            first=_number(request, "first"),
            last=_number(request, "last"),
            max_points=int(_number(request, "points") or 800),
        )

    def some_completions(request: Request) -> dict[str, Any]:
        return answers.completions(shelf, request.path_params["id"], _wanted(request))

    def some_differences(request: Request) -> list[dict[str, Any]]:
        return answers.differences(shelf, request.query_params.getlist("run"))

    async def changes(request: Request) -> Response:
        stream = _changes(shelf, look_seconds, is_closing)
        return StreamingResponse(stream, media_type="text/event-stream")

    routes = [
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        Route("/api/runs", _answered(lambda request: answers.list_runs(shelf))),
        Route("/api/runs/{id}", _answered(one_run)),
        Route("/api/runs/{id}/health", _answered(one_judged)),
        Route("/api/runs/{id}/completions", _answered(some_completions)),
        Route("/api/curves", _answered(some_curves)),
        Route("/api/differences", _answered(some_differences)),
        Route("/api/changes", changes),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Gate, token=token)])


class Gate:
    """Lets those in who may ask, and adds the headers that keep a page from doing harm."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.token = token
        self.cookie = COOKIE + hashlib.sha256((token or "").encode()).hexdigest()[:8]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = dict(_HEADERS)
                if self.token and request.query_params.get("token"):
                    extra["Set-Cookie"] = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict"
                pairs = [(name.lower().encode(), text.encode()) for name, text in extra.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if self.token is None:
            host = request.headers.get("host", "").rpartition(":")
            name = host[0] if host[1] and host[2].isdigit() else request.headers.get("host", "")
            if name in LOCAL_NAMES:
                return None
            return JSONResponse({"error": "this page is for this machine only"}, status_code=403)
        given = request.query_params.get("token") or request.cookies.get(self.cookie) or ""
        if hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        message = "the token is missing or wrong: open the address that the command printed"
        return JSONResponse({"error": message}, status_code=401)


def _answered(get: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that answers with a value, or with what is wrong with the question."""

    def endpoint(request: Request) -> Response:
        try:
            return _as_json(get(request))
        except HomeostatError as error:
            return _as_json({"error": str(error)}, status_code=400)

    return endpoint


def _as_json(value: Any, *, status_code: int = 200) -> Response:
    """Answer in ASCII: names of files may hold bytes that are no UTF-8 (halves of surrogates)."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status_code=status_code, media_type="application/json")


async def _changes(
    shelf: Shelf, look_seconds: float, is_closing: Callable[[], bool]
) -> AsyncIterator[str]:
    """Name the runs that are new, gone or have grown, as they do."""
    before = await run_in_threadpool(_versions, shelf)
    yield ": open\n\n"
    while not await _closes_within(look_seconds, is_closing):
        now = await run_in_threadpool(_versions, shelf)
        changed = sorted(id for id in before.keys() | now.keys() if before.get(id) != now.get(id))
        before = now
        # A comment keeps the connection alive, and shows that nobody reads any more.
        yield f"data: {json.dumps(changed)}\n\n" if changed else ": nothing\n\n"


async def _closes_within(seconds: float, is_closing: Callable[[], bool]) -> bool:
    """Wait this long, or until the server closes. Returns whether it does."""
    end = time.monotonic() + seconds
    while not is_closing() and (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, _CLOSING_SECONDS))
    return is_closing()


def _versions(shelf: Shelf) -> dict[str, Any]:
    return {run.id: run.version() for run in shelf.runs()}


def _wanted(request: Request) -> Wanted:
    asked = request.query_params
    step = _number(request, "step")
    return Wanted(
        step=None if step is None else int(step),
        search=asked.get("search", ""),
        order=asked.get("order", "order"),
        descending=asked.get("descending", "1") != "0",
        offset=max(0, int(_number(request, "offset") or 0)),
        limit=max(1, int(_number(request, "limit") or 20)),
    )


def _number(request: Request, name: str) -> float | None:
    """Return a number of the query; None if it is not there. Raises HomeostatError."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise HomeostatError(f"{name}={text!r} is not a number.") from None
    if not abs(value) < 1e15:
        raise HomeostatError(f"{name}={text!r} is not a step or a count.")
    return value
