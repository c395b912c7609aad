"""The factory of a worker process that holds the vLLM engine; workers/ calls it by its path.

The environment is set here, before anything imports vLLM (environment.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homeostat.config.model import ModelConfig
from homeostat.config.vllm import VllmEngineConfig
from homeostat.rollout.served import Served
from homeostat.rollout.vllm.engine import VllmEngine
from homeostat.rollout.vllm.environment import prepare_environment
from homeostat.types import POLICY_ID

if TYPE_CHECKING:
    from homeostat.workers.context import WorkerContext


def build_engine(
    context: WorkerContext,
    *,
    folder: Path,
    config: VllmEngineConfig,
    served: Served,
    max_tokens: int,
    policy_id: str = POLICY_ID,
    policy_version: int = 0,
    tokenizer: ModelConfig | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> VllmEngine:
    """`tokenizer` says where the tokenizer is that stop strings need; None where there are none.
    `quantization`: the checkpoint's `quantization_config`, if quantised weights will be sent."""
    assert context.size == 1, "one process drives vLLM; the ranks are vLLM's own"
    prepare_environment(config, host=context.host)
    decode = None
    if tokenizer is not None:
        from homeostat.data.tokenizer import load_tokenizer

        decode = load_tokenizer(tokenizer).decode
    return VllmEngine(
        folder,
        config,
        served=served,
        max_tokens=max_tokens,
        decode=decode,
        policy_id=policy_id,
        policy_version=policy_version,
        quantization=quantization,
    )
