"""Which framework wrote a log: by its marks, its modules, its formats and its names.

Frameworks build on each other: a log of axolotl shows TRL's and transformers' modules too. So
evidence counts by how far up a framework stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from homeostat.health.frameworks import ALL, HOMEOSTAT, UNKNOWN, Framework
from homeostat.health.log import Log
from homeostat.health.names import unprefixed
from homeostat.health.readers.common_names import METRICS, SETTINGS, folded
from homeostat.health.readers.settings import fold_setting
from homeostat.health.view import Kind
from homeostat.observe.names import describe

# What others build on weighs less; all that are not named here stand on top.
_WEIGHTS = {
    "ray": 0.25,
    "vllm": 0.3,
    "sglang": 0.3,
    "deepspeed": 0.3,
    "megatron": 0.4,
    "transformers": 0.5,
    "trl": 0.75,
}
# Engines and back ends that trainers use: one of those that shows itself is the one that was run.
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
}
_ENOUGH = 2.0
_HEAD, _TAIL = 4_000, 2_000
_PREFERENCE = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")
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
# Beginnings of names in rows of TRL: GRPO and its like, SFT, preferences.
_OF_TRL = ("completion", "reward", "clip_ratio", "mean_token_accuracy", "logps/")
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
    """The framework with the strongest evidence, or UNKNOWN."""
    if _is_ours(names) or "homeostat" in forms:
        return HOMEOSTAT
    # A framework shows itself when it starts and when it fails.
    log = Log((*log.lines[:_HEAD], *log.lines[_HEAD:][-_TAIL:]))
    folded_settings = {fold_setting(name) for name in settings}
    found: dict[str, float] = {}
    shown: set[str] = set()
    for table in ALL.values():
        if table is HOMEOSTAT or table is UNKNOWN:
            continue
        weight = _WEIGHTS.get(table.name, 1.0)
        marks = weight * _marks(table, log=log, forms=forms, settings=folded_settings)
        points = marks + _names(table, names=names, forms=forms, settings=folded_settings)
        # Names that a framework and what it is built on share speak for the latter.
        points -= 0.01 * weight
        # Without a mark of its own, shared names must say as much for a base as for anyone.
        if points >= (_ENOUGH * weight if marks else _ENOUGH - 0.01):
            found[table.name] = points
            if marks:
                shown.add(table.name)
    # What shows itself goes before all that it is built on, however much of that is seen.
    beneath = {
        name
        for above in shown
        for name in _beneath(above)
        # DeepSpeed takes the settings of transformers, but is a part that others use.
        if _WEIGHTS.get(above, 1.0) >= _WEIGHTS.get(name, 1.0)
    }
    if any(_WEIGHTS.get(name, 1.0) >= _WEIGHTS["trl"] for name in shown):
        beneath |= _PARTS
    over = {name: points for name, points in found.items() if name not in beneath}
    return ALL[max(over, key=lambda name: over[name])] if over else UNKNOWN


def _beneath(name: str) -> set[str]:
    """What a framework is built on, by way of others, too."""
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
    """What only this framework prints: its marks, its modules, its formats."""
    # Paths of Windows are written with the other stroke.
    marks = sum(1 for mark in table.marks if log.has(mark, mark.replace("/", "\\")))
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
    """What it shares with few: metrics and settings whose names are not everybody's."""
    special = [name for name in names if folded(name) not in METRICS]
    points = 0.0
    if special:
        known = [name for name in special if {name, unprefixed(name)} & table.metrics.keys()]
        points += 6.0 * len(known) / len(special)
    if "dict" in forms and "loss" in names:
        # The plain rows of the HF trainer, and what TRL's trainers add to them.
        is_trl = any(name.startswith(_OF_TRL) for name in names)
        points += _ENOUGH * (table.name == ("trl" if is_trl else "transformers"))
    theirs = {fold_setting(name) for spellings in table.settings.values() for name in spellings}
    stated = [name for name in settings if name in theirs and name not in SETTINGS]
    return points + min(4.0, sum(2.0 if "." in name else 0.5 for name in stated))


def _is_ours(names: Collection[str]) -> bool:
    if not {"time/step", "learning_rate"} <= set(names):
        return False
    known = sum(1 for name in names if describe(name) is not None)
    return known >= 0.9 * len(names)


def kind_of(
    names: Collection[str], settings: Mapping[str, object], *, log: Log, framework: Framework
) -> Kind:
    """What the run does. PPO with a reward model is RL; DPO and its kin are preference."""
    if any(name in names for name in _PREFERENCE):
        return Kind.PREFERENCE
    if any(name in _RL_METRICS or name.startswith(_RL_PREFIXES) for name in names):
        return Kind.RL
    words = {str(value).lower() for value in settings.values() if isinstance(value, str)}
    if words & {"dpo", "kto", "orpo", "simpo", "ipo"}:
        return Kind.PREFERENCE
    if words & _RL_WORDS or "rollout.samples_per_prompt" in settings:
        return Kind.RL
    if log.has("grpo_trainer.py", "ppo_trainer.py", "RolloutManager", "generate_sequences"):
        return Kind.RL
    is_sft = any(word == "sft" or "sft_trainer" in word for word in words) or log.has(
        "sft_trainer", "SFT dataset", "/sft"
    )
    if framework.name in _RL_FRAMEWORKS and not is_sft:
        return Kind.RL
    return Kind.SFT if is_sft or "train/loss" in names else Kind.UNKNOWN
