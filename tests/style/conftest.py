"""The syntax trees of all sources are a million objects, and are kept while these tests run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.support.sources import nodes_of


@pytest.fixture(scope="package", autouse=True)
def syntax_trees() -> Iterator[None]:
    """Keep the garbage collector from going through them, and let them go at the end."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()
