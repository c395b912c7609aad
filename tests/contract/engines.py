"""The engines that the contract is held to, and what the tests of it share.

A backend is called with a model and builds an engine that serves it. Backends that share the
trainer's weights build a new one each time; so does the native one in its own process, where one
process serves them all. vLLM and SGLang take seconds to load, so that their engines are kept, one
per architecture and width, and are given the model's weights by a transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, random_model, save
from tests.support.own_process import OwnProcess

from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineDiedError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.models.lora import merged_state
from homeostat.models.transformers_model import TransformersModel
from homeostat.ops.attention import PackedLayout
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.engine import Engine, Quiesce, Request, Sampling, generate
from homeostat.rollout.mirror import MirrorEngine
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.rollout.sglang import options as sglang_options
from homeostat.rollout.vllm import options as vllm_options
from homeostat.sync.bucket import Bucket
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.types import Completion

CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 16
MAX_TOKENS = 160
VOCABULARY = 97
# Heads of 32: vLLM has no smaller ones on a CPU.
SIZES = {"hidden_size": 128, "vocab_size": VOCABULARY}
HEADS = {"qwen3": {"head_dim": 32}}
# Less than a layer, so that the parts of one layer come in several buckets.
BUCKET_BYTES = 1 << 14


def decode(tokens: Sequence[int]) -> str:
    return "".join(f"{token:02d}" for token in tokens)


@dataclass(frozen=True)
class Model:
    """The same weights twice, and the folder that both came from."""

    theirs: torch.nn.Module
    ours: Decoder | TransformersModel
    family: str
    folder: Path


def load(family: str, seed: int = 0) -> Model:
    theirs = random_model({**FAMILIES[family], **SIZES, **HEADS.get(family, {})}, seed=seed)
    folder = save(theirs, Path(mkdtemp(dir=_folders().name)))
    loaded = load_model(
        ModelConfig(path=str(folder)),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    )
    assert isinstance(loaded.module, Decoder)
    return Model(theirs, loaded.module, family, folder)


@cache
def _folders() -> TemporaryDirectory[str]:
    """Gone with the process: engines may be loaded from them at any time."""
    return TemporaryDirectory(prefix="engine-contract-")


@cache
def shared_model(family: str = "qwen3") -> Model:
    """For tests that leave the weights alone."""
    return load(family)


def publish(engine: Engine, model: Model) -> None:
    """Between begin_update and commit: the model's weights as they are now."""
    if not engine.capabilities.shares_weights:
        _send(engine.apply, model)


def stage(engine: Engine, model: Model) -> None:
    """The model's weights as they are now, for the next update."""
    _send(engine.stage, model)


def _send(take: Callable[[Bucket], None], model: Model) -> None:
    transport = SharedMemoryTransport("homeostat-contract", BUCKET_BYTES)
    packer = transport.packer()
    try:
        for bucket in packer.pack(merged_state(model.ours)):
            take(bucket)
    finally:
        packer.close()


@dataclass(frozen=True)
class Backend:
    """`is_ours`: it is our engine, new at each call, with the settings it is given, and shares
    whole prompts. `has_invariant`: it runs our decoder in invariant numerics."""

    name: str
    make: Callable[..., Engine]
    is_ours: bool = True
    has_invariant: bool = True
    marks: tuple[Any, ...] = field(default=())

    def __call__(self, model: Model, **changes: Any) -> Engine:
        return self.make(model, **changes)

    def require_ours(self, why: str) -> None:
        if not self.is_ours:
            pytest.skip(f"{self.name}: {why}")

    def require_invariant(self) -> None:
        if not self.is_ours or not self.has_invariant:
            pytest.skip(f"{self.name}: invariant numerics are our decoder's")


def native(model: Model, **changes: Any) -> Engine:
    keys = NativeEngineConfig.model_fields
    config = {name: changes.pop(name) for name in list(changes) if name in keys}
    place = {"device": CPU, "max_tokens": MAX_TOKENS, "chunk_bytes": CHUNK_BYTES, "decode": decode}
    return NativeEngine(model.ours, NativeEngineConfig(**config), **{**place, **changes})


