"""Weights laid out for the compiled step (step/): in panels, with norms multiplied in.

    [O, K] -> [panels, K, PANEL]: PANEL outputs side by side for each input, zeros at the end

A panel holds half of its outputs from gate and half from up, so that one task has both values of an
output. Adapters stay unmerged: A has separate panels, multiplied by the norm, and B has separate
panels, multiplied by the scale.

Invariants: copies are always of the current weights: they are dropped at every commit (a fused
optimizer leaves no trace of its writes), and the version counters of the decoder's tensors reveal
any other write.

Suffixes: `_P` panels, `_K` inputs, `_O` outputs (of a panel), `_F` half a head.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor, nn
from torch.nn import functional

from homeostat.models.blocks import MLP, Layer, MoeBlock
from homeostat.models.decoder import Decoder
from homeostat.models.lora import lora_modules
from homeostat.models.lora_layers import LoraLinear
from homeostat.models.norms import RMSNorm
from homeostat.models.side_by_side import joined_adapters, neighbours
from homeostat.ops.linear import Linear
from homeostat.ops.moe_shape import MoeShape

# Floats that each tensor's place is a multiple of: a cache line.
_ALIGNED = 16


class LayerStruct(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "qkv", "qkv_bias", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias",
            "q_norm", "k_norm", "router", "router_bias", "experts_gate_up", "experts_down",
            "qkv_a", "qkv_b", "o_a", "o_b", "gate_up_a", "gate_up_b", "down_a", "down_b",
        )
    ]  # fmt: skip


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "num_layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocabulary",
                "moe_layers", "experts", "top_k", "expert_inner", "shared_inner", "groups",
                "groups_kept", "is_sigmoid", "is_normalised", "rank",
            )
        ),
        ("eps", c_float),
        ("attention_factor", c_float),
        ("scaling", c_float),
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
        maps = [maps for layer in model.layers for maps in neighbours(layer)]
        most = sum(_most_floats(tensor, panel) for tensor in self._tensors)
        self._room = _Room(most + sum(_adapter_floats(one, panel) for one in maps))
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
            rank=next((linear.rank for _, linear in lora_modules(model)), 0),
            **({} if config.moe is None else _numbers(config.moe)),
        )

    def _layer(self, layer: Layer) -> LayerStruct:
        attention, block = layer.self_attn, layer.mlp
        heads = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = attention.q_norm, attention.k_norm
        norm = layer.post_attention_layernorm
        return LayerStruct(
            *self._map(*heads, norm=layer.input_layernorm),
            *self._map(attention.o_proj),
            *self._mlp(block.shared_experts if isinstance(block, MoeBlock) else block, norm=norm),
            *(None if one is None else one.weight.data_ptr() for one in norms),
            *(self._experts(block, norm=norm) if isinstance(block, MoeBlock) else (None,) * 4),
            *self._adapters(layer),
        )

    def _adapters(self, layer: Layer) -> Iterator[int | None]:
        """The addresses of A's and B's panels of all products, which read the maps' inputs."""
        norms = layer.input_layernorm, None, layer.post_attention_layernorm, None
        for maps, norm in zip(neighbours(layer), norms, strict=False):
            if not any(isinstance(linear, LoraLinear) for linear in maps):
                yield from (None, None)
                continue
            a_RK, b_OR = joined_adapters(maps)
            yield self._panels([a_RK], norm=norm)
            # As the maps' own outputs lie: gate and up share panels.
            if len(maps) == 2:
                gate_OR, up_OR = b_OR.chunk(2)
                panels = self._room.take(*self._gate_up_shape(gate_OR))
                half = self._panel // 2
                _lay(gate_OR, None, panels[..., :half])
                _lay(up_OR, None, panels[..., half:])
                yield panels.data_ptr()
            else:
                yield self._panels([b_OR], norm=None)

    def _mlp(self, mlp: MLP | None, *, norm: RMSNorm) -> tuple[int | None, ...]:
        """Gate and up, down: the addresses of panels and biases. None where there is no MLP."""
        if mlp is None:
            return (None, None, None, None)
        gate_up = (mlp.gate_proj.weight, mlp.up_proj.weight)
        panels = self._room.take(*self._gate_up_shape(gate_up[0]))
        self._lay_gate_up(*gate_up, norm, panels)
        return (
            panels.data_ptr(),
            self._gate_up_bias(mlp.gate_proj, mlp.up_proj),
            *self._map(mlp.down_proj),
        )

    def _experts(self, block: MoeBlock, *, norm: RMSNorm) -> tuple[int | None, ...]:
        """The router, its bias, and the panels of all experts, one after the other."""
        bias_E = block.gate.e_score_correction_bias
        gate_up_EJD, down_EDI = block.experts.gate_up_proj, block.experts.down_proj
        num_experts, width, _ = down_EDI.shape
        gate_up = self._room.take(num_experts, *self._gate_up_shape(down_EDI[0].t()))
        down = self._room.take(num_experts, *self._shape(width, down_EDI.shape[2]))
        for expert in range(num_experts):
            gate_ID, up_ID = gate_up_EJD[expert].chunk(2)
            self._lay_gate_up(gate_ID, up_ID, norm, gate_up[expert])
            _lay(down_EDI[expert], None, down[expert])
        return (
            self._panels([block.gate.weight], norm=norm),
            None if bias_E is None else bias_E.data_ptr(),
            gate_up.data_ptr(),
            down.data_ptr(),
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

    def _gate_up_shape(self, gate_OK: Tensor) -> tuple[int, int, int]:
        num_outputs, num_inputs = gate_OK.shape
        return -(-num_outputs // (self._panel // 2)), num_inputs, self._panel

    def _lay_gate_up(
        self, gate_OK: Tensor, up_OK: Tensor, norm: RMSNorm, panels_PKO: Tensor
    ) -> None:
        """Write panels of both: half of each panel is of the gate, half of the up projection."""
        half = self._panel // 2
        _lay(gate_OK, norm, panels_PKO[..., :half])
        _lay(up_OK, norm, panels_PKO[..., half:])

    def _gate_up_bias(self, gate: Linear, up: Linear) -> int | None:
        if gate.bias is None or up.bias is None:
            return None
        half = self._panel // 2
        num_panels, _, _ = self._gate_up_shape(gate.weight)
        bias_PO = self._room.take(num_panels, self._panel)
        for linear, part in ((gate, bias_PO[:, :half]), (up, bias_PO[:, half:])):
            part.copy_(functional.pad(linear.bias, (0, -len(linear.bias) % half)).view(-1, half))
        return bias_PO.data_ptr()

    def _shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
        return -(-num_outputs // self._panel), num_inputs, self._panel

    def _panels(self, weights: list[Tensor], *, norm: RMSNorm | None) -> int:
        """Return the address of the panels."""
        weight_OK = weights[0] if len(weights) == 1 else torch.cat(weights)
        panels_PKO = self._room.take(*self._shape(*weight_OK.shape))
        _lay(weight_OK, norm, panels_PKO)
        return panels_PKO.data_ptr()


def _adapter_floats(maps: Sequence[nn.Linear], panel: int) -> int:
    """Return the most floats that the adapters of maps take in panels, alignment included."""
    ranks = [linear.rank for linear in maps if isinstance(linear, LoraLinear)]
    if not ranks:
        return 0
    width, num_outputs = len(maps) * ranks[0], sum(linear.out_features for linear in maps)
    a = (width + panel) * maps[0].in_features
    return a + (num_outputs + 2 * panel) * width + 2 * _ALIGNED


def _numbers(moe: MoeShape) -> dict[str, float]:
    return {
        "moe_layers": len(moe.layers),
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "expert_inner": moe.expert_size,
        "shared_inner": moe.shared_size,
        "groups": moe.num_groups,
        "groups_kept": moe.num_groups_kept,
        "is_sigmoid": moe.scoring == "sigmoid",
        "is_normalised": moe.normalised,
        "scaling": moe.scaling,
    }


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
    if tensor.ndim == 3:
        return sum(_most_floats(matrix, panel) for matrix in tensor)
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
