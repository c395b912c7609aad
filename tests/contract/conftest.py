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
# How many values of a parameter every backend is tested with, the first ones of its list. They are
# for the code that samples, which all of our backends share; the plain one is tested with them all.
FIRST_FOR_ALL = {
    "temperature": 1, "cut": 1, "prefill_tokens": 1, "spread": 1, "nap": 1, "seed": 2
}  # fmt: skip
# Long tests of code that backends in this process share: the plain one and the one in its own
# process run them by day.
LONG = {
    "test_invariant_log_probs_are_the_trainers_to_the_bit",
    "test_a_prefix_that_was_found_changes_no_bit",
}
SHARES_CODE = {"native_in_blocks", "native_with_a_helper"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        backend = call.params.get("build") if call is not None else None
        if not isinstance(backend, Backend) or not backend.is_ours or backend.name == "native":
            continue
        is_long = getattr(item, "originalname", "") in LONG and backend.name in SHARES_CODE
        is_more = any(call.indices.get(name, 0) >= n for name, n in FIRST_FOR_ALL.items())
        if is_long or is_more or call.params.get("family", "qwen3") not in FAMILIES_FOR_ALL:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def close_what_was_kept() -> Iterator[None]:
    yield
    engines.OWN_PROCESS.close()
    engines.VLLM.close()
    engines.SGLANG.close()
