"""Add metrics that follow from those that were logged, and take out those that mean nothing.

All functions change the mapping in place: our name -> series.
"""

from __future__ import annotations

import re

import numpy as np

from homeostat.health.names import unprefixed
from homeostat.health.readers.values.common_names import RATES, folded
from homeostat.health.view import Series

# The name of a learning rate, also of one parameter group.
_RATE_OF_GROUP = re.compile(r"(?:^|[/_])(?:lr|learning_rate)(?:[/_-]\w{1,40})?$", re.IGNORECASE)
# Metrics other than the reward that only runs of RL log.
_IN_RL = {"kl", "entropy", "clip_ratio/region_mean", "completions/mean_length", "policy/update_kl"}
# Metrics that only games and simulations log: the share of random moves, the number of episodes.
_OF_GAMES = {"epsilon", "episode"}
_OF_EPISODES = ("episode_reward_mean", "ep_rew_mean", "episode_return_mean")
# Names by which Stable-Baselines is recognised. Its event files lack the number of updates.
_OF_BASELINES = {"train/n_updates", "train/policy_gradient_loss", "train/clip_range"}
_LOSSES = {"loss", "train_loss", "training_loss", "loss train", "raw/loss", "lm loss"}
# The distance from a teacher that distillation lowers: teacher_kl, distill/kl, kl_to_teacher.
_OF_TEACHER = re.compile(r"(?:^|[/_])(?:teacher|distill?(?:ation)?)(?:[/_]|$)", re.IGNORECASE)
# A loss that is so many times the logarithm of the perplexity is a sum over tokens.
_MANY_TOKENS = 20.0
# Records of one length that are no coincidence, the shortest limit in tokens that is none of short
# answers (a number, a letter), and the share of the limit from which lengths must have grown.
_SAME_LENGTH, _SHORT, _GROWN = 5, 64, 0.9


def derive(metrics: dict[str, Series]) -> None:
    _join_losses(metrics)
    _of_perplexity(metrics)
    _only_reward(metrics)
    _fastest_rate(metrics)
    _as_entropy(metrics)
    _none_ended(metrics)
    _all_as_long(metrics)
    _unpaid(metrics)
    _margin_of_pairs(metrics)


def _of_perplexity(metrics: dict[str, Series]) -> None:
    """Add the loss of training or held-out rows where only its exponential is logged.

    It also replaces a loss that is the sum over all tokens, which JoeyNMT prints.

    A perplexity is at least 1; smaller numbers under that name are something else.
    """
    for part in ("train", "eval"):
        found, loss = metrics.get(f"{part}/perplexity"), metrics.get(f"{part}/loss")
        if found is None or not len(found) or np.any(found.finite().values < 1.0):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            mean = Series(found.steps, np.log(found.values))
        if loss is None or _is_sum(loss, mean):
            metrics[f"{part}/loss"] = mean


def _is_sum(loss: Series, mean: Series) -> bool:
    """Return whether a loss, logged together with the mean over tokens, is a multiple of it."""
    if not np.array_equal(loss.steps, mean.steps):
        return False
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = loss.values / mean.values
    ratios = ratios[np.isfinite(ratios)]
    return bool(len(ratios)) and float(ratios.min()) > _MANY_TOKENS


def _only_reward(metrics: dict[str, Series]) -> None:
    """Use a single reward function as reward, or in RL the success rate, if no total is logged."""
    if "reward" in metrics:
        return
    if (_IN_RL | _OF_GAMES) & metrics.keys():
        names = {folded(unprefixed(name)): name for name in metrics}
        rate = next((names[name] for name in RATES if name in names), None)
        # The reward of episodes under a heading that the user chose.
        own = (name for name in metrics if folded(name.rpartition("/")[2]) in _OF_EPISODES)
        rate = rate or next((name for name in own if not name.startswith("eval")), None)
        if rate is not None:
            metrics["reward"] = metrics[rate]
            return
    parts = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    if len(parts) == 1 and "format" not in parts[0].lower():
        metrics["reward"] = metrics[parts[0]]


