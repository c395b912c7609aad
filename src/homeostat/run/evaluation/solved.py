"""Which reward says that a held-out prompt is solved, and how many were: pass@k.

    pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k), with c solved of n judged samples

(Chen et al. 2021, arXiv:2107.03374.) It is the unbiased estimate of the chance that one of k
samples is solved.

A sample is solved where the deciding reward gives it `eval.sampling.solved_at` or more, before any
weight. The deciding reward is, in this order:

    1. the one that eval.sampling.solved_by names
    2. the built-in rewards that compare with an expected answer; where there are several, all of
       those that apply to the sample must agree
    3. the only reward of a run, whatever its type
    4. the only function of the user beside built-in rewards of format and length

A format reward never decides beside another one: a well-formed wrong answer is wrong. Where these
leave the choice open, no reward is taken for the judge, and pass@k is reported for each of them as
eval/pass@k/<name>.

A sample that the deciding reward failed on, or does not apply to, is not among the n.
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
    """The rewards that decide, by what their pass@k is called after: "" for the plain pass@k."""
    functions = rewards.functions
    if solved_by is not None:
        return {"": (solved_by,)}
    if verifying := tuple(reward.label for reward in functions if reward.verifies):
        return {"": verifying}
    own = [reward.label for reward in functions if isinstance(reward, FunctionReward)]
    if len(functions) == 1 or len(own) == 1:
        return {"": (own[0] if own else functions[0].label,)}
    return {f"/{reward.label}": (reward.label,) for reward in functions}


def is_solved(sample: Sample, labels: Sequence[str], *, at: float) -> bool | None:
    """None where it is not known (a reward failed), or where none of them applies."""
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
    """pass@k for k = 1, 2, 4 ... and all samples, over the prompts with k judged samples."""
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
    """The chance that one of k samples, drawn from these without replacement, is solved."""
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _ks(num_samples: int) -> list[int]:
    """1, 2, 4 ... and all of them."""
    powers = [2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples]
    return sorted({*powers, num_samples})
