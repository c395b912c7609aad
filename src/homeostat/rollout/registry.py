"""The engines that a recipe can name: a table from `engine.type` to its backend.

To add an engine, write its settings (a class in `config/engine.py`, listed in `AnyEngine`) and an
adapter, and add a line here. The contract suites in tests/contract check that it follows the
protocol.
"""

from __future__ import annotations

from homeostat.config.engine import EngineConfig, EnginePlugin
from homeostat.rollout.backend import EngineBackend
from homeostat.rollout.native.backend import NATIVE
from homeostat.rollout.sglang.backend import SGLANG
from homeostat.rollout.vllm.backend import VLLM

ENGINES: dict[str, EngineBackend] = {"native": NATIVE, "vllm": VLLM, "sglang": SGLANG}


def backend_of(config: EngineConfig) -> EngineBackend:
    """Return the backend of the engine that a recipe names: a built-in one, or a plug-in's."""
    return config.backend() if isinstance(config, EnginePlugin) else ENGINES[config.type]
