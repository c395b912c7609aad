"""Host the object of a worker, and send its errors to the caller. Every kind of worker uses it.

Where an exception is raised, it becomes a `Failure`, which is plain data. Where the answer is read,
it becomes an error again. An error of homeostat.errors keeps its class, its text and its
attributes; a subclass that is defined elsewhere becomes the nearest class there; any other becomes
a WorkerError.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from homeostat import errors
from homeostat.errors import HomeostatError, WorkerError
from homeostat.user_code import is_file, load_object
from homeostat.workers.context import WorkerContext

# Calls that are not of the hosted object's methods. No method can have such a name.
START = "(start)"
CLOSE = "(close)"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a call raised. `kind` is a class of homeostat.errors, or None."""

    kind: str | None
    text: str
    state: dict[str, Any]
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        trace = "".join(traceback.format_exception(error)).rstrip()
        for base in type(error).__mro__:
            if base.__module__ == errors.__name__:
                return cls(base.__name__, str(error), vars(error), trace)
        name = "".join(traceback.format_exception_only(error)).strip()
        return cls(None, name, {}, trace)

    def error(self, where: str) -> HomeostatError:
        if self.kind is None:
            return WorkerError(f"{where} raised {self.text}\n{self.traceback}")
        kind = getattr(errors, self.kind)
        # Not by its __init__, which may want more than the text. Of two builtin parents Python
        # takes the __new__ that knows of more fields, and refuses the other.
        new: Callable[..., Any] = OSError.__new__ if issubclass(kind, OSError) else kind.__new__
        error = new(kind)
        error.args = (self.text,)
        vars(error).update(self.state)
        error.add_note(f"raised by {where}:\n{self.traceback}")
        return error


def attempt(action: Callable[[], Any]) -> Any | Failure:
    """Return the result of the action, or the exception that it raised, so that the worker
    survives.
    """
    try:
        return action()
    except Exception as error:
        return Failure.of(error)


class Host:
    """Holds the worker's object: builds it, calls its methods, closes it."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._hosted: Any = None

    def run(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if method == START:
            (factory,) = args
            self._hosted = _find(factory)(self._context, **kwargs)
            return None
        if method == CLOSE:
            return self._hosted.close() if hasattr(self._hosted, "close") else None
        return getattr(self._hosted, method)(*args, **kwargs)


def _find(factory: str) -> Callable[..., Any]:
    module, colon, function = factory.partition(":")
    if not colon:
        raise WorkerError(f"The factory {factory!r} is not of the form 'package.module:function'.")
    if is_file(factory):
        return load_object(factory)
    return getattr(importlib.import_module(module), function)
