"""Computes the metrics of an RL step, by the names in observe/names.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from homeostat.algorithms.baselines import has_signal
from homeostat.columns import dense
from homeostat.data.mixing import source_shares
from homeostat.observe.devices import host_rss
from homeostat.rollout.background import Spent
from homeostat.rollout.collect import StepRollouts
from homeostat.run.evaluation.expert_load import load_metrics
from homeostat.run.learning.critic import critic_metrics
from homeostat.run.learning.energies import energy_metrics
from homeostat.run.learning.kept import kept_metrics
from homeostat.run.learning.learn import Learned
from homeostat.run.learning.probes import worst
from homeostat.run.learning.routes import route_metrics
from homeostat.run.learning.updates import step_rows
from homeostat.run.wiring.rl_setup import RlParts
from homeostat.train.inspection.device_report import speed_metrics
from homeostat.types import RolloutGroup, Sample, UpdateReport


def rl_metrics(
    rollouts: StepRollouts, learned: Learned, *, parts: RlParts, seconds: float
) -> dict[str, float]:
    groups = rollouts.all_groups
    samples = [sample for group in groups for sample in group.samples]
    parts.state.num_tokens += _num_tokens(groups)
    labels = list(samples[0].rewards)
    metrics = {
        **_reward_metrics(groups, labels),
        **_completion_metrics(samples, fixed_length=parts.config.is_strided),
        **energy_metrics(learned.energies, learned.reports),
        **update_metrics(learned.reports),
        **critic_metrics(learned.critic, learned.rows),
        **policy_metrics(learned.measured),
        **route_metrics(learned.reports),
        **load_metrics(learned.reports, parts.config.model.moe, sheet=parts.trainer.sheet),
        **worst(learned.probes),
        **learned.mismatch,
        **kept_metrics(samples, vocabulary=parts.trainer.sheet.vocab_size),
        **_signal_metrics(rollouts, learned),
        **_filter_metrics(rollouts, parts),
        **_mix_metrics(rollouts, parts),
        **_missing_metrics(samples, labels),
        **logged_metrics(rollouts.logged),
        **_time_metrics(rollouts, learned, seconds=seconds, num_tokens=_num_tokens(groups)),
        "epoch": parts.collector.prompt_sampler.epoch,
        "num_tokens": parts.state.num_tokens,
        "train/skipped_steps": parts.state.num_skipped,
    }
    if parts.rl_state.kl_coefficient is not None:
        metrics["kl_coefficient"] = parts.rl_state.kl_coefficient
    if learned.kl is not None:
        metrics["kl"] = learned.kl
    return metrics | _resource_metrics(parts)


def _reward_metrics(groups: list[RolloutGroup], labels: list[str]) -> dict[str, float]:
    by_group = [[s.reward for s in group.samples if s.reward is not None] for group in groups]
    known = [value for values in by_group for value in values]
    deviations = [float(np.std(values, ddof=1)) for values in by_group if len(values) > 1]
    metrics = {"reward": _mean(known), "reward_std": _mean(deviations)}
    # A group whose samples have no reward because it failed shows nothing about the prompt's
    # difficulty.
    judged = [np.array(values) for values in by_group if len(values) > 1]
    if judged:
        metrics["frac_reward_zero_std"] = _mean(float(not has_signal(values)) for values in judged)
    noise = reward_noise([[(s.text, s.reward) for s in group.samples] for group in groups])
    if noise is not None:
        metrics["reward/noise_share"] = noise
    for label in labels:
        values = [s.rewards[label] for group in groups for s in group.samples]
        given = [value for value in values if value is not None]
        metrics[f"rewards/{label}/mean"] = _mean(given)
        metrics[f"rewards/{label}/std"] = float(np.std(given)) if given else math.nan
    return metrics


def reward_noise(groups: Sequence[Sequence[tuple[str, float | None]]]) -> float | None:
    """Return the variance of rewards among equal completions over that among all of their groups.

    A group lists (completion, reward). A reward that is a function of the completion gives 0, one
    that is drawn at random about 1. None if no group has equal completions, or all rewards of these
    groups are equal.
    """
    alike = among = 0.0
    num_alike = num_among = 0
    for group in groups:
        known = [(text, reward) for text, reward in group if reward is not None]
        by_text: dict[str, list[float]] = {}
        for text, reward in known:
            by_text.setdefault(text, []).append(reward)
        twins = [rewards for rewards in by_text.values() if len(rewards) > 1]
        if not twins or len(by_text) < 2:
            continue
        alike += sum(float(np.var(rewards)) * len(rewards) for rewards in twins)
        num_alike += sum(len(rewards) - 1 for rewards in twins)
        among += float(np.var([reward for _, reward in known])) * len(known)
        num_among += len(known) - 1
    if not num_alike or among <= 0.0:
        return None
    return (alike / num_alike) / (among / num_among)


def logged_metrics(logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the means of logged values, and the sums of what judges cost."""
    return {
        name: total if name.startswith("judge/") else total / count
        for name, (total, count) in logged.items()
    }


