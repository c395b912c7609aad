"""Causal attention over documents laid end to end, without cross-talk.

    lengths -> PackedLayout (once per batch) -> packed_attention (per layer)

Kernels, which all compute the same function:
    sdpa    torch's SDPA per document; neighbours of equal length go as one batch
    varlen  one flash-attention call over all documents (CUDA, bf16 or fp16)
    rows    cuDNN where all documents of a training pass are equally long (one of them always is),
            else varlen: on Hopper it takes 0.55 to 0.7 of the time (bench/attention_kernels.py)
    eager   one dense mask and an fp32 softmax: the reference, quadratic in all tokens

`PackedLayout.by_length` gives the order of tokens in which documents of equal length are
neighbours: a model reorders its tokens once per forward, and no layer has to copy.

Suffixes: `_N` packed tokens, `_B` documents, `_H` heads (fewer for keys and values: grouped
queries), `_d` head dim.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from homeostat.errors import ModelError
from homeostat.ops import kernels
from homeostat.ops.transfer import to_device

MAX_VARLEN_HEAD_DIM = 256
MAX_ROWS_HEAD_DIM = 128
# Below this many tokens a document is not worth a plan of cuDNN's.
_MIN_ROW_LENGTH = 128


class AttentionContext(Protocol):
    """What the tokens of one forward pass see."""

    def attend(
        self, layer: int, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, *, scale: float
    ) -> Tensor:
        """[N, H, d]. Called once per layer, with the layer's rotated queries and keys."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each document lies in the packed tokens."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    max_length: int
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...] | list[int], device: torch.device) -> PackedLayout:
        lengths = tuple(int(length) for length in lengths)
        assert min(lengths, default=0) > 0, f"document lengths {lengths}"
        ends = (0, *accumulate(lengths))
        cu_seqlens = to_device(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)
        return cls(lengths, ends[:-1], max(lengths), cu_seqlens)

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1] + self.lengths[-1]

    def runs(self) -> list[tuple[int, int]]:
        """(number of neighbours, their common length), in order."""
        return [(len(list(group)), length) for length, group in groupby(self.lengths)]

    def by_length(self) -> tuple[PackedLayout, Tensor]:
        """The layout with documents sorted by length, and the token order that leads there."""
        order = sorted(range(len(self.lengths)), key=lambda document: self.lengths[document])
        device = self.cu_seqlens.device
        spans = [
            torch.arange(self.offsets[document], self.offsets[document] + self.lengths[document])
            for document in order
        ]
        layout = PackedLayout.of([self.lengths[document] for document in order], device)
        return layout, torch.cat(spans).to(device)


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """The context of training: whole documents, nothing before them."""

    layout: PackedLayout
    kernel: str

    def attend(
        self, layer: int, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, *, scale: float
    ) -> Tensor:
        return packed_attention(q_NHd, k_NHd, v_NHd, self.layout, scale=scale, kernel=self.kernel)


def packed_attention(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    kernel: str,
) -> Tensor:
    """[N, H, d]: each token attends to itself and to those before it in its document."""
    return _KERNELS[kernel](q_NHd, k_NHd, v_NHd, layout, scale)


def resolve_kernel(choice: str, *, device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """The kernel that `model.attention` comes out as here. An impossible choice is refused."""
    obstacle = _varlen_obstacle(device_type, dtype, head_dim)
    if choice == "auto" and not obstacle:
        return "rows" if _has_cudnn_rows(head_dim) else "varlen"
    if choice == "auto":
        return "sdpa"
    if choice == "varlen" and obstacle:
        raise ModelError(
            f"model.attention is varlen, which cannot run here: {obstacle}. "
            "Set model.attention=auto."
        )
    if choice not in _CHOICES:
        raise ModelError(f"model.attention is {choice!r}: known are auto, {', '.join(_CHOICES)}.")
    return choice


def _has_cudnn_rows(head_dim: int) -> bool:
    """Where it was measured to be faster."""
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return is_hopper and head_dim <= MAX_ROWS_HEAD_DIM and torch.backends.cudnn.is_available()


def _varlen_obstacle(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    if device_type != "cuda":
        return f"it needs a CUDA device, and this is {device_type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 weights (trainer.precision), and these are {dtype}"
    if head_dim % 8 or head_dim > MAX_VARLEN_HEAD_DIM:
        return f"heads of {head_dim} are not a multiple of 8 up to {MAX_VARLEN_HEAD_DIM}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no torch.nn.attention.varlen"
    return ""


def _sdpa(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    runs = layout.runs()
    sizes = [count * length for count, length in runs]
    outputs = []
    # split, not slices: the backward of a split is one concatenation, that of each slice a
    # zero-filled gradient as long as all documents.
    parts = zip(runs, q_NHd.split(sizes), k_NHd.split(sizes), v_NHd.split(sizes), strict=True)
    for (count, length), *qkv in parts:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        if needs_all_heads(q, k):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def needs_all_heads(q: Tensor, k: Tensor) -> bool:
    """On a GPU no kernel takes grouped queries in fp32, and what torch falls back to is quadratic
    in memory."""
    is_grouped = q.shape[1] != k.shape[1]
    return is_grouped and q.dtype == torch.float32 and kernels.on_cuda(q)


def _varlen(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    is_grouped = q_NHd.shape[1] != k_NHd.shape[1]
    flags = {"enable_gqa": is_grouped} if _varlen_wants_gqa_flag() else {}
    cu_seqlens, longest = layout.cu_seqlens, layout.max_length
    return varlen_attn(
        q_NHd,
        k_NHd,
        v_NHd,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        **flags,
    )


def _rows(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    count, length = len(layout.lengths), layout.max_length
    is_even = count * length == q_NHd.shape[0] and length >= _MIN_ROW_LENGTH
    # cuDNN takes a tenth of a second to plan for a new shape: training repeats shapes.
    if not is_even or not torch.is_grad_enabled():
        return _varlen(q_NHd, k_NHd, v_NHd, layout, scale)
    qkv = [x.unflatten(0, (count, length)) for x in (q_NHd, k_NHd, v_NHd)]
    if added := planned_length(length) - length:
        # Nothing before it sees what is added at the end, and it is cut off again.
        qkv = [functional.pad(x, (0, 0, 0, 0, 0, added)) for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in qkv)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)[:, :length].flatten(0, 1)


def planned_length(length: int) -> int:
    """Rounded up to one of eight lengths an octave: there are few plans, and little is added."""
    step = max(16, 1 << (length.bit_length() - 4))
    return -(-length // step) * step


@cache
def _varlen_wants_gqa_flag() -> bool:
    """torch 2.13 wants grouped queries announced; 2.11 takes them without a word."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _eager(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    queries_per_key = q_NHd.shape[1] // k_NHd.shape[1]
    k_NHd = k_NHd.repeat_interleave(queries_per_key, dim=1)
    v_NHd = v_NHd.repeat_interleave(queries_per_key, dim=1)
    lengths = torch.tensor(layout.lengths, device=q_NHd.device)
    document_N = torch.arange(len(lengths), device=q_NHd.device).repeat_interleave(lengths)
    visible_NN = (document_N[:, None] == document_N[None, :]).tril()
    scores = torch.einsum("nhd,mhd->hnm", q_NHd.float(), k_NHd.float()) * scale
    scores = scores.masked_fill(~visible_NN, float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v_NHd.float()).to(q_NHd.dtype)


_CHOICES = {"sdpa": _sdpa, "varlen": _varlen, "eager": _eager}
_KERNELS = {**_CHOICES, "rows": _rows}
