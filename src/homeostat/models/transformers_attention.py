"""Let the attention layers of a transformers model attend through an `AttentionContext`.

    engine -> TransformersModel.hidden_in(tokens, positions, context)
           -> transformers' own layers -> `_attend` (a registered attention function)
           -> context.attend(layer, q, k, v): the engine's cache, windows and masks

So the native engine samples with any model whose layers call the registered attention functions of
transformers, packed and over its own cache. Invariant: the model computes the same as without the
engine. `cache_shape` finds this out on random tokens, and refuses what the tokens cannot show:
attention patterns other than causal ones with a window that the layers name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from homeostat.errors import ModelError
from homeostat.ops.attention import NO_LIMITS, AttentionContext, Limits

_NAME = "homeostat"
_SLOT = "attention_slot"
_KNOWN_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a model that an engine's cache and sampler need."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class ContextSlot:
    """Holds the context of the forward pass that is being computed."""

    now: AttentionContext | None = None


class AttentionSwitch:
    """Switches the layers of one model between their own attention and a context."""

    def __init__(self, causal_lm: nn.Module) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, _attend)
        self._config: Any = causal_lm.config
        self._slot = ContextSlot()
        for module in causal_lm.modules():
            if hasattr(module, "layer_idx"):
                # Past nn.Module's registry: it is no part of the model's state.
                object.__setattr__(module, _SLOT, self._slot)

    @contextmanager
    def through(self, context: AttentionContext) -> Iterator[None]:
        """Let all layers attend through the context inside the block."""
        before = self._config._attn_implementation
        self._config._attn_implementation, self._slot.now = _NAME, context
        try:
            yield
        finally:
            self._config._attn_implementation, self._slot.now = before, None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **how: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention function.

    Tensors are [1, H, N, d], the result is [1, N, H, d].
    The mask is the context's; transformers makes none for an attention function like this one.
    """
    context = getattr(module, _SLOT).now
    assert context is not None, "only `through` chooses this function"
    q_NHd, k_NHd, v_NHd = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = how.get("scaling")
    limits = Limits(how.get("sliding_window"), how.get("softcap"))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    out_NHd = context.attend(module.layer_idx, q_NHd, k_NHd, v_NHd, scale=scale, limits=limits)
    return out_NHd[None], None


@dataclass(slots=True)
class Recorder:
    """An attention context that records the arguments of each layer's call. `inner` computes it."""

    inner: AttentionContext
    layers: dict[int, tuple[int, int, int, Limits]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        self.layers[layer] = (k_NHd.shape[1], k_NHd.shape[2], v_NHd.shape[2], limits)
        if k_NHd.shape != v_NHd.shape:
            raise _refusal(f"its values are {v_NHd.shape[2]} wide and its keys {k_NHd.shape[2]}")
        return self.inner.attend(layer, q_NHd, k_NHd, v_NHd, scale=scale, limits=limits)

    def shape(self, config: Any, *, vocab_size: int) -> CacheShape:
        """Return the sizes of the cache. Raise ModelError for layers that it cannot hold."""
        num_layers = int(config.num_hidden_layers)
        if sorted(self.layers) != list(range(num_layers)):
            raise _refusal(
                f"{len(self.layers)} of its {num_layers} layers attend through the registered "
                "functions of transformers"
            )
        sizes = {found[:3] for found in self.layers.values()}
        if len(sizes) > 1:
            raise _refusal(f"its layers have keys of different sizes ({sorted(sizes)})")
        self._require_known_windows(config)
        (num_heads, head_dim, _) = next(iter(sizes))
        return CacheShape(vocab_size, num_layers, num_heads, head_dim)

    def _require_known_windows(self, config: Any) -> None:
        """A window that a layer does not name would be missed: a probe is shorter than it."""
        types = getattr(config, "layer_types", None)
        if getattr(config, "attention_chunk_size", None) is not None:
            raise _refusal("it attends in chunks (attention_chunk_size)")
        odd = sorted(set(types or ()) - set(_KNOWN_TYPES))
        if odd:
            raise _refusal(f"it has layers of type {', '.join(odd)}")
        window = getattr(config, "sliding_window", None)
        if window is None or getattr(config, "use_sliding_window", True) is False:
            return
        for layer, (*_, limits) in self.layers.items():
            is_windowed = types is None or types[layer] == "sliding_attention"
            if is_windowed and limits.window != window:
                raise _refusal(f"layer {layer} does not pass on its window of {window} tokens")


def foreseen_shape(config: Any, *, vocab_size: int) -> CacheShape | None:
    """Return the sizes of the cache by a config's own numbers; None if it has no such numbers."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    num_layers, num_heads, width = (getattr(config, name, None) for name in names)
    if not all(isinstance(size, int) and size > 0 for size in (num_layers, num_heads, width)):
        return None
    head_dim = getattr(config, "head_dim", None) or width // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return CacheShape(vocab_size, num_layers, int(num_kv_heads), int(head_dim))


def _refusal(why: str) -> ModelError:
    return ModelError(
        f"model.path: the model cannot be sampled through transformers: {why}, and the engine "
        "keeps one cache for all layers. Use engine.type=vllm, or a family of the native decoder."
    )


def refused_values() -> ModelError:
    """Return the error for a model that computes something else through a context."""
    return _refusal("through the engine's attention it computes other numbers than by itself")


def refused_sizes() -> ModelError:
    """Return the error for a model whose config names no heads."""
    return _refusal("its config.json names no layers with attention heads")
