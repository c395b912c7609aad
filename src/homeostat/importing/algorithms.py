"""Choose the algorithm of a recipe, with the settings that decide which loss it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from homeostat.config.algorithm import AnyAlgorithm, PolicyGradientConfig
from homeostat.config.base import Algorithm
from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status
from homeostat.importing.recognise import fold

KL_KEYS = (
    "algorithm.kl.enabled",
    "algorithm.kl.place",
    "algorithm.kl.coefficient",
    "algorithm.kl.estimator",
    "algorithm.kl.target",
    "algorithm.kl.horizon",
    "algorithm.kl.importance_weighted",
)
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of our algorithms, further keys of it, and in which respect it is only alike."""

    type: str
    more: dict[str, Any] = field(default_factory=dict)
    how: str = ""


# What frameworks call an algorithm or an estimator of advantages -> ours.
ALGORITHMS: dict[str, Choice] = {
    "gae": Choice("ppo"),
    "group_norm": Choice("grpo"),
    "gdpo": Choice("grpo", how="rewards are summed before they are normalised, not after"),
    "grpo_passk": Choice("grpo", how="every sample has an advantage, not only the best"),
    "reinforce_plus_plus": Choice("reinforce_pp"),
    "reinforce_plus_plus_baseline": Choice("reinforce_pp", {"baseline": True}),
    "reinforce": Choice("reinforce_pp"),
    "reinforce_baseline": Choice("reinforce_pp", {"baseline": True}),
    "remax": Choice("rloo", how="the baseline is the mean of the other samples, not a greedy one"),
    "opo": Choice("rloo", how="the baseline is not weighted by length"),
    "gpg": Choice("dr_grpo", how="the ratio is clipped"),
    "pt": Choice("sft"),
    "rm": Choice("reward_model"),
    "reward": Choice("reward_model"),
    "cpo": Choice("simpo", how="CPO's loss without a length normalisation is not here"),
}
# What frameworks call a loss -> the algorithm, or the normalisation of the one that is chosen.
LOSSES: dict[str, Choice] = {
    "sigmoid": Choice("dpo"),
    "hinge": Choice("dpo", how="the margin is not cut off: dpo's loss is a sigmoid"),
    "kto_pair": Choice("dpo", how="pairs are compared with each other"),
    "grpo": Choice("", {"normalise": "sequence"}),
    "bnpo": Choice("", {"normalise": "token"}, how="normalised over the update, not a micro-batch"),
    "dapo": Choice("", {"normalise": "token"}),
    "dr_grpo": Choice("", {"normalise": "fixed"}),
    "vanilla": Choice(""),
    "ppo": Choice(""),
}
_RL_TYPES = ("num_generations", "reward_funcs", "max_completion_length")


def algorithm_types() -> dict[str, type[Algorithm]]:
    """Return the name of each of our algorithms -> its class."""
    classes = get_args(get_args(AnyAlgorithm)[0])
    return {get_args(one.model_fields["type"].annotation)[0]: one for one in classes}


def choose_algorithm(draft: Draft) -> None:
    """Set `algorithm` from the settings that name an algorithm, a loss or a level of ratios."""
    draft.recipe["algorithm"] = {"type": "sft"}
    named = draft.all("algorithm.type")
    if named and draft.framework.name in ("axolotl", "llama_factory"):
        _apply(draft, named[0], str(named[0].value))
    elif draft.framework.name in ("trl", "axolotl", "llama_factory"):
        _put(draft, ALGORITHMS.get(_guess(draft), Choice(_guess(draft))))
    elif draft.file.trainer in ("sft", "dpo", "kto", "rm"):
        _put(draft, ALGORITHMS.get(draft.file.trainer, Choice(draft.file.trainer)))
    elif named:
        _apply(draft, named[0], str(named[0].value))
    else:
        _put(draft, Choice("ppo" if draft.framework.name in ("verl", "openrlhf") else "grpo"))
    for given in draft:
        if draft.framework.name == "axolotl" and given.name == "reward_model":
            if given.value is True:
                draft.set("algorithm.type", "reward_model")
                draft.note(given, "algorithm.type", "reward_model")
            else:
                draft.leave(given, Status.NOT_NEEDED, "it is off")
    for given in draft.all("algorithm.loss_type"):
        values = given.value if isinstance(given.value, list) else [given.value]
        _apply(draft, given, str(values[0]), table=LOSSES)
    for given in draft.all("algorithm.ratio_level"):
        if is_rl(draft) and str(given.value).startswith("sequence"):
            draft.set("algorithm.type", "gspo")
            draft.note(given, "algorithm.type", "gspo")
        else:
            draft.leave(given, Status.NOT_NEEDED, "ratios are those of tokens anyway")


def is_rl(draft: Draft) -> bool:
    """Return whether the chosen algorithm samples."""
    return issubclass(algorithm_types()[draft.get("algorithm.type")], PolicyGradientConfig)


def _guess(draft: Draft) -> str:
    """Return the algorithm of a file that names none, by the class or the settings it has."""
    if draft.file.trainer:
        return draft.file.trainer
    names = {given.name.rpartition(".")[2].lstrip("-") for given in draft.file.settings}
    if names & set(_RL_TYPES):
        return "grpo"
    return "dpo" if names & {"beta", "label_smoothing", "rpo_alpha"} else "sft"


