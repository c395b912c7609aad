"""Find settings that the training of a reward model cannot use, and its own in other runs."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.data import AutoSource, PreferenceSource, ScoredSource, all_sources
from homeostat.config.reward_model import BradleyTerryLoss, RewardModelConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_reward_model_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of the settings of reward models."""
    algorithm = config.algorithm
    if not isinstance(algorithm, RewardModelConfig):
        yield from _elsewhere(config)
        return
    yield from _sources(config, algorithm)
    if config.reference is not None:
        why = "the training of a reward model does not compare it with another model."
        yield Problem("reference", why, "Remove it.")
    if config.model.implementation != "native":
        yield Problem(
            "model.implementation",
            "the scalar head of a reward model needs the native decoder.",
            "Set it to native.",
        )


def _elsewhere(config: RunConfig) -> Iterator[Problem]:
    for place, source in all_sources(config.data):
        if isinstance(source, PreferenceSource) and source.margin_column is not None:
            yield Problem(
                f"{place}.margin_column",
                f"algorithm.type={config.algorithm.type} does not read margins.",
                "Remove it, or set algorithm.type=reward_model.",
            )


def _sources(config: RunConfig, algorithm: RewardModelConfig) -> Iterator[Problem]:
    pairs = isinstance(algorithm.loss, BradleyTerryLoss)
    wanted, kind = ("preference", PreferenceSource) if pairs else ("scored", ScoredSource)
    with_margin = []
    for place, source in all_sources(config.data):
        if not isinstance(source, kind | AutoSource):
            what = "pairs of completions" if pairs else "completions with a score"
            yield Problem(
                f"{place}.type",
                f"algorithm.loss.type={algorithm.loss.type} learns from {what}, and this is a "
                f"{source.type} source.",
                f"Use {wanted}.",
            )
        elif isinstance(source, PreferenceSource):
            with_margin.append((place, source.margin_column is not None))
    if len({has for _, has in with_margin}) > 1:
        place = next(place for place, has in with_margin if not has)
        yield Problem(
            f"{place}.margin_column",
            "other sources have a margin, and in this source every pair would count as a margin "
            "of 1.",
            "Set it for all sources or for none.",
        )
