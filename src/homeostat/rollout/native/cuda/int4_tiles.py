"""Tiles of packed INT4 weights in registers, as int4_layout.py lays them out."""

from __future__ import annotations

import triton
import triton.language as tl


def _assembly(plane: int) -> str:
    """Convert two words of 16 bits to two bf16 numbers.

    A nibble below the bits 0x4300 is the bf16 number 128 + nibble, from which 136 is subtracted.
    """
    return f"""{{
.reg .b32 moved, less;
shr.u32 moved, $1, {4 * plane};
mov.b32 less, 0x43084308;
lop3.b32 $0, moved, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $0, $0, less;
}}"""


_PLANE_0 = tl.constexpr(_assembly(0))
_PLANE_1 = tl.constexpr(_assembly(1))
_PLANE_2 = tl.constexpr(_assembly(2))
_PLANE_3 = tl.constexpr(_assembly(3))


@triton.jit
def plane_of(words, NUMBER: tl.constexpr, HAS_ASM: tl.constexpr, dtype: tl.constexpr):
    """Return one of the four integers of each word, in the dtype of the rows."""
    if HAS_ASM:
        if NUMBER == 0:
            asm: tl.constexpr = _PLANE_0
        elif NUMBER == 1:
            asm: tl.constexpr = _PLANE_1
        elif NUMBER == 2:
            asm: tl.constexpr = _PLANE_2
        else:
            asm: tl.constexpr = _PLANE_3
        return tl.inline_asm_elementwise(
            asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return (((words >> (4 * NUMBER)) & 15).to(tl.float32) - 8.0).to(dtype)


@triton.jit
def words_at(words_ptr, tile, block, is_in, num_blocks):
    """Load the words [n * 256] of n tiles, given the address of each word."""
    at = (tile.to(tl.int64) * num_blocks + block) * 256 + tl.arange(0, tile.shape[0]) % 256
    return tl.load(words_ptr + at, mask=is_in, other=0)
