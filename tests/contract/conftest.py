"""The engines that the contract suites are run against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract import engines
from tests.contract.engines import Backend


@pytest.fixture(params=[pytest.param(b, id=b.name, marks=b.marks) for b in engines.ENGINES])
def build(request: pytest.FixtureRequest) -> Backend:
    return request.param


# Families differ in the model, not in the engine: every backend serves these two, the plain one
# serves all of them, and the rest of the pairs run at night.
FAMILIES_FOR_ALL = ("llama_tied", "qwen3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        backend, family = values.get("build"), values.get("family")
        if isinstance(backend, Backend) and family is not None and backend.is_ours:
            if backend.name != "native" and family not in FAMILIES_FOR_ALL:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def close_what_was_kept() -> Iterator[None]:
    yield
    engines.OWN_PROCESS.close()
    engines.VLLM.close()
