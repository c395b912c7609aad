"""Stands in for torchvision, which SGLang imports; its wheels need a torch that is for GPUs.

Names can be imported and have any attribute; calling one raises an error that names it.
"""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.28.0"


class Absent:
    """A name of torchvision that nothing here may use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name}: torchvision is not installed")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"torchvision.{name}")