def _missing_metrics(samples: list[Sample], labels: list[str]) -> dict[str, float]:
    """Count missing values of rewards: those that failed, and those that do not apply."""
    metrics = {}
    for label in labels:
        failed = sum(label in sample.failed for sample in samples)
        without = sum(sample.rewards[label] is None for sample in samples)
        metrics[f"rewards/{label}/failed"] = float(failed)
        metrics[f"rewards/{label}/failed_share"] = failed / len(samples)
        metrics[f"rewards/{label}/none"] = float(without - failed)
    lost = sum(bool(sample.failed) and sample.reward is None for sample in samples)
    return metrics | {"rollout/failed_share": lost / len(samples)}


def _completion_metrics(samples: list[Sample], *, fixed_length: bool) -> dict[str, float]:
    """Return lengths and ends. Completions of a fixed length (`fixed_length`) are not cut off."""
    lengths = np.array([sample.completion.num_policy_tokens for sample in samples])
    is_cut = np.array([sample.completion.stop_reason.is_cut for sample in samples])
    ended = lengths[~is_cut]
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/distinct_share": len({s.text for s in samples}) / len(samples),
    }
    if fixed_length:
        return metrics
    metrics["completions/clipped_ratio"] = float(is_cut.mean())
    if len(ended):
        metrics |= {
            "completions/mean_terminated_length": float(ended.mean()),
            "completions/min_terminated_length": float(ended.min()),
            "completions/max_terminated_length": float(ended.max()),
        }
    return metrics


def update_metrics(reports: list[UpdateReport]) -> dict[str, float]:
    """Metrics of the step's updates together."""
    if not reports:
        return {}
    return {
        "train/loss": _mean(report.loss for report in reports),
        "grad_norm": _mean(report.grad_norm for report in reports),
        "learning_rate": reports[-1].learning_rate,
        "data/micro_batches": _mean(report.num_micro_batches for report in reports),
        "data/trained_rows": float(sum(len(report.row_ids_B) for report in reports)),
    }


