"""Held-out prompts: sampled, scored, and how many of them are solved.

    pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k), with c solved of n samples

(Chen et al. 2021, arXiv:2107.03374.)

The noise of a prompt's samples is the same at every evaluation, so that two of them differ by the
policy alone.
"""

from __future__ import annotations

import math
import time

import numpy as np

from homeostat.rewards.combine import weighted_sum
from homeostat.rollout.collect import in_groups
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.run.rl_setup import RlParts
from homeostat.types import RolloutGroup, Sample


def evaluate_prompts(parts: RlParts) -> dict[str, float]:
    """The metrics of the held-out prompts; none where there is no engine to answer them."""
    if parts.engine is None or parts.prompts.evaluation is None:
        return {}
    started = time.perf_counter()
    groups = _sampled(parts)
    rules, rewards = parts.config.eval.sampling, parts.config.rewards
    assert rewards is not None, "combinations asks for rewards"
    weights = {reward.label: reward.weight for reward in rewards.functions}
    samples = [sample for group in groups for sample in group.samples]
    sums = {id(sample): weighted_sum(sample.rewards, weights) for sample in samples}
    known = [value for value in sums.values() if value is not None]
    lengths = [len(sample.completion) for sample in samples]
    metrics = {
        "eval/reward": float(np.mean(known)) if known else math.nan,
        "eval/completions/mean_length": float(np.mean(lengths)),
        "eval/completions/clipped_ratio": _share(s.completion.stop_reason.is_cut for s in samples),
        "eval/policy_version": float(parts.engine.policy_version),
        "time/eval": time.perf_counter() - started,
    }
    for label in weights:
        values = [s.rewards[label] for s in samples if s.rewards[label] is not None]
        metrics[f"eval/rewards/{label}/mean"] = float(np.mean(values)) if values else math.nan

    def is_solved(sample: Sample) -> bool:
        value = sums[id(sample)] if rules.solved_by is None else sample.rewards[rules.solved_by]
        return value is not None and value >= rules.solved_at

    solved = [sum(map(is_solved, group.samples)) for group in groups]
    for k in _ks(rules.samples_per_prompt):
        found = [pass_at(k, num_samples=rules.samples_per_prompt, num_solved=c) for c in solved]
        metrics[f"eval/pass@{k}"] = float(np.mean(found))
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


def _sampled(parts: RlParts) -> list[RolloutGroup]:
    config, prompts, engine = parts.config, parts.prompts.evaluation, parts.engine
    assert engine is not None
    assert prompts is not None
    rules, training = config.eval.sampling, parts.collector.sampling
    assert rules.temperature is not None, "chosen at load"
    sampling = Sampling(
        max_new_tokens=rules.max_new_tokens or training.max_new_tokens,
        temperature=rules.temperature,
        top_p=rules.top_p,
        top_k=rules.top_k,
        stop_ids=training.stop_ids,
        stop_strings=training.stop_strings,
    )
    chosen = [prompts.prompts[int(index)] for index in prompts.ids]
    requests = [
        Request(
            id=f"eval/{prompt.prompt_id}/{sample}",
            tokens_T=prompt.tokens_T,
            sampling=sampling,
            seed=config.seed,
            session_key=f"eval/{prompt.prompt_id}",
        )
        for prompt in chosen
        for sample in range(rules.samples_per_prompt)
    ]
    completions = generate(engine, requests, timeout_s=config.engine.stall_s)
    groups = in_groups(completions, rules.samples_per_prompt)
    step = parts.state.step
    return parts.collector.score(chosen, groups, step=step, total_steps=parts.total_steps)[0]


def _share(flags) -> float:
    return float(np.mean([float(flag) for flag in flags]))
