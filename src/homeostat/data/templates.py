"""Compile and render chat templates: Jinja code that came with a model.

They are rendered as in transformers. The code is not ours, so its cost is limited. Jinja's sandbox
keeps a template from accessing anything, and its `range` ends at 100,000; but it does not keep a
template from nested loops or from filling the memory. Three limits apply to one row:

    CPU time   a timer, on which Python can act only between two operations
    memory     the process may map MAX_MEMORY more bytes while it renders, so that an operation
               over gigabytes of text ends at once (MemoryError), and those that fit take a
               second at most. Linux enforces it; macOS does not.
    powers     are not allowed: a single one can take forever in little memory. Products cannot:
               making a number that is large enough costs as much time

The limits apply within the process, so rendering needs no other process and stays fast.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import jinja2

from homeostat.data.sources import BadRowError
from homeostat.errors import ModelError

MAX_CPU_S = 5.0
MAX_MEMORY = 1 << 30
REFUSES = "the chat template refuses the messages"
# Variables that a template reads but no setting may define.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
# No useful row is this long, and tokenising it would take minutes.
MAX_CHARS = 100_000_000
# Exceptions that arbitrary templates have been seen to raise.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    MemoryError,
)


class _OutOfTimeError(BaseException):
    """The time is over. No Exception: Jinja drops those that constants raise as it compiles."""


def check_template(template: Any, *, setting: str) -> None:
    """Compile the template. Raises ModelError that names the setting and the line."""
    if not isinstance(template, str):
        kind = type(template).__name__
        raise ModelError(f"{setting}: the chat template must be text, this is a {kind}.")
    try:
        power = find_power(template)
        if power is None:
            _render(template, [])
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"{setting}: the chat template is not valid Jinja: line {error.lineno}: "
            f"{error.message}."
        ) from None
    except TEMPLATE_ERRORS as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{setting}: the chat template cannot be used: {error}.") from None
    if power is not None:
        raise ModelError(
            f"{setting}: the chat template computes a power (**) in line {power}, which may take "
            "forever and is not allowed. Fix it and name the file in model.chat_template."
        )


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool,
    words: Mapping[str, Any],
) -> str:
    """Return the messages as one text. Raises BadRowError with the template's own message."""
    try:
        options = {**words, "add_generation_prompt": add_generation_prompt}
        [text] = _render(template, [messages], tools=tools, **options)
    except TEMPLATE_ERRORS as error:
        if isinstance(error, ModelError):
            raise
        shown = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadRowError(REFUSES, shown) from None
    if len(text) > MAX_CHARS:
        raise BadRowError("too long to tokenise", f"{len(text)} characters")
    return text


def _render(template: str, conversations: list[list[dict[str, Any]]], **options: Any) -> list[str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def texts() -> list[str]:
        with _cpu_limit(MAX_CPU_S), _memory_limit(MAX_MEMORY):
            return render_jinja_template(
                conversations=conversations, chat_template=template, **options
            )[0]

    try:
        try:
            return texts()
        except MemoryError:
            # The cached size of the process may have been out of date.
            _mapped_bytes.cache_clear()
            return texts()
    except MemoryError:
        raise ModelError(
            f"the chat template (model.chat_template, or that of model.path) needs more than "
            f"{MAX_MEMORY >> 20} MiB on one row. Fix it and name the file in model.chat_template."
        ) from None
    except _OutOfTimeError:
        # The row is not at fault: other rows would take as long.
        raise ModelError(
            f"the chat template (model.chat_template, or that of model.path) did not finish within "
            f"{MAX_CPU_S:.0f} s on one row. Fix its loops and name the file in "
            "model.chat_template."
        ) from None


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTimeError inside the block once it took this much CPU time.

    The timer counts the process's CPU time, not wall-clock time, and leaves SIGALRM to others.
    Signals reach only the main thread, so other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Let the process map only this much more memory inside the block, where supported.

    The limit applies to the whole process, so only the main thread sets it.
    """
    mapped = _mapped_bytes(int(time.monotonic()))
    if mapped is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + num_bytes
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@lru_cache(maxsize=1)
def _mapped_bytes(second: int) -> int | None:
    """Return the size of this process's address space; None without /proc.

    It is read at most once per second, because reading it takes as long as rendering a row.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError


def check_options(template: str, options: Mapping[str, Any], *, setting: str) -> None:
    """Refuse an option that the template never reads, because it would have no effect."""
    names = {text for _, kind, text in jinja2.Environment().lex(template) if kind == "name"}
    for name in options:
        if name in RESERVED:
            raise ModelError(f"{setting}: {name} is set by each row, so it cannot be set here.")
        if name not in names:
            raise ModelError(
                f"{setting}: the chat template never reads {name!r}, so it would have no effect. "
                "Remove it, or name the template that does in model.chat_template."
            )


def find_power(template: str) -> int | None:
    """Return the line of the first `a ** b` in a template; `f(**b)` does not count."""
    before = ""
    for line, kind, text in jinja2.Environment().lex(template):
        if kind == "operator" and text == "**" and before not in ("(", ","):
            return line
        before = before if kind == "whitespace" else text
    return None
