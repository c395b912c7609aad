"""Sums of rows of 64-bit words of many tensors, in one launch (sync/checksum.py).

A program adds up one row: it finds the row by its address, so that tensors can be anywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches


def row_sums(address_R: Tensor, num_words_R: Tensor, column_C: Tensor) -> Tensor:
    """Return sum_c column[c] * mix(word[r, c]) modulo 2**64 for every row. A row has at most
    len(column) words, a power of two, and begins at a multiple of 8 bytes."""
    sums_R = torch.zeros_like(address_R)
    if launches(address_R):
        _row_sum[(len(address_R),)](
            address_R, num_words_R, column_C, sums_R, WORDS=len(column_C), num_warps=8
        )
    return sums_R


@triton.jit
def _row_sum(addresses, nums_words, columns, sums, WORDS: tl.constexpr):
    row = tl.program_id(0)
    words = tl.load(addresses + row).to(tl.pointer_type(tl.int64))
    at = tl.arange(0, WORDS)
    x = tl.load(words + at, mask=at < tl.load(nums_words + row), other=0)
    # The mask makes the shift of signed words a logical one.
    mixed = x ^ ((x >> 32) & 0xFFFFFFFF)
    tl.store(sums + row, tl.sum(mixed * tl.load(columns + at)))
