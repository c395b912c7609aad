"""Send messages elsewhere: to a webhook, or to a command of the user's.

They are sent by one thread in their order, so that the run that is watched never waits for them.
Every attempt has a deadline, and a failure is reported once per message and never raised: a chat
service that is down must not end a watch.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from homeostat import __version__
from homeostat.errors import HomeostatError
from homeostat.observe.redact import mask_text

TIMEOUT_S = 10.0
NUM_TRIES = 3
FIRST_PAUSE_S = 1.0
COMMAND_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 45.0
# Answers of a server that may be different a moment later.
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_ANSWER = 4_096

Tell = Callable[[str], None]


class Outlet(Protocol):
    """Something that takes messages. `send` returns "" or why it failed."""

    def send(self, message: Mapping[str, Any]) -> str: ...


class Webhook:
    """POST each message as JSON to an address."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, pause_s: float = FIRST_PAUSE_S):
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise HomeostatError(
                f"the webhook {mask_text(url)!r} is no address that can be posted to: it must "
                "begin with http:// or https:// and name a host."
            )
        self._url = url
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        # A redirected POST would arrive as a GET without its content, so redirects are failures.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, message: Mapping[str, Any]) -> str:
        body = json.dumps(message).encode()
        why = ""
        for attempt in range(NUM_TRIES):
            if attempt:
                time.sleep(self._pause_s * 2 ** (attempt - 1))
            why, is_final = self._try(body)
            if not why or is_final:
                break
        # The address itself may be the secret.
        return f"the webhook was not reached: {mask_text(why)}" if why else ""

    def _try(self, body: bytes) -> tuple[str, bool]:
        """Return why it failed, and whether trying again is useless."""
        headers = {"Content-Type": "application/json", "User-Agent": f"homeostat/{__version__}"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                answer.read(_MAX_ANSWER)
        except urllib.error.HTTPError as error:
            error.close()
            return f"it answered {error.code}", error.code not in _TRY_AGAIN
        except urllib.error.URLError as error:
            return str(error.reason), False
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__, False
        return "", True


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


class UserCommand:
    """Run a shell command for each message.

    It gets the message as JSON on its standard input, and the main facts as environment variables.
    Text of a log is never part of the command line, so it cannot be executed.
    """

    def __init__(self, command: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self._command = command
        self._timeout_s = timeout_s

    def send(self, message: Mapping[str, Any]) -> str:
        finding = message["finding"]
        facts = {
            "HOMEOSTAT_EVENT": message["event"],
            "HOMEOSTAT_RUN": message["run"],
            "HOMEOSTAT_STEP": str(message["step"]),
            "HOMEOSTAT_CODE": finding["code"],
            "HOMEOSTAT_LEVEL": finding["level"],
            "HOMEOSTAT_TEXT": message["text"],
        }
        try:
            done = subprocess.run(
                self._command,
                shell=True,
                env={**os.environ, **facts},
                input=json.dumps(message),
                # Standard output belongs to the findings, or to the command that is watched.
                stdout=2,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the command of --exec did not end within {self._timeout_s:g} s"
        except OSError as error:
            return f"the command of --exec could not be started: {error.strerror or error}"
        code = done.returncode
        return f"the command of --exec ended with exit code {code}" if code else ""


class Sender:
    """Give messages to all outlets from a separate thread. `tell` is called with failures."""

    def __init__(self, outlets: list[Outlet], *, tell: Tell) -> None:
        self._outlets = outlets
        self._tell = tell
        self._waiting: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        if not self._outlets:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._waiting.put(message)

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits; after the deadline the rest is given up."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._tell(f"messages were not sent within {timeout_s:g} s and are given up")

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            for outlet in self._outlets:
                why = outlet.send(message)
                if why:
                    self._tell(why)
