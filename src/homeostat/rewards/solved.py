"""Decide which held-out samples are solved, and compute pass@k from that.

    pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k), with c solved of n judged samples

This is the unbiased estimate of the probability that at least one of k samples is solved (Chen et
al. 2021, arXiv:2107.03374).

A sample is solved if the deciding reward gives it `eval.sampling.solved_at` or more, before reward
weights are applied. The deciding reward is the first of these that exists:

    1. the one that eval.sampling.solved_by names
    2. the built-in rewards that compare with an expected answer; if there are several, all of
       those that apply to the sample must agree
    3. the only gold reward (role: eval)
    4. the only reward of the run, whatever its type
    5. the only user-defined function, if the others are built-in rewards of format and length

A format reward never decides if there is another one: a well-formed wrong answer is wrong. If none
of these exists, pass@k is reported for each reward separately, as eval/pass@k/<name>.

A sample for which the deciding reward failed, or to which it does not apply, is not counted in n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from homeostat.config.rewards import FunctionReward, RewardsConfig
from homeostat.types import RolloutGroup, Sample


def deciding_rewards(
    rewards: RewardsConfig, *, solved_by: str | None
) -> Mapping[str, tuple[str, ...]]:
    """Return the deciding rewards by the suffix of their metric: "" for the plain eval/pass@k."""
    functions = rewards.functions
    if solved_by is not None:
        return {"": (solved_by,)}
    if verifying := tuple(reward.label for reward in functions if reward.verifies):
        return {"": verifying}
    if len(rewards.gold) == 1:
        return {"": (rewards.gold[0].label,)}
    own = [reward.label for reward in functions if isinstance(reward, FunctionReward)]
    if len(functions) == 1 or len(own) == 1:
        return {"": (own[0] if own else functions[0].label,)}
    return {f"/{reward.label}": (reward.label,) for reward in functions}


def is_solved(sample: Sample, labels: Sequence[str], *, at: float) -> bool | None:
    """Return whether the sample is solved; None if a reward failed or none of them applies."""
    given = [sample.rewards[label] for label in labels]
    known = [value for value in given if value is not None]
    if any(value < at for value in known):
        return False
    if not known or any(label in sample.failed for label in labels):
        return None
    return True


def pass_metrics(
    groups: Sequence[RolloutGroup],
    judges: Mapping[str, tuple[str, ...]],
    *,
    at: float,
    samples_per_prompt: int,
) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4 ... and all samples, over prompts with k judged samples."""
    metrics = {}
    for suffix, labels in judges.items():
        verdicts = [[is_solved(sample, labels, at=at) for sample in g.samples] for g in groups]
        judged = [[verdict for verdict in found if verdict is not None] for found in verdicts]
        for k in _ks(samples_per_prompt):
            found = [
                pass_at(k, num_samples=len(v), num_solved=sum(v)) for v in judged if len(v) >= k
            ]
            if found:
                metrics[f"eval/pass@{k}{suffix}"] = float(np.mean(found))
    return metrics


def pass_at(k: int, *, num_samples: int, num_solved: int) -> float:
    """Return the probability that one of k samples, drawn without replacement, is solved."""
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _ks(num_samples: int) -> list[int]:
    """Return the powers of two up to the number of samples, and that number."""
    powers = [2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples]
    return sorted({*powers, num_samples})
