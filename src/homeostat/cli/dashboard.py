"""`homeostat dashboard`: a local web page over runs, with curves, findings and completions."""

from __future__ import annotations

import secrets
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from homeostat.config.ranks import LOOPBACK
from homeostat.errors import DataError, EngineError, MissingDependencyError
from homeostat.observe.safe_text import safe_text

NEEDED = ("starlette", "uvicorn")


def dashboard(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS...",
            help="Run folders, folders of runs, or logs, of any framework.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port. 0: any free port.")
    ] = 8642,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on. If it can be reached from other machines, visitors need a "
            "token; the printed address contains it.",
        ),
    ] = LOOPBACK,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs side by side on a local web page: health, curves, completions and settings.

    The page is updated while runs are training. It sends nothing to other machines and changes no
    file.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            error = MissingDependencyError.of(
                name, extra="dashboard", needed_for="homeostat dashboard"
            )
            raise error
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder.")
    import uvicorn

    from homeostat.dashboard.app import make_app
    from homeostat.dashboard.shelf import Shelf

    token = None if host in (LOOPBACK, "localhost") else secrets.token_urlsafe(24)
    listener = _listener(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    typer.echo(f"showing {safe_text(', '.join(map(str, paths)))} on {address}", err=True)
    if open_:
        typer.launch(address)
    # Open pages keep a connection each, which must end before the server does.
    app = make_app(Shelf(paths), token=token, is_closing=lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    server = uvicorn.Server(config)
    server.run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    """Bind the port now, so that a port in use is reported before anything is shown."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # A browser that asks before the server has started waits, and is not refused.
        listener.listen()
    except OSError as error:
        listener.close()
        raise EngineError(
            f"--host {host} --port {port}: {error.strerror or error}. Take another port, or 0 for "
            "any that is free."
        ) from None
    return listener
