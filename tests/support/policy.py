"""Policy-gradient losses and their gradients as float64 loops, written from the papers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from homeostat.algorithms.normalise import row_weights
from homeostat.algorithms.policy import PolicyTokens, policy_loss, policy_spec
from homeostat.config.algorithm import AnyAlgorithm
from homeostat.types import LossSpec

# Algorithms that clip the ratio as PPO does, on which a dual clip works; and all of them.
RATIO_ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "ppo"]
ALGORITHMS = [*RATIO_ALGORITHMS, "cispo", "cpgd", "sapo", "gmpo"]


def config_of(name: str, **keys):
    return TypeAdapter(AnyAlgorithm).validate_python({"type": name, **keys})


@dataclass
class Row:
    """One trained completion, in plain floats."""

    new: list[float]
    old: list[float]
    ref: list[float]
    engine: list[float]
    entropy: list[float]
    advantage: list[float]


def random_rows(
    seed: int, *, num: int = 7, spread: float = 0.5, engine_spread: float = 0.05
) -> list[Row]:
    """Mixed lengths; advantages of both signs and 0; ratios on both sides of every bound."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num):
        length = int(rng.integers(1, 9))
        old = -rng.exponential(1.5, length)
        rows.append(
            Row(
                new=(old + spread * rng.standard_normal(length)).tolist(),
                old=old.tolist(),
                ref=(old + 0.7 * rng.standard_normal(length)).tolist(),
                engine=(old + engine_spread * rng.standard_normal(length)).tolist(),
                entropy=rng.random(length).tolist(),
                advantage=[0.0 if index == 0 else float(rng.standard_normal())] * length,
            )
        )
    return rows


@dataclass
class Expected:
    loss: float = 0.0
    grad_logp: list[float] = field(default_factory=list)
    grad_entropy: list[float] = field(default_factory=list)


def ppo(ratio: float, advantage: float, config) -> tuple[float, float]:
    """min(r A, clip(r) A), at least dual * A where A < 0; and its derivative by log r."""
    plain = ratio * advantage
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage
    value, slope = (plain, plain) if plain <= bounded else (bounded, 0.0)
    if config.dual_clip is not None and advantage < 0 and value < config.dual_clip * advantage:
        value, slope = config.dual_clip * advantage, 0.0
    return value, slope


def objective(row: Row, token: int, config) -> tuple[float, list[float]]:
    """Return the objective at a token, and its derivatives by all log-probs of the row."""
    advantage, length = row.advantage[token], len(row.new)
    derivatives = [0.0] * length
    if config.type == "gspo":
        mean = sum(new - old for new, old in zip(row.new, row.old, strict=True)) / length
        value, slope = ppo(math.exp(mean), advantage, config)
        return value, [slope / length] * length
    ratio = math.exp(row.new[token] - row.old[token])
    if config.type == "cispo":
        weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        derivatives[token] = weight * advantage
        return weight * advantage * row.new[token], derivatives
    if config.type == "gmpo":
        return geometric(row, advantage, config)
    one = {"cpgd": clipped_log, "sapo": gated}.get(config.type, ppo)
    value, derivatives[token] = one(ratio, advantage, config)
    return value, derivatives


def clipped_log(ratio: float, advantage: float, config) -> tuple[float, float]:
    """min(ln r A, clip(ln r) A) less the drift; and its derivative by ln r."""
    log_ratio = math.log(ratio)
    bound = min(max(log_ratio, math.log(1 - config.clip_low)), math.log(1 + config.clip_high))
    plain, bounded = log_ratio * advantage, bound * advantage
    value, slope = (plain, advantage) if plain <= bounded else (bounded, 0.0)
    if ratio <= 1 + config.drift_clip:
        return value - config.drift * (ratio - 1 - log_ratio), slope - config.drift * (ratio - 1)
    edge = config.drift_clip - math.log(1 + config.drift_clip)
    beyond = config.drift_clip * (log_ratio - math.log(1 + config.drift_clip))
    return value - config.drift * (edge + beyond), slope - config.drift * config.drift_clip


def gated(ratio: float, advantage: float, config) -> tuple[float, float]:
    """4 / tau * sigmoid(tau (r - 1)) A, and its derivative by ln r."""
    tau = config.tau_pos if advantage > 0 else config.tau_neg
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage


def geometric(row: Row, advantage: float, config) -> tuple[float, list[float]]:
    """A times the geometric mean of the clipped ratios, and its derivatives."""
    logs = [new - old for new, old in zip(row.new, row.old, strict=True)]
    if advantage > 0:
        bounded = [min(x, config.clip_high) for x in logs]
    else:
        bounded = [max(x, -config.clip_low) if advantage < 0 else x for x in logs]
    value = advantage * math.exp(sum(bounded) / len(logs))
    free = [x == b for x, b in zip(logs, bounded, strict=True)]
    return value, [value / len(logs) * is_free for is_free in free]


def divergence(row: Row, token: int, kl) -> tuple[float, float]:
    """The penalty at a token and its derivative by the token's log-prob."""
    new, ref = row.new[token], row.ref[token]
    value, slope = {
        "k1": (new - ref, 1.0),
        "k2": ((new - ref) ** 2 / 2, new - ref),
        "k3": (math.exp(ref - new) - 1 - (ref - new), 1 - math.exp(ref - new)),
    }[kl.estimator]
    if kl.importance_weighted:
        ratio = math.exp(new - row.old[token])
        value, slope = ratio * value, ratio * value + ratio * slope
    return kl.coefficient * value, kl.coefficient * slope


def mismatch(row: Row, token: int, level: str) -> float:
    """Trainer over engine at the beginning of the step, of a token or its row."""
    logs = [old - engine for old, engine in zip(row.old, row.engine, strict=True)]
    product = sum(logs)
    return math.exp({"token": logs[token], "sequence": product,
                     "geometric": product / len(logs)}[level])  # fmt: skip


