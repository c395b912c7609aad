"""The base of engine configs: keys that every engine has, and facts that other settings depend on.

Whatever is asked of an engine's config is declared here with a default, so that nobody has to know
which engine it is. A new engine is one more subclass in `AnyEngine` (config/rollout.py), one
adapter and one entry of rollout/registry.py.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

from homeostat.config.base import Settings, key
from homeostat.config.plugins import Plugged

# The settings by which tokens are drawn from a part of the vocabulary, in the order of their cuts.
CUTS = ("top_k", "top_p", "min_p")


class EngineConfig(Settings):
    """Keys that all engines share."""

    # Each engine narrows it to its own name, which is its key in rollout/registry.py.
    type: Any
    max_concurrency: int = key(
        256, ge=1, resume="warn", help="Number of completions that are sampled at the same time."
    )
    memory_share: float = key(
        0.5,
        gt=0,
        le=0.95,
        resume="free",
        help="Share of the free memory that the KV cache may use.",
    )
    stall_s: float = key(
        1800.0,
        gt=0,
        resume="free",
        help="Seconds without any finished completion after which the engine counts as stuck.",
    )
    quantization: Literal["fp8", "int4"] | None = key(
        None,
        resume="warn",
        help="Precision of the engine's linear layers. fp8: weights and activations are e4m3, "
        "with the recipe and the skipped layers of trainer.fp8 (its defaults if that section is "
        "missing). int4 (native engine only): weights are INT4, in the largest group size that "
        "fits all layers, while the trainer stays in its own precision; they take a quarter of "
        "the memory of bf16. Default: the trainer's precision; with trainer.fp8 or trainer.int4 "
        "the engine uses it too, from their start_step on.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = key(
        "auto",
        resume="warn",
        help="Precision of cached keys and values. auto: that of the weights. fp8: e4m3, with a "
        "scale for each token and head in the native engine. It halves the memory and makes the "
        "log-probs of engine and trainer differ more.",
    )
    data_parallel_size: int = key(
        1,
        ge=1,
        le=1024,
        resume="warn",
        help="Number of engines that share the requests. Each is a separate process with its own "
        "copy of the weights. On GPUs each gets the next tensor_parallel_size devices. If an "
        "engine dies, the others continue its requests and it is restarted. The native engine "
        "needs own_process for this.",
    )
    sleep: bool = key(
        True,
        resume="free",
        help="Free the cache while the trainer works. false keeps it: more memory, no pause.",
    )
    start_timeout_s: float = key(
        300.0,
        gt=0,
        resume="free",
        help="Seconds within which a separate engine process must have loaded the model and "
        "answer.",
    )
    max_restarts: int = key(
        3,
        ge=0,
        resume="free",
        help="How many times a separate engine process is restarted after it dies. The new "
        "process receives the weights, and the interrupted round is sampled again from its start.",
    )

    # Whether the engine can serve only the native decoder.
    needs_native_decoder: ClassVar[bool] = False
    # Temperatures at which it can score given tokens: any, or 1 alone.
    score_temperatures: ClassVar[Literal["any", "one"]] = "any"

    # Whether it returns the sets that tokens were drawn from, for training on a cut distribution.
    returns_kept_ids: ClassVar[bool] = False
    # The cuts that it can make, and whether it can make several in our order.
    cuts: ClassVar[frozenset[str]] = frozenset(CUTS)
    combines_cuts: ClassVar[bool] = True

    @property
    def shares_weights(self) -> bool:
        """Return whether it computes with the trainer's own tensors, in the trainer's process."""
        return False

    @property
    def num_devices(self) -> int:
        """Return the number of devices over which one engine is split."""
        return 1

    @property
    def num_helpers(self) -> int:
        """Number of further processes that the recipe asks for, beside an engine that shares the
        trainer's weights."""
        return 0

    @property
    def own_dtype(self) -> str | None:
        """The dtype that it computes in, where the recipe says another than the trainer's."""
        return None


class EnginePlugin(Plugged, EngineConfig):
    """Base of your engines (homeostat.plugins.Engine)."""

    @classmethod
    def noun(cls) -> str:
        return "engine"

    @classmethod
    @abstractmethod
    def backend(cls) -> Any:
        """Return the homeostat.rollout.backend.EngineBackend that checks and opens it."""