def _apply(draft: Draft, given: Given, name: str, *, table: dict[str, Choice] = ALGORITHMS) -> None:
    name = name.lower().replace("-", "_").removesuffix("_loss")
    choice = table.get(name) or (Choice(name) if name in algorithm_types() else None)
    if choice is None:
        draft.leave(given, Status.UNKNOWN, f"no algorithm here is {name!r}")
        draft.need("algorithm.type", f"{given.name} is {name!r}, which is not here: choose one")
        if draft.get("algorithm.type") == "sft" and table is ALGORITHMS:
            draft.set("algorithm.type", "grpo")
        return
    _put(draft, choice)
    key = "algorithm.type" if choice.type else "algorithm.normalise"
    draft.note(given, key, draft.get(key, choice.type), how=choice.how)


def _put(draft: Draft, choice: Choice) -> None:
    if choice.type:
        draft.set("algorithm.type", choice.type)
    for key, value in choice.more.items():
        draft.set(f"algorithm.{key}", value)


def set_kl(draft: Draft) -> None:
    """Set the KL penalty from its switch, place and weight, which frameworks spread widely."""
    given = _coefficient(draft)
    weight = _default_weight(draft) if given is None else given.value
    if weight is None or not isinstance(weight, int | float) or weight <= 0 or not is_rl(draft):
        why = "no KL penalty: it is off, or its weight is 0"
        for one in (one for key in KL_KEYS for one in draft.all(key)):
            # TRL's beta is the weight of the penalty in RL, and that of the reference elsewhere.
            if is_rl(draft) or "preference.beta" not in draft.keys(one):
                draft.leave(one, Status.NOT_NEEDED, why)
        return
    title = draft.framework.title
    if given is not None:
        draft.take(given, "algorithm.kl.coefficient", weight)
    else:
        draft.set("algorithm.kl.coefficient", weight)
        draft.comments["algorithm.kl.coefficient"] = f"the default of {title}"
    kinds = [one for one in draft.left if fold(one.name).endswith("kl_ctrl.type")]
    if draft.framework.name == "verl" and not any(one.value == "adaptive" for one in kinds):
        keys = ("algorithm.kl.target", "algorithm.kl.horizon")
        draft.leave_all(keys, Status.NOT_NEEDED, "the weight is fixed: the type is not adaptive")
    for one in kinds:
        draft.note(one, "algorithm.kl", one.value)
    in_reward = _is_in_reward(draft)
    if in_reward:
        draft.set("algorithm.kl.place", "reward")
        if not draft.has("algorithm.kl.estimator"):
            draft.set("algorithm.kl.estimator", "k1")
            draft.comments["algorithm.kl.estimator"] = f"the default of {title} in the reward"
    for one in draft.all("algorithm.kl.estimator"):
        name = ESTIMATORS.get(str(one.value).rstrip("+"), "")
        if not name or (name == "k1" and not in_reward):
            how = f"{one.value} has no useful gradient in the loss, or is not here"
            draft.take(one, "algorithm.kl.estimator", "k3", how=how)
        else:
            draft.take(one, "algorithm.kl.estimator", name)
    place = "reward" if in_reward else "loss"
    for key in ("algorithm.kl.enabled", "algorithm.kl.place"):
        for one in draft.all(key):
            draft.note(one, "algorithm.kl.place", place)
    for one in draft.all("algorithm.kl.coefficient"):
        draft.leave(one, Status.NOT_NEEDED, f"the penalty is in the {place}, where it is not read")


def _default_weight(draft: Draft) -> float | None:
    """Return the weight of a penalty that is on unless the file says otherwise; None if it is off.

    verl's switches say where the penalty is, and its weight has a default.
    """
    if any("algorithm.kl.coefficient" in draft.keys(one) for one in draft.file.settings):
        is_on = draft.framework.name == "verl" and (
            draft.value("algorithm.kl.enabled") is True
            and not any(fold(one.name).endswith("kl_loss_coef") for one in draft.file.settings)
        )
        return 0.001 if is_on else None
    if draft.framework.name == "verl":
        is_on = True in (draft.value("algorithm.kl.enabled"), draft.value("algorithm.kl.place"))
        return 0.001 if is_on else None
    if draft.framework.name == "trl" and draft.get("algorithm.type") == "rloo":
        return 0.05
    return 0.01 if draft.framework.name == "openrlhf" else None


def _coefficient(draft: Draft) -> Given | None:
    """Return the setting of the weight that is in force; None if the penalty is off."""
    found = draft.all("algorithm.kl.coefficient")
    if draft.framework.name in ("verl", "slime", "miles"):
        wanted = "kl_loss_coef" if draft.value("algorithm.kl.enabled") is True else None
        if wanted is None and (draft.framework.name != "verl" or _is_in_reward(draft)):
            wanted = "kl_coef"
        found = [
            one
            for one in found
            if wanted and one.name.replace("-", "_").rpartition(".")[2].lstrip("_") == wanted
        ]
    return found[0] if found else None


def _is_in_reward(draft: Draft) -> bool:
    enabled = draft.value("algorithm.kl.enabled") is True
    if draft.framework.name == "verl":
        return draft.value("algorithm.kl.place") is True and not enabled
    if draft.framework.name in ("slime", "miles", "openrlhf"):
        return not enabled
    return draft.get("algorithm.type") in ("ppo", "rloo")
