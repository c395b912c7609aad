"""Detect which framework wrote a log: by its marks, its modules, its formats and its names.

Frameworks build on each other: a log of axolotl also shows the modules of TRL and transformers. So
evidence for a framework counts less if others are built on it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from homeostat.health.frameworks import ALL, HOMEOSTAT, UNKNOWN, Framework
from homeostat.health.log import Log, LogLine
from homeostat.health.names import unprefixed
from homeostat.health.readers.values.common_names import SETTINGS, metric_of
from homeostat.health.readers.values.settings import fold_setting
from homeostat.health.view import Kind
from homeostat.observe.names import describe

# Frameworks on which others are built count less. All that are not listed count 1.
_WEIGHTS = {
    "ray": 0.25,
    "vllm": 0.3,
    "sglang": 0.3,
    "deepspeed": 0.3,
    "megatron": 0.4,
    "transformers": 0.5,
    "trl": 0.75,
}
# Engines and back ends that trainers use. If a trainer is visible, the trainer was run.
_PARTS = {"ray", "vllm", "sglang", "deepspeed", "megatron"}
_FORMS = {
    "verl": "verl",
    "slime": "slime",
    "titan": "torchtitan",
    "prime": "prime_rl",
    "mmengine": "xtuner",
    "litgpt": "litgpt",
    "megatron": "megatron",
    "swift": "ms_swift",
    "llamafactory": "llama_factory",
    "forge": "torchforge",
    "nemo": "nemo_rl",
    "openrlhf": "openrlhf",
    "roll": "roll",
}
# The folder of a Python environment, above lib/python3.10, Lib\\site-packages or bin/python.
_ENVIRONMENT = re.compile(
    r"([/\\])[^/\\\s]{1,100}[/\\](?=lib[/\\](?:python|site-packages)|bin[/\\]python)",
    re.IGNORECASE,
)
_ENOUGH = 2.0
_HEAD, _TAIL = 4_000, 2_000
_PREFERENCE = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen",
               "preference/chosen_reward", "dpo_loss", "kto_loss", "orpo_loss",
               "simpo_loss")  # fmt: skip
_RL_METRICS = frozenset(
    {
        "reward",
        "reward_std",
        "kl",
        "advantages/mean",
        "sampling/k3",
        "policy/update_kl",
        "completions/mean_length",
        "clip_ratio/region_mean",
        "policy/ratio_mean",
        "rollout/rewards",
    }
)
# Prefixes of metrics that only TRL's trainers add: GRPO and similar, SFT, preferences.
_OF_TRL = ("completion", "reward", "min_reward", "clip_ratio", "mean_token_accuracy", "logps/")
_RL_PREFIXES = ("rollout/", "actor/", "critic/", "grpo_loss/", "ppo/", "objective/")
_RL_WORDS = frozenset({"grpo", "ppo", "rloo", "reinforce", "gspo", "dapo", "reinforce++", "gae"})
_RL_FRAMEWORKS = frozenset(
    {
        "verl",
        "openrlhf",
        "slime",
        "miles",
        "prime_rl",
        "nemo_rl",
        "skyrl",
        "torchforge",
        "areal",
        "chatlearn",
        "lightrft",
        "roll",
    }
)


def framework_of(
    *,
    names: Collection[str],
    log: Log,
    forms: Mapping[str, int],
    settings: Mapping[str, object],
) -> Framework:
    """Return the framework with the strongest evidence, or UNKNOWN."""
    if _is_ours(names) or "homeostat" in forms:
        return HOMEOSTAT
    # A framework is visible in the first lines and, if it fails, in the last ones.
    log = Log(tuple(map(_out_of_environments, (*log.lines[:_HEAD], *log.lines[_HEAD:][-_TAIL:]))))
    folded_settings = {fold_setting(name) for name in settings}
    found: dict[str, float] = {}
    shown: set[str] = set()
    for table in ALL.values():
        if table is HOMEOSTAT or table is UNKNOWN:
            continue
        weight = _WEIGHTS.get(table.name, 1.0)
        marks = weight * _marks(table, log=log, forms=forms, settings=folded_settings)
        points = marks + _names(table, names=names, forms=forms, settings=folded_settings)
        # If a name is shared, prefer the base over the frameworks built on it, but the trainer over
        # the components that it uses, unless the component's own marks are there.
        points -= 0.01 * weight if marks or table.name not in _PARTS else 0.1
        # If a base has no mark, it needs as much evidence from shared names as others do.
        if points >= (_ENOUGH * weight if marks else _ENOUGH - 0.01):
            found[table.name] = points
            if marks:
                shown.add(table.name)
    # A visible framework takes precedence over those it is built on, whatever their evidence.
    beneath = {
        name
        for above in shown
        for name in _beneath(above)
        # DeepSpeed accepts the settings of transformers, but it is a component that others use.
        if _WEIGHTS.get(above, 1.0) >= _WEIGHTS.get(name, 1.0)
    }
    if any(_WEIGHTS.get(name, 1.0) >= _WEIGHTS["trl"] for name in shown):
        beneath |= _PARTS
    over = {name: points for name, points in found.items() if name not in beneath}
    return ALL[max(over, key=lambda name: over[name])] if over else UNKNOWN


def _out_of_environments(line: LogLine) -> LogLine:
    """Take the names of Python environments out of paths: people name them after what they try."""
    if "python" not in line.text and "site-packages" not in line.text:
        return line
    return dataclasses.replace(line, text=_ENVIRONMENT.sub(r"\1", line.text))


def _beneath(name: str) -> set[str]:
    """Return the frameworks on which one is built, directly or indirectly."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        table = ALL[waiting.pop()]
        for under in filter(None, (table.base, *table.built_on)):
            if under not in found and under != name:
                found.add(under)
                waiting.append(under)
    return found


