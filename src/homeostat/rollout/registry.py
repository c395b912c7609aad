"""The engines that a recipe can name: `engine.type` -> how it is opened.

Adding one takes a class of `config/engine.py` in `AnyEngine`, an adapter, and a line here. The
contract suites in tests/contract hold it to the protocol.
"""

from __future__ import annotations

from homeostat.rollout.backend import EngineBackend
from homeostat.rollout.native.backend import NATIVE
from homeostat.rollout.sglang.backend import SGLANG
from homeostat.rollout.vllm.backend import VLLM

ENGINES: dict[str, EngineBackend] = {"native": NATIVE, "vllm": VLLM, "sglang": SGLANG}
