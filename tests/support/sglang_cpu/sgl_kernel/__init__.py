"""Stands in for SGLang's compiled kernels, which exist for GPUs alone, so that it starts on a CPU.

With it on the path SGLang computes every layer with torch. Any name can be imported; calling one
raises an error that names it, so that nothing is ever computed by a kernel that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"

_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")


def _define(schema: str, implementation: Callable[..., Any]) -> None:
    """Register an operator that SGLang calls as it starts, whatever it computes with."""
    _OPERATORS.define(schema)
    name = schema.partition("(")[0]
    _OPERATORS.impl(name, implementation, "CompositeExplicitAutograd")


_define("init_cpu_threads_env(str ids) -> str", lambda ids: "threads are left as they are")
_define("initialize(int size, int rank) -> ()", lambda size, rank: None)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel for GPUs")

    return absent
