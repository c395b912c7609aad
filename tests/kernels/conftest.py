"""Spares the interpreter of Triton work that it repeats at every call within a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

INTERPRETER = "triton.runtime.interpreter"


@pytest.fixture(scope="session", autouse=True)
def language_is_replaced_once() -> Iterator[None]:
    """Let functions that a kernel calls find the language as the kernel's launch left it.

    A launch replaces Triton's operations by those of numpy, and takes that back at its end. So does
    each call of a function within the kernel, except that it takes nothing back: from the second
    call on it changes nothing, and takes a third of the time of these tests.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip(INTERPRETER)
    replace, call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    done: set[frozenset[str]] = set()

    def replace_once(function: Callable[..., Any]) -> None:
        names = function.__globals__.values()
        seen = frozenset(lang.__name__ for lang in languages if any(lang is name for name in names))
        if seen not in done:
            done.add(seen)
            replace(function)

    def call_within(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter._patch_lang = replace_once
        try:
            return call(self, *args, **kwargs)
        finally:
            interpreter._patch_lang = replace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_within)
        yield
