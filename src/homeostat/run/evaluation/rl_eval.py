"""Evaluates the policy on held-out prompts: samples, scores, and counts the solved ones.

`eval/reward` is the mean over the samples on which no reward failed, and `eval/reward_coverage`
their share. `eval/gold_reward` is the same mean for rewards that are not trained on (role: eval). A
mean over some of the samples is not comparable with one over all: if long wrong answers exceed the
time limit, the worse policy has the better mean. Therefore an evaluation with less coverage than
eval.sampling.min_coverage is reported but never becomes the best one.

The noise of a prompt's samples is the same at every evaluation, so two evaluations differ only by
the policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from homeostat.config.rewards import AnyReward, RewardsConfig
from homeostat.rewards.combine import weighted_sum
from homeostat.rewards.solved import deciding_rewards, pass_metrics
from homeostat.rollout.ahead import Batch
from homeostat.rollout.collect import sample_and_score, training_sampling
from homeostat.rollout.engine import Sampling
from homeostat.rollout.sampler import Draw
from homeostat.rollout.scorer import Logged
from homeostat.run.wiring.rl_setup import RlParts
from homeostat.types import RolloutGroup, Sample


def evaluate_prompts(parts: RlParts) -> dict[str, float]:
    """Return the metrics of the held-out prompts; none if there is no engine to answer them."""
    if parts.engine is None or parts.prompts.evaluation is None:
        return {}
    started, version = time.perf_counter(), parts.engine.policy_version
    scored = _sampled(parts)
    return {
        **_eval_metrics(parts, scored),
        "eval/policy_version": float(version),
        "time/eval": time.perf_counter() - started,
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation in the background: the weights of one version answer held-out prompts.

    The engine keeps those weights until they are answered (rollout/background.py).
    """

    parts: RlParts
    batch: Batch
    version: int

    @classmethod
    def begin(cls, parts: RlParts) -> Evaluation:
        """Submit the held-out prompts to the engine, and return at once."""
        assert parts.sampler is not None, "an evaluation needs an engine"
        rules, draws = parts.config.eval.sampling, _draws(parts)
        requests = parts.sampler.requests(
            draws, sampling=_sampling(parts), num_samples=rules.samples_per_prompt
        )
        batch = Batch(
            draws,
            requests,
            background=parts.ahead.background,
            scorer=parts.scorer,
            step=parts.state.step,
            evaluates=True,
        )
        return cls(parts, batch, parts.sampler.policy_version)

    def metrics(self) -> dict[str, float]:
        """Wait for the answers and their rewards. time/eval is the time of this wait."""
        started = time.perf_counter()
        scored = [one.result() for one in self.batch.sampled()]
        return {
            **_eval_metrics(self.parts, scored),
            "eval/policy_version": float(self.version),
            "time/eval": time.perf_counter() - started,
        }


def _eval_metrics(
    parts: RlParts, scored: Sequence[tuple[RolloutGroup, Logged]]
) -> dict[str, float]:
    groups = [group for group, _ in scored]
    rules, rewards = parts.config.eval.sampling, parts.config.reward_functions
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.completion.num_policy_tokens for sample in samples]
    return {
        **reward_metrics(samples, rewards),
        **_judge_costs(logged for _, logged in scored),
        "eval/completions/mean_length": float(np.mean(lengths)),
        "eval/completions/clipped_ratio": _share(s.completion.stop_reason.is_cut for s in samples),
        **pass_metrics(
            groups,
            deciding_rewards(rewards, solved_by=rules.solved_by),
            at=rules.solved_at,
            samples_per_prompt=rules.samples_per_prompt,
        ),
    }


def reward_metrics(samples: list[Sample], rewards: RewardsConfig) -> dict[str, float]:
    """Means over the samples that have a value, and how many have none because a reward failed."""
    total, coverage = _summed(samples, rewards.trained)
    metrics = {"eval/reward": total, "eval/reward_coverage": coverage}
    if rewards.gold:
        total, coverage = _summed(samples, rewards.gold)
        metrics |= {"eval/gold_reward": total, "eval/gold_coverage": coverage}
    for label in (reward.label for reward in rewards.functions):
        metrics[f"eval/rewards/{label}/mean"] = _mean(s.rewards[label] for s in samples)
        metrics[f"eval/rewards/{label}/failed"] = float(sum(label in s.failed for s in samples))
    return metrics


def _summed(samples: list[Sample], rewards: Sequence[AnyReward]) -> tuple[float, float]:
    """Return the mean of the weighted sums, and the share of samples on which no reward failed."""
    weights = {reward.label: reward.weight for reward in rewards}
    counts = {label for label, weight in weights.items() if weight != 0}
    sums = [
        weighted_sum(
            {label: sample.rewards[label] for label in weights},
            weights,
            failed=sample.failed & set(weights),
        )
        for sample in samples
    ]
    return _mean(sums), _share(not sample.failed & counts for sample in samples)


def _judge_costs(logged: Iterable[Logged]) -> dict[str, float]:
    costs: dict[str, float] = {}
    for of_group in logged:
        for name, values in of_group.items():
            if name.startswith("judge/"):
                costs[f"eval/{name}"] = costs.get(f"eval/{name}", 0.0) + sum(values)
    return costs


def _sampled(parts: RlParts) -> list[tuple[RolloutGroup, Logged]]:
    config = parts.config
    assert parts.sampler is not None, "an evaluation needs an engine"
    pending = sample_and_score(
        _draws(parts),
        sampler=parts.sampler,
        scorer=parts.scorer,
        sampling=_sampling(parts),
        num_samples=config.eval.sampling.samples_per_prompt,
        step=parts.state.step,
        evaluates=True,
    )
    return [one.result() for one in pending]


def _draws(parts: RlParts) -> list[Draw]:
    prompts = parts.prompts.evaluation
    assert prompts is not None, "an evaluation needs prompts"
    chosen = [prompts.rows[int(index)] for index in prompts.ids]
    return [Draw(f"eval/{prompt.prompt_id}", prompt) for prompt in chosen]


def _sampling(parts: RlParts) -> Sampling:
    """Return the sampling settings: stop conditions as in training, all others those of the
    evaluation.
    """
    rules = parts.config.eval.sampling
    assert rules.temperature is not None, "chosen at load"
    training = training_sampling(parts.config.rollout, parts.tokenizer)
    return replace(
        training,
        max_new_tokens=rules.max_new_tokens or training.max_new_tokens,
        temperature=rules.temperature,
        top_p=rules.top_p,
        top_k=rules.top_k,
        min_p=0.0,
    )


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean([float(flag) for flag in flags]))


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan
