"""Find settings of RL that cannot work together, or have no effect where nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.algorithm import (
    CpgdConfig,
    PolicyGradientConfig,
    ReinforcePpConfig,
    SapoConfig,
)
from homeostat.config.combinations.async_rl import find_async_conflicts
from homeostat.config.combinations.correction import find_correction_conflicts
from homeostat.config.combinations.critic import find_critic_conflicts
from homeostat.config.combinations.curriculum import find_filter_conflicts
from homeostat.config.combinations.engine import find_engine_conflicts
from homeostat.config.combinations.sequence import longer_rows
from homeostat.config.data import AutoSource, RlSource, TextSource, all_sources
from homeostat.config.kind import RunKind
from homeostat.config.rollout import AdapterOffReference, InitialReference
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

_RL_ONLY = ("rollout", "engine", "sync", "rewards", "critic", "debug")
# Algorithms in which a dual clip has nothing to bound, and why.
_NO_DUAL_CLIP = {
    "cispo": "already bounds the weight of a token on both sides",
    "cpgd": "does not weight tokens by their ratio, which is what a dual clip bounds",
    "sapo": "already limits large ratios by its gate",
    "gmpo": "bounds every token's ratio before it enters the mean",
}
# Names in messages for the kinds of training that sample nothing.
WITHOUT_SAMPLING = {
    RunKind.SFT: "supervised fine-tuning",
    RunKind.PREFERENCE: "preference training",
    RunKind.REWARD_MODEL: "training of a reward model",
}


def find_rl_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of RL settings, with its reason and remedy."""
    if not isinstance(config.algorithm, PolicyGradientConfig):
        yield from _not_rl(config)
        return
    checks = (_sources, _sizes, _model, _rewards, _algorithm, _kl, _reference, _eval, _debug)
    for check in checks:
        yield from check(config)
    yield from find_engine_conflicts(config)
    yield from find_filter_conflicts(config)
    yield from find_correction_conflicts(config.algorithm)
    yield from find_critic_conflicts(config)
    yield from find_async_conflicts(config)


def _not_rl(config: RunConfig) -> Iterator[Problem]:
    what = WITHOUT_SAMPLING[config.kind]
    for name in _RL_ONLY:
        if name in config.model_fields_set and getattr(config, name) is not None:
            yield Problem(
                name,
                f"{what} samples nothing, so this section would have no effect.",
                "Remove it, or set algorithm.type to grpo or another RL algorithm.",
            )
    for owner, path in ((config.trainer, "trainer.updates_per_step"),
                        (config.trainer, "trainer.epochs_per_step"),
                        (config.eval, "eval.sampling"),
                        (config.observe, "observe.completions"),
                        (config.observe, "observe.verify_logprobs")):  # fmt: skip
        if path.partition(".")[2] in owner.model_fields_set:
            yield Problem(path, f"this key is for RL only, and this run is {what}.", "Remove it.")
    if config.lora is not None and "publish" in config.lora.model_fields_set:
        why = f"{what} has no engine to which an adapter could be sent."
        yield Problem("lora.publish", why, "Remove it.")


def _sources(config: RunConfig) -> Iterator[Problem]:
    if config.is_strided:
        yield from _texts(config)
        return
    for place, source in all_sources(config.data):
        if not isinstance(source, RlSource | AutoSource):
            yield Problem(
                f"{place}.type",
                f"in RL the model answers prompts, and the rows of a {source.type} source are "
                "texts to train on.",
                "Use prompts or reasoning_gym, or algorithm.type=sft.",
            )
    if config.data.overlong == "truncate":
        yield Problem(
            "data.overlong",
            "a truncated prompt asks for something else.",
            "Set it to drop or refuse.",
        )
    yield from _in_memory(config)


def _texts(config: RunConfig) -> Iterator[Problem]:
    for place, source in all_sources(config.data):
        if not isinstance(source, TextSource | AutoSource):
            yield Problem(
                f"{place}.type",
                f"ebft.mode=strided continues raw text, and a {source.type} source gives none.",
                "Use text, or ebft.mode=structured.",
            )
    yield from _in_memory(config)


def _in_memory(config: RunConfig) -> Iterator[Problem]:
    for name in ("cache_dir", "num_processes", "prefetch_updates"):
        if name in config.data.model_fields_set:
            yield Problem(
                f"data.{name}",
                "all prompts are prepared together and kept in memory, so this key would have no "
                "effect.",
                "Remove it.",
            )


