"""Ask an OpenAI-compatible endpoint: time limits, retries with growing waits, and what they cost.

Repeated are time-outs, broken connections, replies that are no chat completion, and the statuses
408, 429 and 5xx. Another status says that the same question would fail again. Stdlib only.
"""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from homeostat.errors import REMOVED, RewardError
from homeostat.json_text import parse_json
from homeostat.rewards.http_json import Reply, post_json
from homeostat.rewards.problems import shorten

MAX_BACKOFF_S = 60.0
_RETRIED = (408, 429)


class _TryAgainError(RewardError):
    """A reply that another attempt may improve, after `wait_s` seconds if the server says so."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(slots=True)
class Counts:
    """The cost of a request."""

    calls: int = 0
    cached: int = 0
    retries: int = 0
    failed: int = 0
    seconds: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def add(self, *, calls: int = 0, retries: int = 0, seconds: float = 0.0) -> None:
        """Count, in any thread."""
        with self.lock:
            self.calls += calls
            self.retries += retries
            self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a judge, and how patiently it is asked."""

    url: str
    api_key: str | None
    call_timeout_s: float
    total_timeout_s: float
    max_retries: int
    backoff_s: float

    def ask(self, body: Mapping[str, Any], counts: Counts) -> str:
        """Return the text of the model's answer. Raises RewardError or TimeoutError."""
        deadline = time.monotonic() + self.total_timeout_s
        attempt = 0
        while True:
            try:
                return self._ask_once(body, counts, deadline)
            except _TryAgainError as error:
                wait_s = self._wait_s(attempt, error.wait_s)
                if attempt == self.max_retries:
                    raise RewardError(f"{error} (after {attempt + 1} attempts)") from error
                if time.monotonic() + wait_s >= deadline:
                    raise TimeoutError(
                        f"{error}, and total_timeout_s = {self.total_timeout_s:g} s leaves no time "
                        "for another attempt"
                    ) from error
                time.sleep(wait_s)
                attempt += 1
                counts.add(retries=1)

    def _ask_once(self, body: Mapping[str, Any], counts: Counts, deadline: float) -> str:
        started = time.monotonic()
        limit_s = min(self.call_timeout_s, deadline - started)
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        try:
            reply = post_json(self.url, body, headers=headers, timeout_s=max(limit_s, 0.001))
            return _answer_in(self._without_key(reply), self.url)
        except OSError as error:
            raise _TryAgainError(f"{self.url}: {error}") from error
        finally:
            counts.add(calls=1, seconds=time.monotonic() - started)

    def _without_key(self, reply: Reply) -> Reply:
        """Servers quote what they were sent, and some of them also the key."""
        if self.api_key is None:
            return reply
        return replace(reply, body=reply.body.replace(self.api_key.encode(), REMOVED.encode()))

    def _wait_s(self, attempt: int, asked_s: float | None) -> float:
        """Return how long to wait before the next attempt; the jitter keeps callers apart."""
        if asked_s is not None:
            return asked_s
        longest = min(MAX_BACKOFF_S, self.backoff_s * 2.0**attempt)
        return longest * random.uniform(0.5, 1.0)


def _answer_in(reply: Reply, url: str) -> str:
    """Return the text in a reply. Raises what says whether another attempt makes sense."""
    shown = shorten(reply.body.decode("utf-8", "replace").strip(), 200)
    shown_status = f"{url}: status {reply.status}: {shown}"
    if reply.status in _RETRIED or reply.status >= 500:
        raise _TryAgainError(shown_status, _seconds(reply.retry_after))
    if reply.status != 200:
        raise RewardError(shown_status)
    try:
        text = parse_json(reply.body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        # A proxy's page, or half of a reply: the next one may be whole.
        raise _TryAgainError(f"{url}: the reply is no chat completion: {shown}") from error
    if not isinstance(text, str):
        raise RewardError(f"{url}: the reply has no text: {shown}")
    return text


def _seconds(retry_after: str | None) -> float | None:
    """Return the wait that a Retry-After header asks for, in seconds or as a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        then = email.utils.parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return None
    then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
    return max(0.0, (then - datetime.now(UTC)).total_seconds())
