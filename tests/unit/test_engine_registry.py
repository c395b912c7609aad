"""Every engine that a recipe can name is in the registry, and both say the same of it."""

from __future__ import annotations

import importlib
from typing import get_args

import pytest
import torch

from homeostat.config.engine import EngineConfig
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.rollout import AnyEngine
from homeostat.config.vllm import VllmEngineConfig
from homeostat.models.preview import ModelPreview
from homeostat.rollout.backend import Prospect
from homeostat.rollout.registry import ENGINES

CLASSES = get_args(get_args(AnyEngine)[0])


def prospect(engine: EngineConfig) -> Prospect:
    preview = ModelPreview(
        "llama", 97, 512, 1000, 1000, 4, 4000, decoder=None, cache=None, cache_bytes_per_token=8
    )
    return Prospect(
        engine=engine,
        model=ModelConfig(path="model"),
        preview=preview,
        device=torch.device("cpu"),
        dtype=torch.float32,
        lanes=1,
        max_tokens=100,
        running=4,
        longest=90,
    )


def test_the_registry_has_every_engine_of_the_config() -> None:
    assert {get_args(one.model_fields["type"].annotation) for one in CLASSES} == {
        (name,) for name in ENGINES
    }
    assert all(issubclass(one, EngineConfig) for one in CLASSES)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_factory_can_be_found_by_its_path(name: str) -> None:
    module, _, function = ENGINES[name].factory.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    "engine",
    [
        NativeEngineConfig(),
        NativeEngineConfig(own_process=True),
        VllmEngineConfig(type="vllm", tensor_parallel_size=2),
    ],
)
def test_config_and_capabilities_agree(engine: EngineConfig) -> None:
    backend = ENGINES[engine.type]
    found = backend.capabilities(prospect(engine))
    assert found.name == engine.type
    assert found.shares_weights == engine.shares_weights
    assert found.score_temperatures == engine.score_temperatures
    assert not (engine.shares_weights and backend.open_here is None)
    if isinstance(engine, VllmEngineConfig):
        assert found.num_receivers == engine.tensor_parallel_size