def bounded_weight(row: Row, token: int, rule) -> float:
    ratio = mismatch(row, token, rule.type)
    if (rule.low is None or ratio >= rule.low) and ratio <= rule.high:
        return ratio
    bound = rule.high if ratio > rule.high else rule.low
    return bound if rule.outside == "truncate" else 0.0


def factor(row: Row, token: int, config, *, weight_mean: float) -> float:
    """Return the factor of the surrogate, case by case."""
    rules = config.correction
    if rules is None:
        return 1.0
    if rules.reject is not None:
        ratio = mismatch(row, token, rules.reject.type)
        if ratio < rules.reject.low or ratio > rules.reject.high:
            return 0.0
    if rules.veto is not None:
        if min(mismatch(row, each, "token") for each in range(len(row.old))) < rules.veto:
            return 0.0
    if rules.off_policy_mask is not None and row.advantage[token] < 0:
        fallen = [engine - new for engine, new in zip(row.engine, row.new, strict=True)]
        if sum(fallen) / len(fallen) > rules.off_policy_mask:
            return 0.0
    return 1.0 if rules.weight is None else bounded_weight(row, token, rules.weight) / weight_mean


def share(rows: list[Row], row: Row, config) -> float:
    """Return the share of one token in the update's loss."""
    if config.normalise == "token":
        return 1 / sum(len(each.new) for each in rows)
    if config.normalise == "sequence":
        return 1 / len(row.new) / len(rows)
    return 1 / (len(rows) * config.fixed_length)


def expected(rows: list[Row], config, *, weight_mean: float = 1.0) -> Expected:
    result = Expected()
    for row in rows:
        part, gradient = share(rows, row, config), [0.0] * len(row.new)
        for token in range(len(row.new)):
            value, derivatives = objective(row, token, config)
            scale = part * factor(row, token, config, weight_mean=weight_mean)
            result.loss -= scale * value
            gradient = [g - scale * d for g, d in zip(gradient, derivatives, strict=True)]
            if config.kl is not None:
                penalty, slope = divergence(row, token, config.kl)
                result.loss += part * penalty
                gradient[token] += part * slope
            result.loss -= part * config.entropy_bonus * row.entropy[token]
            result.grad_entropy.append(-part * config.entropy_bonus)
        result.grad_logp += gradient
    return result


def tokens_of(rows: list[Row], weights: np.ndarray, *, dtype=torch.float64) -> PolicyTokens:
    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in getattr(row, name)], dtype=dtype)

    lengths = [len(row.new) for row in rows]
    return PolicyTokens(
        trainer_logp_M=flat("new").requires_grad_(),
        entropy_M=flat("entropy").requires_grad_(),
        weights_M=torch.tensor(np.repeat(weights, lengths), dtype=dtype),
        row_of_M=torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)),
        num_rows=len(rows),
        advantage_M=flat("advantage"),
        old_logp_M=flat("old"),
        ref_logp_M=flat("ref"),
        engine_logp_M=flat("engine"),
    )


def problem(
    rows: list[Row],
    config,
    *,
    dtype=torch.float64,
    kl_coefficient: float | None = None,
    weight_mean: float = 1.0,
) -> tuple[PolicyTokens, LossSpec]:
    lengths = np.array([len(row.new) for row in rows])
    weights, denominator = row_weights(
        lengths,
        np.ones(len(rows), dtype=bool),
        normalise=config.normalise,
        fixed_length=config.fixed_length,
    )
    spec = policy_spec(
        config,
        denominator=denominator,
        temperature=1.0,
        kl_coefficient=kl_coefficient,
        weight_mean=weight_mean,
    )
    tokens = tokens_of(rows, weights, dtype=dtype)
    return (tokens if config.kl is not None else replace(tokens, ref_logp_M=None)), spec


def wide(name: str, **keys):
    """Bounds that the ratios of random_rows leave on both sides, GSPO's too."""
    low, high = (0.05, 0.08) if name == "gspo" else (0.2, 0.28)
    return config_of(name, **({"clip_low": low, "clip_high": high, "fixed_length": 11} | keys))


def parts_of(tokens: PolicyTokens, cuts: list[list[int]]) -> list[PolicyTokens]:
    """The same tokens as micro-batches of these rows."""
    made = []
    for rows in cuts:
        keep = torch.isin(tokens.row_of_M, torch.tensor(rows))
        renumber = {row: index for index, row in enumerate(rows)}
        row_of_M = torch.tensor([renumber[int(row)] for row in tokens.row_of_M[keep]])
        values = {
            name: getattr(tokens, name)[keep]
            for name in PolicyTokens.__dataclass_fields__
            if name.endswith("_M") and getattr(tokens, name) is not None
        }
        made.append(PolicyTokens(**(values | {"row_of_M": row_of_M}), num_rows=len(rows)))
    return made


def assert_equals_the_formula(rows: list[Row], config, *, weight_mean: float = 1.0) -> None:
    tokens, spec = problem(rows, config, weight_mean=weight_mean)
    terms = policy_loss(tokens, spec)
    terms.loss.backward()
    want = expected(rows, config, weight_mean=weight_mean)
    assert terms.loss.item() == pytest.approx(want.loss, rel=1e-11, abs=1e-13)
    np.testing.assert_allclose(tokens.trainer_logp_M.grad, want.grad_logp, rtol=1e-10, atol=1e-13)
    if config.entropy_bonus:
        np.testing.assert_allclose(tokens.entropy_M.grad, want.grad_entropy, rtol=1e-12)
    else:
        assert tokens.entropy_M.grad is None
