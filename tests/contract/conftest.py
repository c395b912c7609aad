"""The engines that the contract suites are run against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract import engines
from tests.contract.engines import Backend


@pytest.fixture(params=[pytest.param(b, id=b.name, marks=b.marks) for b in engines.ENGINES])
def build(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(scope="session", autouse=True)
def close_what_was_kept() -> Iterator[None]:
    yield
    engines.OWN_PROCESS.close()
    engines.VLLM.close()