def through_transformers(model: Model, **changes: Any) -> Engine:
    """The native engine over layers of transformers, which share the weights of `model.ours`."""
    twin = random_model({**FAMILIES[model.family], **SIZES, **HEADS.get(model.family, {})})
    own = dict(model.ours.named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.data = own[name].data
    return native(replace(model, ours=TransformersModel(twin)), **changes)


def native_in_blocks(model: Model, **changes: Any) -> Engine:
    return native(model, in_rows=False, **changes)


def native_in_its_own_process(
    model: Model, *, policy_version: int = 0, **changes: Any
) -> RemoteEngine:
    """New each time, in one and the same process; its weights are sent to it."""
    kwargs = {
        "model": ModelConfig(path=str(model.folder), numerics=model.ours.numerics),
        "engine": NativeEngineConfig(own_process=True, **changes),
        "device": CPU,
        "dtype": torch.float32,
        "threads": 1,
        "seed": 0,
        "max_tokens": MAX_TOKENS,
        "chunk_bytes": CHUNK_BYTES,
        "decode": decode,
    }
    engine = OWN_PROCESS.engine(kwargs, vocabulary=VOCABULARY)
    engine.connect(SharedMemoryTransport("homeostat-contract", BUCKET_BYTES))
    engine.begin_update(Quiesce.DRAIN)
    publish(engine, model)
    engine.commit(policy_version)
    return engine


def native_with_a_helper(model: Model, **changes: Any) -> Engine:
    """Half of the requests in another process, to which weights are sent at every commit."""
    version = {name: changes[name] for name in ("policy_version",) if name in changes}
    helper_changes = {name: value for name, value in changes.items() if name not in version}
    helper = native_in_its_own_process(model, **helper_changes)

    def send_weights(helper: RemoteEngine, version: int, how: Quiesce) -> None:
        helper.begin_update(how)
        publish(helper, model)
        helper.commit(version)

    own = native(model, **changes)
    mirror = MirrorEngine(helper, version=own.policy_version, send_weights=send_weights)
    return Router([own, mirror], on_loss=_no_loss)


def router(model: Model, *, num_engines: int, **changes: Any) -> Engine:
    """Several engines in this process, over the same weights."""
    return Router([native(model, **changes) for _ in range(num_engines)], on_loss=_no_loss)


def _no_loss(engine: Engine, error: EngineDiedError) -> None:
    raise error


class KeptEngines(ABC):
    """Engines of a vendor that are open. A narrow one samples 3 at a time, and computes one long
    prompt in a pass; a wide one 64."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bool], Engine] = {}

    def __call__(
        self,
        model: Model,
        *,
        max_concurrency: int | None = None,
        prefill_tokens: int | None = None,
        policy_version: int | None = None,
    ) -> Engine:
        is_narrow = max_concurrency is not None or prefill_tokens is not None
        # One that closes takes down what all of a process share.
        if any(engine.health() == "it is closed" for engine in self._open.values()):
            self.close()
        engine = self._open.get((model.family, is_narrow))
        if engine is None:
            engine = self._open[model.family, is_narrow] = self._load(model, is_narrow)
        self._settle(engine, model)
        return engine

    def close(self) -> None:
        for engine in self._open.values():
            engine.close()
        self._open.clear()

    @abstractmethod
    def _load(self, model: Model, is_narrow: bool) -> Engine: ...

    def _settle(self, engine: Any, model: Model) -> None:
        """As new: nothing in flight, awake, and with the model's weights."""
        engine.wake()
        engine.abort()
        engine.begin_update("abort")
        publish(engine, model)
        engine.commit(engine.policy_version)
        engine.poll(timeout_s=0)


class VllmEngines(KeptEngines):
    def _load(self, model: Model, is_narrow: bool) -> Engine:
        from homeostat.config.vllm import VllmEngineConfig
        from homeostat.rollout.vllm.engine import Served, VllmEngine
        from homeostat.rollout.vllm.environment import prepare_environment

        config = VllmEngineConfig(
            type="vllm",
            enforce_eager=True,
            max_concurrency=3 if is_narrow else 64,
            max_batched_tokens=MAX_TOKENS + 1 if is_narrow else None,
        )
        prepare_environment(config)
        engine = VllmEngine(
            model.folder,
            config,
            served=Served(model.theirs.config.model_type, VOCABULARY, "float32"),
            max_tokens=MAX_TOKENS,
            decode=decode,
        )
        engine.connect(SharedMemoryTransport("homeostat-contract", BUCKET_BYTES))
        return engine


class SglangEngines(KeptEngines):
    def _load(self, model: Model, is_narrow: bool) -> Engine:
        from homeostat.config.sglang import SglangEngineConfig
        from homeostat.rollout.served import Served
        from homeostat.rollout.sglang.engine import SglangEngine
        from homeostat.rollout.sglang.environment import prepare_environment

        config = SglangEngineConfig(
            type="sglang",
            enforce_eager=True,
            max_concurrency=3 if is_narrow else 64,
            max_batched_tokens=MAX_TOKENS if is_narrow else None,
        )
        prepare_environment(config, device="cpu")
        engine = SglangEngine(
            model.folder,
            config,
            served=Served(model.theirs.config.model_type, VOCABULARY, "float32"),
            device="cpu",
            max_tokens=MAX_TOKENS,
            decode=decode,
        )
        engine.connect(SharedMemoryTransport("homeostat-contract", BUCKET_BYTES))
        return engine


OWN_PROCESS = OwnProcess()
VLLM = VllmEngines()
SGLANG = SglangEngines()
HAS_VLLM = vllm_options.is_installed()
HAS_SGLANG = sglang_options.is_installed()
ENGINES = (
    Backend("native", native),
    Backend("native_in_blocks", native_in_blocks),
    Backend(
        "through_transformers",
        through_transformers,
        has_invariant=False,
        marks=(pytest.mark.slow,),
    ),
    Backend("native_in_its_own_process", native_in_its_own_process),
    Backend("native_with_a_helper", native_with_a_helper),
    Backend("router_of_1", partial(router, num_engines=1), marks=(pytest.mark.slow,)),
    Backend("router_of_2", partial(router, num_engines=2), marks=(pytest.mark.slow,)),
    # By day the one with a helper is a router over two engines.
    Backend("router_of_3", partial(router, num_engines=3), marks=(pytest.mark.slow,)),
    Backend(
        "vllm",
        VLLM,
        is_ours=False,
        marks=(
            pytest.mark.vllm,
            pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make test-vllm)"),
        ),
    ),
    Backend(
        "sglang",
        SGLANG,
        is_ours=False,
        marks=(
            pytest.mark.sglang,
            pytest.mark.skipif(not HAS_SGLANG, reason="no SGLang here (make test-sglang)"),
        ),
    ),
)


