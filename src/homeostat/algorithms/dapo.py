"""DAPO: decoupled clip and dynamic sampling (arXiv:2503.14476).

    A_i  = (r_i + overlong_i - mean(r_group)) / (std(r_group) + 1e-4)
    loss = sum_it -min(r_it * A_i, clip(r_it, 1 - low, 1 + high) * A_i) / trained tokens

with high > low, so that unlikely tokens can still become more likely. Groups whose rewards are all
equal are replaced by others (`baselines.has_signal`), and a long completion is penalised before it
is truncated (`overlong.penalty`, part of r_i here). These are only defaults; the computation is
that of GRPO.
"""

from __future__ import annotations

from homeostat.algorithms import grpo

advantages = grpo.advantages
surrogate = grpo.surrogate
