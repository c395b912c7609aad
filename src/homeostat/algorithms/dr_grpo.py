"""Dr. GRPO: GRPO without its two biases (arXiv:2503.20783).

    A_i  = r_i - mean(r_group)
    loss = sum_it loss_it / (completions * fixed_length)       loss_it as in GRPO

Dividing by the standard deviation favours prompts that are almost always or almost never solved;
dividing by the length makes long wrong answers cheap. The defaults `scale=none` and
`normalise=fixed` remove both; the computation is that of GRPO.
"""

from __future__ import annotations

from homeostat.algorithms import grpo

advantages = grpo.advantages
surrogate = grpo.surrogate