def _fastest_rate(metrics: dict[str, Series]) -> None:
    """Use the highest of several groups' learning rates if no single one is logged."""
    if "learning_rate" in metrics:
        return
    groups = [one for name, one in metrics.items() if _RATE_OF_GROUP.search(name)]
    rates = [one for one in groups if len(one.finite())]
    if rates:
        metrics["learning_rate"] = max(rates, key=lambda one: float(one.finite().values.max()))


def _as_entropy(metrics: dict[str, Series]) -> None:
    """Change the sign of an entropy that is logged as a loss, as Stable-Baselines does."""
    entropy = metrics.get("entropy")
    if entropy is None:
        return
    values = entropy.finite().values
    # The entropy of a Gaussian policy may become negative while the policy narrows.
    is_loss = not _OF_BASELINES.isdisjoint(metrics)
    if len(values) and values.min() < 0.0 and (values.max() <= 0.0 or is_loss):
        metrics["entropy"] = Series(entropy.steps, -entropy.values)


def _none_ended(metrics: dict[str, Series]) -> None:
    """Add the share of cut completions of TRL's PPO and RLOO if no completion ever ended.

    They log the number of end tokens among all completions. Their number of completions is not
    logged, so only 0 tells a share.
    """
    ended = metrics.get("val/num_eos_tokens")
    if ended is None or "completions/clipped_ratio" in metrics or ended.values.any():
        return
    metrics["completions/clipped_ratio"] = Series(ended.steps, np.ones(len(ended)))


def _all_as_long(metrics: dict[str, Series]) -> None:
    """Add the share of cut completions where all have grown to one length, which is the limit.

    Completions that end by themselves differ in length, so their mean is no whole number that stays
    the same from record to record. Lengths that never varied may be fixed on purpose.
    """
    length = metrics.get("completions/mean_length")
    if length is None or "completions/clipped_ratio" in metrics or len(length) <= _SAME_LENGTH:
        return
    most, values = float(length.values.max()), length.values
    shorter = np.flatnonzero(values != most)
    start = int(shorter[-1]) + 1 if len(shorter) else 0
    if most < _SHORT or not most.is_integer() or len(values) - start < _SAME_LENGTH:
        return
    if start and values[:start].min() < _GROWN * most:
        metrics["completions/clipped_ratio"] = Series(
            length.steps[start:], np.ones(len(values) - start)
        )


def _unpaid(metrics: dict[str, Series]) -> None:
    """Drop rewards that are always 0 where the distance to a teacher is logged.

    Distillation lowers that distance, and its prompts pay nothing.
    """
    reward = metrics.get("reward")
    if reward is None or reward.values.any() or not any(map(_OF_TEACHER.search, metrics)):
        return
    for name in [name for name in metrics if name == "reward" or name.startswith("zero_std")]:
        del metrics[name]


def _margin_of_pairs(metrics: dict[str, Series]) -> None:
    """Compute the margin of chosen over rejected answers if only their rewards are logged."""
    chosen, rejected = map(metrics.get, ("preference/chosen_reward", "preference/rejected_reward"))
    if "preference/margin" in metrics or chosen is None or rejected is None:
        return
    if np.array_equal(chosen.steps, rejected.steps):
        metrics["preference/margin"] = Series(chosen.steps, chosen.values - rejected.values)


def _join_losses(metrics: dict[str, Series]) -> None:
    """Combine losses that rows of different formats name differently, if no step has both."""
    loss = metrics.get("train/loss")
    for name in sorted(_LOSSES & metrics.keys()):
        other = metrics[name]
        if loss is None or min(len(loss), len(other)) < 3 or np.isin(other.steps, loss.steps).any():
            continue
        steps = np.concatenate([loss.steps, other.steps])
        order = np.argsort(steps, kind="stable")
        loss = Series(steps[order], np.concatenate([loss.values, other.values])[order])
        metrics["train/loss"] = loss
        del metrics[name]
