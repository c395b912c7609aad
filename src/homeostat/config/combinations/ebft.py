"""Find settings of energy-based fine-tuning that cannot work together or would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.ebft import EbftConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

_STRIDED = ("stride", "context_length", "generate_length")


def find_ebft_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of section `ebft`, with its reason and remedy."""
    if config.energy is None:
        if "ebft" in config.model_fields_set:
            yield Problem(
                "ebft",
                f"algorithm.type={config.algorithm.type} computes no energy, so this section "
                "would have no effect.",
                "Remove it, or set algorithm.type=ebft.",
            )
        return
    yield from _energy(config, config.energy)
    yield from _algorithm(config)
    if config.energy.is_strided:
        yield from _strided(config, config.energy)
    else:
        yield from _structured(config, config.energy)


def _energy(config: RunConfig, ebft: EbftConfig) -> Iterator[Problem]:
    has_rewards = bool(config.reward_functions.functions)
    if ebft.alignment_coefficient == ebft.diversity_coefficient == 0 and not has_rewards:
        yield Problem(
            "ebft.alignment_coefficient",
            "both coefficients of the energy are 0, and there are no rewards: nothing is rewarded.",
            "Set ebft.alignment_coefficient above 0.",
        )
    if ebft.rl_coefficient == ebft.ce_coefficient == 0:
        yield Problem(
            "ebft.rl_coefficient",
            "ebft.ce_coefficient is 0 as well: the loss would always be 0.",
            "Set one of the two above 0.",
        )
    if config.rollout.samples_per_prompt < 2 and ebft.diversity_coefficient > 0:
        yield Problem(
            "ebft.diversity_coefficient",
            "diversity compares the samples of a prompt, and each prompt has only one "
            "(rollout.samples_per_prompt).",
            "Set rollout.samples_per_prompt to 2 or more, better 4, or set this key to 0.",
        )
    if config.rollout.samples_per_prompt < 2 and ebft.advantage_estimator != "reinforce":
        yield Problem(
            "ebft.advantage_estimator",
            f"{ebft.advantage_estimator} compares the samples of a prompt, and each prompt has "
            "only one (rollout.samples_per_prompt).",
            "Set rollout.samples_per_prompt to 2 or more, or set this key to reinforce.",
        )


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    assert algorithm.type == "ebft", algorithm.type
    if algorithm.scale != "none":
        yield Problem(
            "algorithm.scale",
            "ebft.advantage_estimator decides whether advantages are scaled.",
            "Remove it, and set ebft.advantage_estimator=group_norm.",
        )
    if algorithm.dynamic_sampling is not None:
        yield Problem(
            "algorithm.dynamic_sampling",
            "energies are known only when all groups of a step are sampled, and the energies of "
            "a group are hardly ever equal.",
            "Remove it.",
        )


def _structured(config: RunConfig, ebft: EbftConfig) -> Iterator[Problem]:
    for name in _STRIDED:
        if name in ebft.model_fields_set:
            yield Problem(
                f"ebft.{name}",
                "with ebft.mode=structured the policy answers prompts, so this key would have no "
                "effect.",
                "Remove it, or set ebft.mode=strided.",
            )
    if ebft.embed_method == "concat":
        yield Problem(
            "ebft.embed_method",
            "concat concatenates the hidden states of all tokens, and answers to prompts differ "
            "in length.",
            "Set it to last_token or completion_mean, or ebft.mode=strided.",
        )
    without = not config.reward_functions.functions
    if without:
        yield from _draws(config, "it needs reward functions, and there are none.")
    if config.has_validation and without:
        yield Problem(
            "data.validation" if config.data.validation else "data.validation_share",
            "held-out prompts are judged by reward functions, and there are none.",
            "Add rewards.functions, for example {type: exact_match, column: answer}, or remove it.",
        )


def _draws(config: RunConfig, why: str) -> Iterator[Problem]:
    """Yield the choices of prompts and groups that cannot be made, for a reason."""
    if config.rollout.filters:
        yield Problem("rollout.filters", why, "Remove it.")
    if config.rollout.curriculum is not None:
        yield Problem("rollout.curriculum", why, "Remove it.")


def _strided(config: RunConfig, ebft: EbftConfig) -> Iterator[Problem]:
    rollout, algorithm = config.rollout, config.algorithm
    assert algorithm.type == "ebft", algorithm.type
    yield from _draws(
        config,
        (
            "with ebft.mode=strided a text gives many groups, which are always drawn and trained "
            "together."
        ),
    )
    if "reference_column" in ebft.model_fields_set:
        yield Problem(
            "ebft.reference_column",
            "ebft.mode=strided compares continuations with the text itself.",
            "Remove it, or set ebft.mode=structured.",
        )
    wanted = ebft.generate_length
    if "max_new_tokens" in rollout.model_fields_set and rollout.max_new_tokens != wanted:
        yield Problem(
            "rollout.max_new_tokens",
            f"a continuation has ebft.generate_length={wanted} tokens.",
            "Remove it.",
        )
    for name in ("stop", "stop_token_ids"):
        if getattr(rollout, name):
            yield Problem(
                f"rollout.{name}",
                "continuations of a text are all equally long: nothing ends them earlier.",
                "Remove it.",
            )
    if algorithm.overlong.type != "keep":
        yield Problem(
            "algorithm.overlong",
            "every continuation is meant to reach its full length, so none counts as overlong.",
            "Remove it.",
        )
    shortest = ebft.context_length + ebft.generate_length
    if config.data.max_length < shortest:
        yield Problem(
            "data.max_length",
            f"a text of {config.data.max_length} tokens has no room for ebft.context_length="
            f"{ebft.context_length} and ebft.generate_length={ebft.generate_length}.",
            f"Raise it to {shortest} or more.",
        )
    if config.debug is not None and config.debug.rollouts is not None:
        yield Problem(
            "debug.rollouts",
            "each drawn text gives many groups, and saved groups cannot be distinguished by "
            "their text.",
            "Remove debug, or set debug.mode=rollout_only.",
        )
    if config.has_validation:
        yield Problem(
            "data.validation" if config.data.validation else "data.validation_share",
            "ebft.mode=strided has no prompts that could be held out.",
            "Remove it; `homeostat train` with algorithm.type=sft measures the loss on held-out "
            "text.",
        )
