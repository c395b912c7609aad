"""The backend of one engine type: how it is checked and opened. registry.py has one entry for each.

recipe -> Prospect -> EngineBackend.preflight    (homeostat check)
run    -> EngineSite -> open_here, or a worker that calls `factory`    (homeostat train)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from homeostat.config.engine import EngineConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.models.preview import ModelPreview
from homeostat.rollout.engine import Capabilities, Engine
from homeostat.types import POLICY_ID


@dataclass(frozen=True, slots=True)
class EngineSite:
    """The facts of a run that opening its engine needs.

    `threads` is the number of threads that torch uses in a process, `lanes` the number of such
    groups of threads. `max_tokens` is the largest number of tokens in a request, prompt included.
    `checkpoint` returns a folder in HF format with a model of the policy's shape, and writes it if
    necessary. `fp8` are the FP8 settings of the engine, if it is in FP8; `fp8_checkpoint` is then
    the `quantization_config` of the weights that an engine of another framework receives.
    """

    engine: EngineConfig
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    threads: int
    lanes: int
    seed: int
    max_tokens: int
    chunk_bytes: int
    vocabulary: int
    num_params: int
    model_type: str
    checkpoint: Callable[[], Path]
    policy_id: str = POLICY_ID
    fp8: Fp8Config | None = None
    fp8_checkpoint: Mapping[str, Any] | None = None
    # The adapter, if it is sent without the base weights.
    adapter: LoraConfig | None = None


@dataclass(frozen=True, slots=True)
class Prospect:
    """The facts of a run that are known before it starts.

    `running` is the number of completions that will be sampled at one time, `longest` the number of
    tokens that the longest of them may have.
    """

    engine: EngineConfig
    model: ModelConfig
    preview: ModelPreview
    device: torch.device
    dtype: torch.dtype
    lanes: int
    max_tokens: int
    running: int
    longest: int
    fp8: Fp8Config | None = None
    # Whether layers are in INT4, from the start or from a later step on.
    is_int4: bool = False


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The line about the engine in the output of `check`: the end of a sentence, and its facts as
    data.
    """

    text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


# Opens an engine that computes with this module, whose weights are the trainer's, at this version.
OpenHere = Callable[[EngineSite, nn.Module, Callable[[Sequence[int]], str], int], Engine]


def no_helpers(site: EngineSite, own: Engine) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class EngineBackend:
    """One `engine.type`.

    `factory` is the import path of the function that a worker process calls with
    `factory_arguments` to create its engine. `open_here` is None where the engine cannot share the
    trainer's weights. `num_helpers` is the number of additional processes that sample in parallel
    with an engine opened in this process. `capabilities` and `preflight` are called before anything
    starts; `preflight` raises an error of homeostat.errors if the engine could not serve this run.
    """

    factory: str
    factory_arguments: Callable[[EngineSite], dict[str, Any]]
    capabilities: Callable[[Prospect], Capabilities]
    preflight: Callable[[Prospect], Foreseen]
    open_here: OpenHere | None = None
    num_helpers: Callable[[EngineSite, Engine], int] = no_helpers
