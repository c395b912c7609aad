"""Tests run on one thread: on small tensors more threads are slower and no more exact."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, settings

# Number of examples of every property test, in the default suite and in the nightly one. Tests do
# not set their own; the few costly ones take a share of it (tests/support/properties.py).
EXAMPLES = {"default": 15, "nightly": 300}
for _name, _count in EXAMPLES.items():
    settings.register_profile(
        _name,
        max_examples=_count,
        # A slow or busy machine is no failure, and every test has a time limit.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HOMEOSTAT_TEST_PROFILE", "default"))

# What is imported and collected stays until the end, and is a million objects, which the garbage
# collector would look at again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def denormals_as_they_were() -> Iterator[None]:
    """A run on the CPU flushes them in the whole process, which hypothesis takes amiss."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(autouse=True)
def numbers_are_drawn_anew() -> None:
    """What a test draws without a seed does not depend on the tests before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def workers_are_forked() -> Iterator[None]:
    """Fork workers from a process that has imported torch, which takes seconds in each of them.

    Those that compute rewards, of which each run of RL has one, are forked from one that has not,
    and those that prepare rows from a third.
    vLLM's are started as always: it must be imported by the process that uses it.
    """
    from tests.support.forks import forked_helpers, forked_rewards, forked_workers

    from homeostat.rollout.vllm.options import is_installed

    workers = nullcontext() if is_installed() else forked_workers()
    with workers, forked_rewards(), forked_helpers():
        yield


@pytest.fixture(scope="session", autouse=True)
def writes_are_not_forced_to_disk() -> Iterator[None]:
    """Replace fsync, which costs a run milliseconds two dozen times, by a look at the descriptor.

    It protects what was written from a power cut, which no test causes. That it is called where it
    has to be, tests/unit/test_observe_durable.py shows.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield
