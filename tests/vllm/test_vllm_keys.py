"""Every key of the vLLM engine works. That each has a case is judged where all keys are:
tests/integration/test_every_key.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.engines import HAS_VLLM
from tests.support.every_key.engine_vllm import CASES, NEEDS_VLLM, VllmWorkshop

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not HAS_VLLM, reason=NEEDS_VLLM)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorkshop]:
    made = VllmWorkshop(tmp_path_factory.mktemp("every_vllm_key"))
    yield made
    made.close()


# A compiled engine, one of two ranks, and two engines take a minute to start.
AT_NIGHT = {
    f"engine.{key} (vllm)"
    for key in ("enforce_eager", "tensor_parallel_size", "data_parallel_size")
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in AT_NIGHT)) for name in CASES],
)
def test_a_key_of_vllm_does_what_it_says(workshop: VllmWorkshop, name: str) -> None:
    CASES[name](workshop)
