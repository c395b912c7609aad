"""What of the vLLM engine's settings can be judged: without vLLM, and by vLLM's own dataclass."""

from __future__ import annotations

import pytest
from tests.contract.engines import HAS_VLLM

from homeostat.config.vllm import FIXED, OWNED, VllmEngineConfig
from homeostat.errors import EngineError
from homeostat.rollout.vllm.options import check_options, require_vllm

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make test-vllm)")


@pytest.mark.parametrize("name", sorted(OWNED))
def test_an_option_that_we_own_is_refused_with_our_key(name: str) -> None:
    with pytest.raises(ValueError, match=OWNED[name]):
        VllmEngineConfig(type="vllm", options={name: 1})


@pytest.mark.parametrize("name", sorted(FIXED))
def test_an_option_that_the_engine_rests_on_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be changed"):
        VllmEngineConfig(type="vllm", options={name: 1})


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_a_missing_vllm_is_named_with_the_command() -> None:
    with pytest.raises(EngineError, match=r"pip install 'homeostat\[vllm\]'"):
        require_vllm()
    with pytest.raises(EngineError, match="not installed"):
        check_options({"block_size": 32})
    check_options({})


@needs_vllm
@pytest.mark.vllm
def test_options_are_checked_against_the_vendors_dataclass() -> None:
    check_options({"block_size": 32, "enable_prefix_caching": False})
    with pytest.raises(EngineError, match="Did you mean 'block_size'"):
        check_options({"blok_size": 32})


@needs_vllm
@pytest.mark.vllm
def test_every_name_that_is_refused_is_one_of_vllms() -> None:
    """A rename in vLLM would leave a name here that guards nothing."""
    check_options(dict.fromkeys({**OWNED, **FIXED}, 0))
