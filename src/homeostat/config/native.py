"""The native engine's keys."""

from __future__ import annotations

from typing import ClassVar, Literal

from homeostat.config.base import key
from homeostat.config.engine import EngineConfig


class NativeEngineConfig(EngineConfig):
    """homeostat's own engine, in the trainer's process or in a separate one.

    In the trainer's process the engine uses the trainer's weights, so publishing them needs no
    copy. With `own_process` the weights are sent to it (see section `sync`).
    """

    type: Literal["native"] = "native"
    own_process: bool = key(
        False,
        resume="warn",
        help="Run in a separate process, with its own copy of the weights. They are sent "
        "through sync.transport every sync.interval updates.",
    )
    processes: int | None = key(
        None,
        ge=1,
        le=64,
        resume="warn",
        help="Number of processes that sample in parallel on a CPU: the trainer's own process, "
        "and helper processes with a copy of its weights. Default: 1 if decoding is compiled, "
        "because its threads use all cores; 1 for small models too, because sending the weights "
        "takes longer than their steps; otherwise as many as trainer.lanes.",
    )
    prefill_tokens: int = key(
        8192, ge=1, resume="warn", help="Largest number of prompt tokens in one forward pass."
    )
    decode: Literal["auto", "graphs", "fused", "compiled", "compact", "plain"] = key(
        "auto",
        resume="warn",
        help="Decode path. graphs: several steps at a time with fused kernels in CUDA graphs. "
        "fused: the same kernels without graphs. compiled: several steps at a time on a CPU, in C "
        "code that the machine's compiler builds once. compact: with torch on a CPU, from copies "
        "of the weights in a layout that is fast to decode from. plain: the model's own forward "
        "pass, which is the reference. auto: graphs on a GPU; compiled on a CPU, or compact "
        "without a compiler; plain if none of these can run.",
    )

    needs_native_decoder: ClassVar[bool] = True
    returns_kept_ids: ClassVar[bool] = True

    @property
    def shares_weights(self) -> bool:
        return not self.own_process

    @property
    def num_helpers(self) -> int:
        return (self.processes or 1) - 1
