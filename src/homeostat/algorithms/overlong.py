"""The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), scaled by `penalty`.

0                                         length <= max_new_tokens - buffer_tokens
-(length - start) / buffer * penalty      in the buffer that starts there
-penalty                                  from max_new_tokens on
"""

from __future__ import annotations


def penalty(length: int, *, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return what is added to the reward of a completion of this length: from -penalty to 0."""
    into_buffer = length - (max_new_tokens - buffer_tokens)
    return -penalty * min(1.0, max(0.0, into_buffer / buffer_tokens))
