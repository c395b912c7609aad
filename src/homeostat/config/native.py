"""The native engine's keys."""

from __future__ import annotations

from typing import ClassVar, Literal

from homeostat.config.base import key
from homeostat.config.engine import EngineConfig


class NativeEngineConfig(EngineConfig):
    """The engine in the trainer's process: it shares its weights, so publishing costs no copy. Or,
    by `own_process`, in a process of its own, to which weights are sent (sync)."""

    type: Literal["native"] = "native"
    own_process: bool = key(
        False,
        resume="warn",
        help="Run in a process of its own, with its own copy of the weights. They are sent by "
        "sync.transport every sync.interval updates.",
    )
    processes: int | None = key(
        None,
        ge=1,
        le=64,
        resume="warn",
        help="Processes that sample at one time on a CPU: the trainer's own, and helpers with a "
        "copy of its weights. Default: 1 where decoding is compiled, whose threads use all cores; "
        "else as many as trainer.lanes, and 1 for small models, whose steps are shorter than "
        "sending weights takes.",
    )
    prefill_tokens: int = key(
        8192, ge=1, resume="warn", help="Prompt tokens computed in one forward pass, at most."
    )
    decode: Literal["auto", "graphs", "fused", "compiled", "compact", "plain"] = key(
        "auto",
        resume="warn",
        help="How tokens are decoded. graphs: several steps at a time by fused kernels in CUDA "
        "graphs. fused: the same kernels without graphs. compiled: several steps at a time on a "
        "CPU, by C code that the machine's compiler builds once. compact: by torch over copies of "
        "the weights that are laid out for it, on a CPU. plain: through the model's own forward, "
        "the reference. auto takes graphs on a GPU, and on a CPU compiled, or compact without a "
        "compiler; plain where none of them can run.",
    )

    needs_native_decoder: ClassVar[bool] = True

    @property
    def shares_weights(self) -> bool:
        return not self.own_process

    @property
    def num_helpers(self) -> int:
        return (self.processes or 1) - 1
