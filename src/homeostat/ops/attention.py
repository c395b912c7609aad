"""Causal attention over packed documents that do not attend to each other.

    lengths -> PackedLayout (once per batch) -> packed_attention (per layer)

Kernels, which all compute the same function:
    sdpa    torch's SDPA per document; neighbours of equal length go as one batch
    varlen  one flash-attention call over all documents (CUDA, bf16 or fp16)
    rows    cuDNN if all documents of a training pass are equally long (always true of a single
            one), else varlen: on Hopper it takes 0.55 to 0.7 of the time
            (bench/attention_kernels.py)
    eager   one dense mask and an fp32 softmax: the reference, quadratic in all tokens

A layer may limit what a token sees to a window, and its scores by a soft cap (`Limits`). No flash
kernel computes soft caps, so `resolve_kernel` chooses sdpa for models that have them, and
ops/capped_attention.py computes them document by document.

`PackedLayout.by_length` gives an order of tokens in which documents of equal length are neighbours:
a model reorders its tokens once per forward pass, and no layer has to copy.

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
from homeostat.ops.capped_attention import capped_attention, soft_capped
from homeostat.ops.transfer import to_device

MAX_VARLEN_HEAD_DIM = 256
MAX_ROWS_HEAD_DIM = 128
# Below this many tokens a document is not worth a cuDNN plan.
_MIN_ROW_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a layer's attention besides causality.

    With a `window` a token sees itself and the `window - 1` tokens before it. With a `soft_cap`
    scores become cap * tanh(score / cap).
    """

    window: int | None = None
    soft_cap: float | None = None

    def window_in(self, length: int) -> int | None:
        """Return the window if it hides anything in a document of this length."""
        return self.window if self.window is not None and self.window < length else None


NO_LIMITS = Limits()