def policy_metrics(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the policy's metrics over all tokens of the step's updates.

    Rows that an update leaves out count too (run/learning/coverage.py). An update over the truth
    alone measures nothing of them.
    """
    measured = [stats for stats in measured if stats["tokens"]]
    if not measured:
        return {}
    tokens = sum(stats["tokens"] for stats in measured)

    def mean(name: str) -> float:
        return sum(stats[name] for stats in measured) / tokens

    def largest(name: str) -> float:
        # NaN where one of them is.
        return float(np.max([stats[name] for stats in measured]))

    metrics = {
        "entropy": mean("entropy"),
        "clip_ratio/low_mean": mean("clip_low"),
        "clip_ratio/high_mean": mean("clip_high"),
        "clip_ratio/region_mean": mean("clip_low") + mean("clip_high"),
        "clip_ratio/dual_mean": mean("dual_clip"),
        "policy/ratio_mean": mean("ratio"),
        "policy/ratio_max": largest("ratio_max"),
        "policy/ratio_min": -largest("ratio_min_neg"),
        "policy/update_kl": mean("old_kl"),
    }
    return metrics | _correction_metrics(measured, tokens)


def _correction_metrics(measured: Sequence[Mapping[str, float]], tokens: float) -> dict[str, float]:
    """Return what each part of the correction did, as shares of all tokens and all sequences."""

    def total(name: str) -> float:
        return sum(stats[name] for stats in measured)

    if "factor" not in measured[0]:
        return {}
    metrics = {"correction/factor_mean": total("factor") / tokens}
    for name in measured[0]:
        kind, _, part = name.partition("_")
        if kind in ("tokens", "sequences") and part:
            whole = tokens if kind == "tokens" else total("sequences")
            metrics[f"correction/{kind}/{part}"] = total(name) / whole
    return metrics


def _signal_metrics(rollouts: StepRollouts, learned: Learned) -> dict[str, float]:
    metrics = {
        "rollout/rounds": float(rollouts.num_rounds),
        "rollout/replayed_rounds": float(rollouts.num_replayed),
        "rollout/groups_passed_over": float(len(rollouts.passed_over)),
    }
    if learned.rows is not None:
        metrics |= {
            **_advantage_metrics(learned.advantages_S, ~np.isnan(learned.rows.rewards_S)),
            "rollout/untrained_share": float((~learned.rows.trained_S).mean()),
            "rollout/overlong_penalty": float(learned.rows.penalty_S.mean()),
            "train/updates_without_signal": float(learned.num_without_signal),
        }
    return metrics


def _filter_metrics(rollouts: StepRollouts, parts: RlParts) -> dict[str, float]:
    """Return what filters dropped and why, and how many groups the step lacks because of it."""
    filters, sampled = parts.collector.filters, rollouts.all_groups
    if not filters.filters:
        return {}
    lacking = parts.collector.rollout.prompts_per_step - len(rollouts.groups)
    return {
        **filters.counted(rollouts.reasons),
        "rollout/filtered_share": len(rollouts.passed_over) / len(sampled),
        "rollout/groups_lacking": float(max(0, lacking)),
    }


def _mix_metrics(rollouts: StepRollouts, parts: RlParts) -> dict[str, float]:
    """Return the sources of the step's prompts, and what the curriculum knows of them."""
    prompts = parts.prompts.train.rows
    rows = [prompts.row_of(group.prompt.prompt_id) for group in rollouts.all_groups]
    shares = source_shares(prompts.source_B[rows], parts.config.data.source_names)
    return shares | parts.collector.prompt_sampler.metrics()


def _advantage_metrics(
    advantages_S: list[np.ndarray], has_reward_S: np.ndarray
) -> dict[str, float]:
    """Average over the samples with a reward: those that a reward failed on have no advantage."""
    per_sample = np.array([a.mean() if len(a) else 0.0 for a in advantages_S])[has_reward_S]
    if not len(per_sample):
        return {}
    return {
        "advantages/mean": float(per_sample.mean()),
        "advantages/std": float(per_sample.std()),
        "advantages/zero_share": float((per_sample == 0).mean()),
    }


def _time_metrics(
    rollouts: StepRollouts, learned: Learned, *, seconds: float, num_tokens: int
) -> dict[str, float]:
    samples = [sample for group in rollouts.all_groups for sample in group.samples]
    new_tokens = sum(sample.completion.num_policy_tokens for sample in samples)
    metrics = {
        "time/step": seconds,
        "time/generate": rollouts.generate_s,
        "time/reward": rollouts.reward_s,
        "time/score": learned.score_s,
        "time/train": learned.train_s,
        "throughput/tokens_per_s": num_tokens / seconds,
        "throughput/trained_tokens_per_s": learned.trained_tokens / seconds,
    }
    if rollouts.generate_s > 0:
        metrics["engine/tokens_per_s"] = new_tokens / rollouts.generate_s
    return metrics


def async_metrics(rollouts: StepRollouts, *, seconds: float, spent: Spent) -> dict[str, float]:
    """Return how long trainer and engine waited for each other in a step of the async loop.

    The engine samples for this step or for later ones.
    """
    samples = [sample for group in rollouts.all_groups for sample in group.samples]
    new_tokens = sum(sample.completion.num_policy_tokens for sample in samples)
    mixed = [len(set(sample.completion.policy_versions_T.tolist())) > 1 for sample in samples]
    metrics = {
        "stale/mixed_share": float(np.mean(mixed)),
        "time/wait_groups": rollouts.generate_s + rollouts.reward_s,
        "time/wait_drain": spent.drain_s,
        "time/engine_idle": max(0.0, seconds - spent.busy_s),
    }
    if spent.busy_s > 0:
        metrics["engine/tokens_per_s"] = new_tokens / spent.busy_s
    return metrics


def _resource_metrics(parts: RlParts) -> dict[str, float]:
    device = parts.trainer.device_report()
    metrics = {
        "memory/max_alloc": device.max_alloc,
        "memory/max_reserved": device.max_reserved,
        "memory/host_rss": host_rss(),
        **speed_metrics(device.probe_seconds),
    }
    if parts.engine is not None:
        stats = parts.engine.stats()
        metrics |= {
            "engine/policy_version": parts.engine.policy_version,
            "engine/max_running": stats.max_running,
            "engine/preemptions": stats.preemptions,
            "engine/cache_bytes": stats.cache_bytes,
            "engine/warmup_s": stats.warmup_s,
        }
    return metrics | parts.gpus.sample()


def replay_metrics(parts: RlParts, rollouts: StepRollouts) -> dict[str, float]:
    """Compare the current engine with the one that sampled (debug.mode=replay)."""
    debug = parts.config.debug
    if debug is None or debug.mode != "replay" or not rollouts.groups:
        return {}
    assert parts.engine is not None, "replay keeps the engine"
    rows = step_rows(rollouts.groups, parts.config.for_learning).rows
    found = parts.engine.score(rows, temperature=parts.config.rollout.temperature)
    stored = [dense(row.columns["engine_logp"])[row.weights_T > 0] for row in rows]
    differences = np.abs(np.concatenate(found) - np.concatenate(stored))
    return {
        "replay/logp_difference/mean": float(differences.mean()),
        "replay/logp_difference/max": float(differences.max()),
    }


def _num_tokens(groups: list[RolloutGroup]) -> int:
    """Number of tokens that the trainer reads: prompts and completions, whoever wrote them."""
    return sum(
        len(group.prompt.tokens_T) + len(sample.completion)
        for group in groups
        for sample in group.samples
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan
