"""The vLLM engine as an entry of rollout/registry.py. vLLM itself is not imported here."""

from __future__ import annotations

from typing import Any

import torch

from homeostat.config.engine import EngineConfig
from homeostat.config.vllm import VllmEngineConfig
from homeostat.observe.processor import this_processor
from homeostat.rollout.backend import EngineBackend, EngineSite, Foreseen, Prospect
from homeostat.rollout.engine import Capabilities
from homeostat.rollout.served import Served
from homeostat.rollout.vllm.engine import vllm_capabilities
from homeostat.rollout.vllm.options import check_options, require_computable, require_installed


def factory_arguments(site: EngineSite) -> dict[str, Any]:
    # Before the checkpoint is written, which takes time and disk.
    require_installed()
    return {
        "folder": site.checkpoint(),
        "config": _own(site.engine),
        "served": Served(site.model_type, site.vocabulary, _name(site.dtype)),
        "max_tokens": site.max_tokens,
        "tokenizer": site.model,
        "policy_id": site.policy_id,
        "quantization": site.fp8_checkpoint,
    }


def capabilities(prospect: Prospect) -> Capabilities:
    return vllm_capabilities(_own(prospect.engine), max_tokens=prospect.max_tokens)


def preflight(prospect: Prospect) -> Foreseen:
    engine = _own(prospect.engine)
    require_installed()
    check_options(engine.options)
    if prospect.device.type == "cpu":
        dtype = engine.own_dtype or _name(prospect.dtype)
        require_computable(dtype, processor=this_processor())
    return Foreseen()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own(config: EngineConfig) -> VllmEngineConfig:
    assert isinstance(config, VllmEngineConfig), config
    return config


VLLM = EngineBackend(
    factory="homeostat.rollout.vllm.host:build_engine",
    factory_arguments=factory_arguments,
    capabilities=capabilities,
    preflight=preflight,
)