def _sizes(config: RunConfig) -> Iterator[Problem]:
    trainer, rollout = config.trainer, config.rollout
    if rollout.temperature == 0:
        yield Problem(
            "rollout.temperature",
            "greedy decoding is not a policy that RL can learn from: all samples of a prompt would "
            "be the same.",
            "Set it above 0; eval.sampling.temperature may stay 0.",
        )
    if "batch_rows" in trainer.model_fields_set:
        yield Problem(
            "trainer.batch_rows",
            "in RL an update has rollout.prompts_per_step x rollout.samples_per_prompt / "
            "trainer.updates_per_step rows.",
            "Remove it, and set the size by these keys.",
        )
    if trainer.updates_per_step > rollout.prompts_per_step:
        yield Problem(
            "trainer.updates_per_step",
            f"{trainer.updates_per_step} updates need at least as many groups, and a step has "
            f"only {rollout.prompts_per_step} (rollout.prompts_per_step); a group is never split.",
            "Lower it.",
        )
    longest = config.data.max_length + rollout.max_new_tokens
    is_set = trainer.max_tokens_per_device is not None
    if trainer.packing and is_set and trainer.tokens_per_micro_batch < longest:
        yield Problem(
            "trainer.max_tokens_per_device",
            f"{trainer.budget_text} cannot hold one row of data.max_length="
            f"{config.data.max_length} + rollout.max_new_tokens={rollout.max_new_tokens}.",
            f"Raise it, or lower one of these two keys{longer_rows(trainer.backend)}.",
        )
    rows = trainer.micro_batch_rows
    per_update = rollout.samples_per_step // trainer.updates_per_step
    if not trainer.packing and rows is not None and rows > per_update:
        yield Problem(
            "trainer.micro_batch_rows",
            f"{rows} rows are more than an update has ({per_update}).",
            "Lower it.",
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    if config.lora is not None and config.lora.dropout > 0:
        yield Problem(
            "lora.dropout",
            "with dropout, the policy that is trained would differ from the one that sampled.",
            "Set lora.dropout=0.",
        )
    if config.observe.verify_logprobs is not None and config.model.implementation != "native":
        yield Problem(
            "observe.verify_logprobs",
            "the float64 reference supports only the model families of the native decoder.",
            "Remove it, or set model.implementation=native.",
        )


def _rewards(config: RunConfig) -> Iterator[Problem]:
    functions = config.reward_functions.functions
    if not functions and config.energy is None:
        yield Problem(
            "rewards",
            "RL needs at least one reward that scores completions.",
            "Add rewards.functions, for example {type: exact_match, column: answer}.",
        )
        return
    names = {reward.label for reward in functions}
    solved_by = config.eval.sampling.solved_by
    if solved_by is not None and solved_by not in names:
        yield Problem(
            "eval.sampling.solved_by",
            f"no reward is called {solved_by!r}.",
            f"Known: {', '.join(sorted(names))}.",
        )
    gold = config.reward_functions.gold
    if gold and not config.has_validation:
        yield Problem(
            "rewards.functions[].role",
            f"{gold[0].label} has role eval, and there are no held-out prompts.",
            "Set data.validation or data.validation_share.",
        )


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm, rollout = config.algorithm, config.rollout
    assert isinstance(algorithm, PolicyGradientConfig)
    if algorithm.fixed_length is not None and algorithm.normalise != "fixed":
        yield Problem(
            "algorithm.fixed_length",
            f"algorithm.normalise={algorithm.normalise} does not use this key.",
            "Remove it, or set algorithm.normalise=fixed.",
        )
    if algorithm.dual_clip is not None and algorithm.type in _NO_DUAL_CLIP:
        yield Problem(
            "algorithm.dual_clip",
            f"{algorithm.type} {_NO_DUAL_CLIP[algorithm.type]}.",
            "Remove it.",
        )
    if isinstance(algorithm, SapoConfig):
        for name in sorted({"clip_low", "clip_high"} & algorithm.model_fields_set):
            yield Problem(
                f"algorithm.{name}",
                "sapo uses a soft gate and does not clip.",
                "Remove it; algorithm.tau_pos and algorithm.tau_neg set how fast the gate closes.",
            )
    if isinstance(algorithm, CpgdConfig) and not algorithm.drift:
        if "drift_clip" in algorithm.model_fields_set:
            yield Problem(
                "algorithm.drift_clip",
                "algorithm.drift=0: there is no drift term whose slope could be bounded.",
                "Remove it, or set algorithm.drift above 0.",
            )
    if algorithm.overlong.type == "shape":
        if (algorithm.overlong.buffer_tokens or 1) > rollout.max_new_tokens:
            yield Problem(
                "algorithm.overlong.buffer_tokens",
                f"the penalty begins {algorithm.overlong.buffer_tokens} tokens before "
                f"rollout.max_new_tokens={rollout.max_new_tokens}, so every completion would get "
                "it.",
                "Lower it.",
            )
    if algorithm.whiten and algorithm.scale == "batch":
        yield Problem(
            "algorithm.scale",
            "algorithm.whiten already divides by the standard deviation over the batch.",
            "Set it to none or group, or algorithm.whiten=false.",
        )
    if isinstance(algorithm, ReinforcePpConfig) and algorithm.scale != "none":
        yield Problem(
            "algorithm.scale",
            "reinforce_pp already scales returns, because it whitens them over the batch.",
            "Remove it.",
        )


def _kl(config: RunConfig) -> Iterator[Problem]:
    assert isinstance(config.algorithm, PolicyGradientConfig)
    kl = config.algorithm.kl
    if kl is None:
        return
    if kl.place == "loss" and kl.estimator == "k1" and not kl.importance_weighted:
        yield Problem(
            "algorithm.kl.estimator",
            "as a term of the loss, k1 has a gradient of 0 on average, so it would have no effect.",
            "Use k2 or k3, set importance_weighted=true, or place=reward.",
        )
    if kl.place == "reward" and kl.importance_weighted:
        yield Problem(
            "algorithm.kl.importance_weighted",
            "a KL penalty in the reward is computed under the policy that sampled, so there is "
            "no ratio to weight it by.",
            "Remove it.",
        )
    if kl.target is None and "horizon" in kl.model_fields_set:
        yield Problem(
            "algorithm.kl.horizon",
            "without algorithm.kl.target the coefficient never changes.",
            "Set a target, or remove it.",
        )


def _reference(config: RunConfig) -> Iterator[Problem]:
    assert isinstance(config.algorithm, PolicyGradientConfig)
    reference = config.reference
    if reference is None:
        return
    if config.algorithm.kl is None:
        yield Problem(
            "reference",
            "algorithm.kl is not set, so the policy would never be compared with the reference.",
            "Set algorithm.kl, or remove it.",
        )
    if isinstance(reference, AdapterOffReference) and config.lora is None:
        yield Problem(
            "reference.type",
            "there is no adapter to switch off.",
            "Set lora, or use type: initial.",
        )
    if isinstance(reference, InitialReference) and config.debug is not None:
        if config.debug.mode == "rollout_only":
            yield Problem(
                "reference", "debug.mode=rollout_only trains nothing.", "Remove one of the two."
            )


def _eval(config: RunConfig) -> Iterator[Problem]:
    rules = config.eval.sampling
    if rules.temperature == 0 and rules.samples_per_prompt > 1:
        yield Problem(
            "eval.sampling.samples_per_prompt",
            "at temperature 0 all samples of a prompt are the same.",
            "Set it to 1, or raise eval.sampling.temperature.",
        )
    if rules.temperature == 0 and (rules.top_k is not None or rules.top_p < 1):
        name = "top_k" if rules.top_k is not None else "top_p"
        yield Problem(
            f"eval.sampling.{name}",
            "at temperature 0 the most likely token is always taken.",
            "Remove it, or raise eval.sampling.temperature.",
        )


def _debug(config: RunConfig) -> Iterator[Problem]:
    debug = config.debug
    if debug is None:
        return
    if debug.mode == "rollout_only" and debug.rollouts is not None:
        yield Problem(
            "debug.rollouts",
            ("debug.mode=rollout_only samples new rollouts and does not read any."),
            "Remove it.",
        )
    if debug.mode != "rollout_only" and debug.rollouts is None:
        yield Problem(
            "debug.rollouts",
            f"debug.mode={debug.mode} needs saved rollouts to train on.",
            "Set it to the folder of a run that saved its rollouts.",
        )
    if debug.mode == "train_only" and config.has_validation:
        yield Problem(
            "debug.mode",
            "train_only starts no engine, so held-out prompts cannot be answered.",
            "Use replay, or remove data.validation.",
        )
