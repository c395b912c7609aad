"""The factory of a worker process that holds the SGLang engine; workers/ calls it by its path.

The environment is set here, before anything imports SGLang (environment.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from homeostat.config.model import ModelConfig
from homeostat.config.sglang import SglangEngineConfig
from homeostat.rollout.served import Served
from homeostat.rollout.sglang.engine import SglangEngine
from homeostat.rollout.sglang.environment import prepare_environment
from homeostat.types import POLICY_ID

if TYPE_CHECKING:
    from homeostat.workers.context import WorkerContext


def build_engine(
    context: WorkerContext,
    *,
    folder: Path,
    config: SglangEngineConfig,
    served: Served,
    device: str,
    max_tokens: int,
    policy_id: str = POLICY_ID,
    policy_version: int = 0,
    tokenizer: ModelConfig | None = None,
) -> SglangEngine:
    """`tokenizer` says where the tokenizer is that stop strings need; None where there are none."""
    assert context.size == 1, "one process drives SGLang; the ranks are SGLang's own"
    prepare_environment(config, device=device, host=context.host)
    decode = None
    if tokenizer is not None:
        from homeostat.data.tokenizer import load_tokenizer

        decode = load_tokenizer(tokenizer).decode
    return SglangEngine(
        folder,
        config,
        served=served,
        device=device,
        max_tokens=max_tokens,
        decode=decode,
        policy_id=policy_id,
        policy_version=policy_version,
        host=context.host,
    )