class AttentionContext(Protocol):
    """Defines which tokens the tokens of one forward pass attend to."""

    def attend(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        /,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        """Return [N, H, d]. Called once per layer with its rotated queries and keys."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The position of each document in the packed tokens."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    max_length: int
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...] | list[int], device: torch.device) -> PackedLayout:
        lengths = tuple(int(length) for length in lengths)
        assert min(lengths, default=0) > 0, f"document lengths {lengths}"
        # Computed on the host, so that nothing waits for the device.
        ends = (0, *accumulate(lengths))
        cu_seqlens = to_device(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)
        return cls(lengths, ends[:-1], max(lengths), cu_seqlens)

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1] + self.lengths[-1]

    def runs(self) -> list[tuple[int, int]]:
        """Return (number of neighbours, their common length), in order."""
        return [(len(list(group)), length) for length, group in groupby(self.lengths)]

    def by_length(self) -> tuple[PackedLayout, Tensor]:
        """Return the layout with documents sorted by length, and the token order that gives it."""
        # sorted() is stable, so equal batches always give the same order and the same bits.
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
    """The attention context of training: whole documents without a cache."""

    layout: PackedLayout
    kernel: str

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
        how = {"scale": scale, "kernel": self.kernel, "limits": limits}
        return packed_attention(q_NHd, k_NHd, v_NHd, self.layout, **how)


def packed_attention(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    kernel: str,
    limits: Limits = NO_LIMITS,
) -> Tensor:
    """Return [N, H, d]: each token attends to itself and the tokens before it in its document."""
    return _KERNELS[kernel](q_NHd, k_NHd, v_NHd, layout, scale, limits)


def resolve_kernel(
    choice: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    has_soft_cap: bool = False,
) -> str:
    """Return the kernel that `model.attention` means here. Refuse an impossible choice."""
    obstacle = _varlen_obstacle(device_type, dtype, head_dim)
    if has_soft_cap and not obstacle:
        obstacle = "the model's attention scores have a soft cap, which it does not compute"
    if choice == "auto" and not obstacle:
        # "rows" falls back to varlen by itself for documents of different lengths.
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
    """Return whether cuDNN was measured to be faster on this device."""
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
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    layout: PackedLayout,
    scale: float,
    limits: Limits,
) -> Tensor:
    runs = layout.runs()
    sizes = [count * length for count, length in runs]
    outputs = []
    # Use split, not slices: the backward of split is one concatenation, that of each slice a
    # zero-filled gradient as long as all documents.
    parts = zip(runs, q_NHd.split(sizes), k_NHd.split(sizes), v_NHd.split(sizes), strict=True)
    for (count, length), *qkv in parts:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        out = _equal_documents(q, k, v, scale, limits)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _equal_documents(q: Tensor, k: Tensor, v: Tensor, scale: float, limits: Limits) -> Tensor:
    """Return [B, H, T, d] of documents of one length."""
    length = q.shape[2]
    window = limits.window_in(length)
    if limits.soft_cap is not None:
        sees = visible(length, window, q.device)
        return capped_attention(q, k, v, sees=sees, scale=scale, soft_cap=limits.soft_cap)
    if needs_all_heads(q, k):
        # Repeating heads costs memory linear in the tokens; torch's fallback would be
        # quadratic.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    how = (
        {"is_causal": True} if window is None else {"attn_mask": visible(length, window, q.device)}
    )
    is_grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, **how, scale=scale, enable_gqa=is_grouped
    )


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [T, T]: True where the token of a row sees that of a column."""
    sees_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return sees_TT if window is None else sees_TT.triu_(1 - window)


def needs_all_heads(q: Tensor, k: Tensor) -> bool:
    """Return whether key and value heads must be repeated for grouped queries.

    On a GPU no kernel supports grouped queries in fp32, and torch's fallback needs quadratic
    memory.
    """
    is_grouped = q.shape[1] != k.shape[1]
    return is_grouped and q.dtype == torch.float32 and kernels.on_cuda(q)


def _varlen(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    layout: PackedLayout,
    scale: float,
    limits: Limits,
) -> Tensor:
    assert limits.soft_cap is None, "resolve_kernel chooses another kernel"
    from torch.nn.attention.varlen import varlen_attn

    is_grouped = q_NHd.shape[1] != k_NHd.shape[1]
    flags = {"enable_gqa": is_grouped} if _varlen_wants_gqa_flag() else {}
    cu_seqlens, longest = layout.cu_seqlens, layout.max_length
    window = limits.window_in(longest)
    return varlen_attn(
        q_NHd,
        k_NHd,
        v_NHd,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **flags,
    )


def _rows(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    layout: PackedLayout,
    scale: float,
    limits: Limits,
) -> Tensor:
    count, length = len(layout.lengths), layout.max_length
    is_even = count * length == q_NHd.shape[0] and length >= _MIN_ROW_LENGTH
    is_windowed = limits.window_in(length) is not None
    # cuDNN takes a tenth of a second to plan a new shape, which only pays if shapes repeat.
    if not is_even or is_windowed or not torch.is_grad_enabled():
        return _varlen(q_NHd, k_NHd, v_NHd, layout, scale, limits)
    qkv = [x.unflatten(0, (count, length)) for x in (q_NHd, k_NHd, v_NHd)]
    if added := planned_length(length) - length:
        # Attention is causal, so padding at the end affects nothing before it; it is cut off again.
        qkv = [functional.pad(x, (0, 0, 0, 0, 0, added)) for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in qkv)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)[:, :length].flatten(0, 1)


def planned_length(length: int) -> int:
    """Round a length up to one of eight per octave, so that few cuDNN plans are needed."""
    step = max(16, 1 << (length.bit_length() - 4))
    return -(-length // step) * step


@cache
def _varlen_wants_gqa_flag() -> bool:
    """Return whether varlen needs a flag for grouped queries: torch 2.13 does, 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _eager(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    layout: PackedLayout,
    scale: float,
    limits: Limits,
) -> Tensor:
    queries_per_key = q_NHd.shape[1] // k_NHd.shape[1]
    k_NHd = k_NHd.repeat_interleave(queries_per_key, dim=1)
    v_NHd = v_NHd.repeat_interleave(queries_per_key, dim=1)
    lengths = torch.tensor(layout.lengths, device=q_NHd.device)
    document_N = torch.arange(len(lengths), device=q_NHd.device).repeat_interleave(lengths)
    visible_NN = (document_N[:, None] == document_N[None, :]).tril()
    if limits.window is not None:
        # Tokens of a document are neighbours, so distances in the pack are distances in it.
        visible_NN = visible_NN.triu(1 - limits.window)
    # fp32 throughout: this is the reference for the other kernels.
    scores = torch.einsum("nhd,mhd->hnm", q_NHd.float(), k_NHd.float()) * scale
    if limits.soft_cap is not None:
        scores = soft_capped(scores, limits.soft_cap)
    scores = scores.masked_fill(~visible_NN, float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v_NHd.float()).to(q_NHd.dtype)


_CHOICES = {"sdpa": _sdpa, "varlen": _varlen, "eager": _eager}
_KERNELS = {**_CHOICES, "rows": _rows}
