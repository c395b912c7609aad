"""The native engine in a separate process, with its own copy of the weights.

    factory (in the worker) -> model from model.path -> OwnWeightsEngine
    begin_update -> apply(bucket) ... -> commit: every parameter was received, or nothing is served

The model is built as the trainer's is (dtype, kernel, numerics). Weights arrive under their HF
names. Either all of them arrive with the adapter merged in, and the model has no adapter; or, if
lora.publish says so, only the adapter arrives, over the same frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from homeostat.config.fp8 import Fp8Config
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import EngineError, SyncError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.models.hub_names import hub_tensors
from homeostat.models.lora import adapter_state
from homeostat.precision.bases import base_rewrite
from homeostat.rollout.engine import Request
from homeostat.rollout.lifecycle import BROKEN
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import POLICY_ID, Completion
from homeostat.workers.context import WorkerContext

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Receiver, TensorEntry, Transport

_NAMES_SHOWN = 3


def build_engine(
    context: WorkerContext,
    *,
    model: ModelConfig,
    engine: NativeEngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    seed: int,
    max_tokens: int,
    chunk_bytes: int,
    decode: Callable[[Sequence[int]], str] | None = None,
    policy_id: str = POLICY_ID,
    fp8: Fp8Config | None = None,
    adapter: LoraConfig | None = None,
) -> OwnWeightsEngine:
    """`decode` is the model's own tokenizer's, where none is given."""
    # Use the settings of the trainer's process, or sums would differ in their last bits.
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    # Its numbers are those that are sent.
    adapter = None if adapter is None else adapter.model_copy(update={"path": None})
    loaded = load_model(
        model,
        adapter,
        dtype=dtype,
        device=device,
        seed=seed,
        gradient_checkpointing=False,
        hold=base_rewrite(model),
    )
    assert isinstance(loaded.module, Decoder), "combinations asks for the native decoder"
    return OwnWeightsEngine(
        loaded.module.requires_grad_(False),
        engine,
        device=device,
        max_tokens=max_tokens,
        decode=_lazily_decoding(model) if decode is None else decode,
        chunk_bytes=chunk_bytes,
        policy_id=policy_id,
        fp8=fp8,
    )


def _lazily_decoding(model: ModelConfig) -> Callable[[Sequence[int]], str]:
    """The model's tokenizer, loaded when a stop string first asks for text."""
    tokenizer = cache(lambda: load_tokenizer(model))
    return lambda tokens: tokenizer().decode(tokens)


class OwnWeightsEngine(NativeEngine):
    """A NativeEngine with a model that no trainer shares: new weights are copied into it."""

    def __init__(self, model: Decoder, config: NativeEngineConfig, **place: Any) -> None:
        super().__init__(model, config, **place)
        self.capabilities = replace(self.capabilities, shares_weights=False, stages=True)
        # Under the names that tensors travel with: each matrix of an expert is a view.
        sent = list(adapter_state(model)) or model.causal_lm.named_parameters()
        self._parameters = {
            hub_name: view
            for name, parameter in sent
            for hub_name, view in hub_tensors(model.moe, name, parameter)
        }
        self._receiver: Receiver | None = None
        # Weights of the next update, which arrived while the engine sampled.
        self._staged: dict[str, Tensor] = {}
        self._staged_entries: list[TensorEntry] = []

    def connect(self, transport: Transport) -> None:
        self._disconnect()
        self._drop_staged()
        self._receiver = transport.receiver(0, 1)
        self.life.is_connected = True

    @torch.no_grad()
    def apply(self, bucket: Bucket) -> None:
        self.life.require_receiving()
        self._drop_staged()
        for name, tensor in self._unpacked(bucket):
            self._parameters[name].copy_(tensor)
        self.life.received += bucket.entries

    @torch.no_grad()
    def stage(self, bucket: Bucket) -> None:
        self.life.require_settled("stage")
        # Together with their entries, or not at all: a commit counts the entries.
        self._staged |= {
            name: tensor.to(self._parameters[name].device, copy=True)
            for name, tensor in self._unpacked(bucket)
        }
        self._staged_entries += bucket.entries

    def _unpacked(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        if self._receiver is None:
            raise EngineError("weights without connect(): the engine was not made ready.")
        for entry in bucket.entries:
            self._require_fit(entry)
        return self._receiver.unpack(bucket)

    def _drop_staged(self) -> None:
        self._staged.clear()
        self._staged_entries.clear()

    def _cancel_update(self) -> None:
        super()._cancel_update()
        self._drop_staged()

    def submit(self, request: Request) -> None:
        self._require_whole()
        super().submit(request)

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self._require_whole()
        return super().poll(timeout_s=timeout_s)

    def _require_whole(self) -> None:
        """Refuse to sample with the weights of an update that broke off."""
        if self.life.problem == BROKEN:
            raise EngineError(f"the {self.life.name} engine cannot sample: {BROKEN}.")

    def _before_commit(self, version: int) -> None:
        """Puts staged weights in place. Raises SyncError where an update that was begun did not
        bring every parameter once."""
        if self._staged:
            self._take_staged()
        names = [entry.name for entry in self.life.received]
        if names and sorted(names) != sorted(self._parameters):
            missing = [name for name in self._parameters if name not in names]
            odd = missing or sorted({name for name in names if names.count(name) > 1})
            what = "did not arrive" if missing else "arrived more than once"
            raise SyncError(
                f"version {version} is not whole: {len(odd)} of {len(self._parameters)} tensors "
                f"{what} ({', '.join(odd[:_NAMES_SHOWN])}). It is not served."
            )
        super()._before_commit(version)

    @torch.no_grad()
    def _take_staged(self) -> None:
        for name, tensor in self._staged.items():
            self._parameters[name].copy_(tensor)
        self.life.received += self._staged_entries
        self._drop_staged()

    def _shut_down(self) -> None:
        super()._shut_down()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _require_fit(self, entry: TensorEntry) -> None:
        own = self._parameters.get(entry.name)
        if own is None:
            raise SyncError(
                f"the engine's model has no {entry.describe()}: the weights are of another model."
            )
        if entry.shape != tuple(own.shape) or entry.dtype != own.dtype:
            raise SyncError(
                f"{entry.describe()} was sent, and the engine's is {own.dtype} "
                f"{list(own.shape)}: the weights are of another model or precision."
            )
