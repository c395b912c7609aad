"""Weights laid out for the compiled step (step/): in panels, with norms multiplied in.

    [O, K] -> [panels, K, PANEL]: PANEL outputs side by side for each input, zeros at the end

Gate and up share panels, half of each, so that one task has both of an output.

Invariants: copies are always of the current weights: they are dropped at every commit (a fused
optimizer leaves no trace of its writes), and the version counters of the decoder's tensors reveal
any other write.

Suffixes: `_P` panels, `_K` inputs, `_O` outputs (of a panel), `_F` half a head.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.models.decoder import Decoder, Layer, RMSNorm
from homeostat.ops.linear import Linear

# Floats that each tensor's place is a multiple of: a cache line.
_ALIGNED = 16


class LayerStruct(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "qkv", "qkv_bias", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias",
            "q_norm", "k_norm",
        )
    ]  # fmt: skip


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "num_layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocabulary",
            )
        ),
        ("eps", c_float),
        ("attention_factor", c_float),
        ("embedding", c_void_p),
        ("head", c_void_p),
        ("frequencies", c_void_p),
        ("layers", ctypes.POINTER(LayerStruct)),
    ]  # fmt: skip


class PackedWeights:
    """Copies of the weights that `model` has now, and the structure that leads to them."""

    def __init__(self, model: Decoder, *, panel: int) -> None:
        self.model = model
        self._panel = panel
        self._tensors = list(model.parameters())
        self._versions = self._now()
        self._room = _Room(sum(_most_floats(tensor, panel) for tensor in self._tensors))
        self.struct = self._struct()

    def is_of(self, model: Decoder) -> bool:
        """Return whether the model is the one it was made of, with unchanged weights."""
        return model is self.model and self._now() == self._versions

    def _now(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor._version) for tensor in self._tensors]

    def _struct(self) -> ModelStruct:
        model, config = self.model, self.model.config
        layers = [self._layer(layer) for layer in model.layers]
        self._frequencies_F = model.inv_freq_F.cpu().contiguous()
        return ModelStruct(
            num_layers=config.num_layers,
            width=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            attention_factor=config.rope.attention_factor,
            embedding=model.model.embed_tokens.weight.data_ptr(),
            head=self._panels([model.output_weight()], norm=model.model.norm),
            frequencies=self._frequencies_F.data_ptr(),
            layers=(LayerStruct * config.num_layers)(*layers),
        )

    def _layer(self, layer: Layer) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        heads = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = attention.q_norm, attention.k_norm
        return LayerStruct(
            *self._map(*heads, norm=layer.input_layernorm),
            *self._map(attention.o_proj),
            *self._gate_up(mlp.gate_proj, mlp.up_proj, norm=layer.post_attention_layernorm),
            *self._map(mlp.down_proj),
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        )

    def _map(self, *maps: Linear, norm: RMSNorm | None = None) -> tuple[int, int | None]:
        """Join linear maps of one input; return the addresses of its panels and its bias."""
        panels = self._panels([linear.weight for linear in maps], norm=norm)
        biases: list[Tensor] = [linear.bias for linear in maps if linear.bias is not None]
        if not biases:
            return panels, None
        size = -(-sum(map(len, biases)) // self._panel) * self._panel
        bias_O = self._room.take(size)
        torch.cat(biases, out=bias_O[: sum(map(len, biases))])
        return panels, bias_O.data_ptr()

    def _gate_up(self, gate: Linear, up: Linear, *, norm: RMSNorm) -> tuple[int, int | None]:
        """Return panels of both: half of each panel is of the gate, half of the up projection."""
        half = self._panel // 2
        num_outputs, num_inputs = gate.weight.shape
        num_panels = -(-num_outputs // half)
        panels_PKO = self._room.take(num_panels, num_inputs, self._panel)
        for linear, part in ((gate, panels_PKO[..., :half]), (up, panels_PKO[..., half:])):
            _lay(linear.weight, norm, part)
        if gate.bias is None or up.bias is None:
            return panels_PKO.data_ptr(), None
        bias_PO = self._room.take(num_panels, self._panel)
        for linear, part in ((gate, bias_PO[:, :half]), (up, bias_PO[:, half:])):
            part.copy_(functional.pad(linear.bias, (0, -num_outputs % half)).view(-1, half))
        return panels_PKO.data_ptr(), bias_PO.data_ptr()

    def _panels(self, weights: list[Tensor], *, norm: RMSNorm | None) -> int:
        """Return the address of the panels."""
        weight_OK = weights[0] if len(weights) == 1 else torch.cat(weights)
        num_outputs, num_inputs = weight_OK.shape
        panels_PKO = self._room.take(-(-num_outputs // self._panel), num_inputs, self._panel)
        _lay(weight_OK, norm, panels_PKO)
        return panels_PKO.data_ptr()


def _lay(weight_OK: Tensor, norm: RMSNorm | None, panels_PKO: Tensor) -> None:
    """Write a map into panels that are zero, with the norm before it."""
    size, num_outputs = panels_PKO.shape[2], weight_OK.shape[0]
    whole = num_outputs // size
    to_POK = panels_PKO.transpose(1, 2)
    from_POK = weight_OK[: whole * size].unflatten(0, (whole, size))
    if norm is None:
        to_POK[:whole].copy_(from_POK)
        to_POK[whole:, : num_outputs % size].copy_(weight_OK[whole * size :])
    else:
        torch.mul(from_POK, norm.weight, out=to_POK[:whole])
        to_POK[whole:, : num_outputs % size] = weight_OK[whole * size :] * norm.weight


def _most_floats(tensor: Tensor, panel: int) -> int:
    """Return the most floats that a parameter can take in panels, alignment included."""
    rows = tensor.shape[0] + 2 * panel
    return rows * (tensor.shape[1] if tensor.ndim == 2 else 1) + _ALIGNED


class _Room:
    """Memory for all panels, zero at first, in pages as large as the system has them: with small
    ones a product of few rows waits for the page tables."""

    def __init__(self, num_floats: int) -> None:
        size = num_floats * 4
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"{size} bytes for a copy of the weights: {error}") from None
            memory.madvise(mmap.MADV_HUGEPAGE)
            self._floats = torch.frombuffer(memory, dtype=torch.float32)
        else:
            self._floats = torch.zeros(num_floats)
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        start, size = self._used, math.prod(shape)
        self._used += -(-size // _ALIGNED) * _ALIGNED
        assert self._used <= len(self._floats), (shape, self._used, len(self._floats))
        return self._floats[start : start + size].view(shape)
