"""Keep the process-wide settings of a run apart from those of the code that called it.

A run sets the number of threads, the rounding of denormal numbers and environment variables, and
other frameworks may use the global random generators. For the caller all of these are restored
after the run and between its steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class _Settings:
    threads: int
    flushes_denormals: bool
    dtype: torch.dtype
    grad_enabled: bool
    environment: dict[str, str]
    torch_rng: torch.Tensor
    numpy_rng: Any
    python_rng: Any

    @classmethod
    def now(cls) -> _Settings:
        return cls(
            threads=torch.get_num_threads(),
            flushes_denormals=_flushes_denormals(),
            dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            environment=dict(os.environ),
            torch_rng=torch.get_rng_state(),
            numpy_rng=np.random.get_state(),
            python_rng=random.getstate(),
        )

    def apply(self) -> None:
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(self.flushes_denormals)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.grad_enabled)
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        torch.set_rng_state(self.torch_rng)
        np.random.set_state(self.numpy_rng)
        random.setstate(self.python_rng)


def _flushes_denormals() -> bool:
    """Return whether products below the smallest normal number are rounded to 0. torch has no
    function for this.
    """
    return bool((torch.full((1,), 1e-310, dtype=torch.float64) * 1.0).item() == 0.0)


class Surroundings:
    """Holds the settings of the side that is not running: the caller's, or the run's."""

    def __init__(self) -> None:
        self._other = _Settings.now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the caller its settings back for the duration of the block."""
        self._switch()
        try:
            yield
        finally:
            self._switch()

    def restore(self) -> None:
        """Give the caller its settings back for good."""
        self._other.apply()

    def _switch(self) -> None:
        now = _Settings.now()
        self._other.apply()
        self._other = now


@contextmanager
def as_before() -> Iterator[None]:
    """Restore all settings at the end of the block."""
    surroundings = Surroundings()
    try:
        yield
    finally:
        surroundings.restore()
