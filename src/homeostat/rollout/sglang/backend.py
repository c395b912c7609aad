"""The SGLang engine as an entry of rollout/registry.py. SGLang itself is not imported here."""

from __future__ import annotations

from typing import Any

import torch

from homeostat.config.engine import EngineConfig
from homeostat.config.sglang import SglangEngineConfig
from homeostat.rollout.backend import EngineBackend, EngineSite, Foreseen, Prospect
from homeostat.rollout.engine import Capabilities
from homeostat.rollout.served import Served
from homeostat.rollout.sglang.engine import sglang_capabilities
from homeostat.rollout.sglang.options import check_options, require_installed


def factory_arguments(site: EngineSite) -> dict[str, Any]:
    # Before the checkpoint is written, which takes time and disk.
    require_installed()
    return {
        "folder": site.checkpoint(),
        "config": _own(site.engine),
        "served": Served(site.model_type, site.vocabulary, _name(site.dtype)),
        "device": site.device.type,
        "max_tokens": site.max_tokens,
        "tokenizer": site.model,
        "policy_id": site.policy_id,
    }


def capabilities(prospect: Prospect) -> Capabilities:
    device, max_tokens = prospect.device.type, prospect.max_tokens
    return sglang_capabilities(_own(prospect.engine), device=device, max_tokens=max_tokens)


def preflight(prospect: Prospect) -> Foreseen:
    require_installed()
    check_options(_own(prospect.engine).options)
    return Foreseen()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own(config: EngineConfig) -> SglangEngineConfig:
    assert isinstance(config, SglangEngineConfig), config
    return config


SGLANG = EngineBackend(
    factory="homeostat.rollout.sglang.host:build_engine",
    factory_arguments=factory_arguments,
    capabilities=capabilities,
    preflight=preflight,
)