def prompts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length) for length in lengths]


def requests(
    tokens: Sequence[np.ndarray], sampling: Sampling, *, samples: int = 1, seed: int = 0
) -> list[Request]:
    return [
        Request(f"{p}/{s}", tokens_T, sampling, seed=seed, session_key=f"group {p}")
        for p, tokens_T in enumerate(tokens)
        for s in range(samples)
    ]


def run(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    return generate(engine, wanted, timeout_s=60)


def finish(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    """What was submitted before, in order."""
    found: dict[str, Completion] = {}
    while len(found) < len(wanted):
        found |= {completion.request_id: completion for completion in engine.poll(timeout_s=60)}
    return [found[request.id] for request in wanted]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens_T.tolist() for completion in completions]


def trainer_logp(
    model: Model, prompt_T: np.ndarray, answer_T: np.ndarray, temperature: float
) -> np.ndarray:
    """As the trainer computes it: one packed forward over prompt and answer."""
    tokens_N = torch.from_numpy(np.concatenate([prompt_T, answer_T]))
    layout = PackedLayout.of([len(tokens_N)], CPU)
    with torch.no_grad():
        hidden_ND = model.ours.hidden(tokens_N, torch.arange(len(tokens_N)), layout)
        logp = token_logprobs(
            hidden_ND[len(prompt_T) - 1 : -1],
            model.ours.output_weight(),
            tokens_N[len(prompt_T) :],
            temperature=temperature,
            chunk_bytes=CHUNK_BYTES,
            numerics=model.ours.numerics,
        )
    return logp.numpy()


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 2e-5 * (1 + np.abs(wanted).max())


def change(model: Model) -> None:
    """Other weights, at the same addresses."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.ours.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