def _marks(
    table: Framework, *, log: Log, forms: Mapping[str, int], settings: Collection[str]
) -> float:
    """Return points for evidence that only this framework prints: marks, modules, formats."""
    # Windows paths have backslashes.
    marks = sum(1 for mark in table.marks if log.has(mark, mark.replace("/", "\\")))
    if table.name not in _PARTS:
        # A setting that is named after a component belongs to the trainer that uses the component.
        marks += sum(1 for mark in table.marks if any(mark.lower() in name for name in settings))
    package = table.name.replace("_", "*")
    modules = log.has(f"/{package}/", f"\\{package}\\", f"[{package}.") if log else False
    form = any(_FORMS.get(form) == table.name for form in forms)
    return 4.0 * min(marks, 3) + 3.0 * modules + 5.0 * form


def _names(
    table: Framework,
    *,
    names: Collection[str],
    forms: Mapping[str, int],
    settings: Collection[str],
) -> float:
    """Return points for evidence that few frameworks share: distinctive metrics and settings."""
    special = [name for name in names if not _is_shared(name)]
    points = 0.0
    if special:
        known = [name for name in special if {name, unprefixed(name)} & table.metrics.keys()]
        # A single plain name such as "acc" may be anyone's.
        is_telling = len(known) > 1 or any("/" in name for name in known)
        points += (6.0 if is_telling else 1.5) * len(known) / len(special)
    if ("dict" in forms and "loss" in names) or ("table" in forms and "Training Loss" in names):
        # The plain rows of HF's trainer, or those with the metrics that TRL's trainers add; both
        # print tables in notebooks.
        is_trl = any(name.startswith(_OF_TRL) for name in names)
        points += _ENOUGH * (table.name == ("trl" if is_trl else "transformers"))
    if not settings:
        return points
    theirs = {fold_setting(name) for spellings in table.settings.values() for name in spellings}
    stated = [name for name in settings if name in theirs and name not in SETTINGS]
    return points + min(4.0, sum(2.0 if "." in name else 0.5 for name in stated))


def _is_shared(name: str) -> bool:
    """Return whether any script may log this name, so that it tells nothing of the framework."""
    found = metric_of(name)
    # Scripts log a KL and an entropy, but few sort them into sections.
    return found is not None and ("/" not in name or found not in {"kl", "entropy"})


def _is_ours(names: Collection[str]) -> bool:
    if not {"time/step", "learning_rate"} <= set(names):
        return False
    known = sum(1 for name in names if describe(name) is not None)
    return known >= 0.9 * len(names)


def kind_of(
    names: Collection[str], settings: Mapping[str, object], *, log: Log, framework: Framework
) -> Kind:
    """Return the kind of the run. PPO with a reward model is RL; DPO and similar are preference."""
    if "reward_model/score_mean" in names:
        return Kind.REWARD_MODEL
    if any(name in names for name in _PREFERENCE):
        return Kind.PREFERENCE
    # Its short log has no other accuracy than the share of pairs that are ordered rightly.
    if framework.name == "llama_factory" and "preference/accuracy" in names:
        return Kind.PREFERENCE
    of_rl = {name for name in names if name in _RL_METRICS or name.startswith(_RL_PREFIXES)}
    # Distillation and variational autoencoders also log a KL.
    if of_rl - {"kl"} or (of_rl and "entropy" in names):
        return Kind.RL
    words = {str(value).lower() for value in settings.values() if isinstance(value, str)}
    if words & {"dpo", "kto", "orpo", "simpo", "ipo"}:
        return Kind.PREFERENCE
    if words & _RL_WORDS or "rollout.samples_per_prompt" in settings:
        return Kind.RL
    if log.has("grpo_trainer.py", "ppo_trainer.py", "RolloutManager", "generate_sequences"):
        return Kind.RL
    # Their notebooks may show no other column than the loss.
    if log.has("GRPOTrainer", "RLOOTrainer") and not log.has("SFTTrainer", "DPOTrainer"):
        return Kind.RL
    is_sft = any(word == "sft" or "sft_trainer" in word for word in words) or log.has(
        "sft_trainer", "SFT dataset", "/sft"
    )
    # Most of these frameworks fine-tune, too. Their RL logs at least one metric of samples beside
    # the loss and the rate, so a log of the two alone is one of fine-tuning.
    is_sft = is_sft or (not of_rl and {"train/loss", "learning_rate"} <= set(names))
    if framework.name in _RL_FRAMEWORKS and not is_sft:
        return Kind.RL
    if of_rl and not {"train/loss", "eval/loss"} & set(names):
        return Kind.RL
    return Kind.SFT if is_sft or "train/loss" in names else Kind.UNKNOWN
