"""Tests run on one thread: on small tensors more threads are slower and no more exact."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A machine that does other work too is slow, not wrong; every test has a time limit besides.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def denormals_as_they_were() -> Iterator[None]:
    """A run on the CPU flushes them in the whole process, which hypothesis takes amiss."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
