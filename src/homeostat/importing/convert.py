"""Convert the settings of another framework into a recipe, by the tables of health/frameworks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePath

from homeostat.config.loading.schema import known_keys
from homeostat.config.native import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.health.frameworks import ALL, Framework
from homeostat.health.frameworks.needless import why_needless
from homeostat.health.frameworks.planned import FOREIGN, PLANNED
from homeostat.importing.algorithms import choose_algorithm, is_rl, set_kl
from homeostat.importing.critic import set_critic
from homeostat.importing.defaults import OF_TRAINING_ARGUMENTS, adapter_of, defaults_of, replaced_by
from homeostat.importing.draft import Draft
from homeostat.importing.entries import ForeignFile, Given, Imported, Status
from homeostat.importing.fitting import fit
from homeostat.importing.megatron import set_megatron
from homeostat.importing.outcome import Converted, plain
from homeostat.importing.python_script import ADAPTER
from homeostat.importing.recognise import fold
from homeostat.importing.sizes import is_quantised, set_sizes
from homeostat.importing.sources import set_rewards, set_sources
from homeostat.importing.values import CONVERTERS

# Keys of the tables that a recipe has under another name.
_PLACES = {"engine.name": "engine.type", "rollout.max_prompt_tokens": "data.max_length"}
_SECTIONS_OF_RL = ("rollout.", "engine.", "sync.", "rewards.", "critic.", "debug.")
# Why settings that only other frameworks need have no key here.
_PER_EPOCH = {
    "evals_per_epoch": "eval.interval_steps",
    "saves_per_epoch": "checkpoint.interval_steps",
}
_WHY_FOREIGN = {
    "cluster.port": "processes on one machine find each other",
    "data.template": "the tokenizer's chat template is used; model.chat_template names another",
    "engine.colocate": "the native engine shares the trainer's device and weights",
    "engine.max_model_length": "it follows from data.max_length and rollout.max_new_tokens",
    "rollout.max_total_tokens": "it follows from data.max_length and rollout.max_new_tokens",
    "rollout.micro_batch_rows": "the engine batches requests by itself",
    "trainer.backend.pipeline_parallel_size": "fsdp splits every layer over all ranks, without "
    "stages that wait for each other; long rows are split by context_parallel_size",
    "trainer.backend.tensor_parallel_size": "fsdp splits every layer over all ranks; long rows are "
    "split by trainer.backend.sequence_parallel_size and context_parallel_size",
    "trainer.dynamic_batch": "micro-batches are always filled up to a number of tokens",
    "trainer.logprob_max_tokens": "rows are scored in the micro-batches of training",
    "trainer.logprob_micro_batch_rows": "rows are scored in the micro-batches of training",
    "trainer.mini_batch_rows": "updates follow from the sizes of a step",
    "data.train_on_prompt": "prompts never have a loss; a source of type text trains all tokens",
}


def convert(
    file: ForeignFile, framework: Framework, *, stem: str, devices: int | None = None
) -> Imported:
    """Return the recipe that a file's settings make, and what became of each of them."""
    draft = Draft(framework, file, devices)
    choose_algorithm(draft)
    _set_engine(draft)
    set_sources(draft)
    set_rewards(draft)
    _set_adapter(draft)
    set_kl(draft)
    set_critic(draft)
    set_sizes(draft)
    set_megatron(draft)
    _set_names(draft, stem)
    for given in draft:
        _convert_one(draft, given)
    _set_defaults(draft)
    if not draft.get("model.path"):
        draft.set("model.path", "models/base")
        draft.need("model.path", "the file names no model that can be read: name yours")
    problems = fit(draft)
    order = {id(given): index for index, given in enumerate(file.settings)}
    entries = sorted(draft.entries, key=lambda entry: order[id(entry.given)])
    return Imported(
        framework.name,
        draft.recipe,
        tuple(entries),
        tuple(draft.needed),
        draft.comments,
        tuple(problems),
    )


@cache
def _own_keys() -> frozenset[str]:
    """Return the keys and sections that a recipe accepts."""
    leaves = [path.replace("[]", "").split(".") for path in known_keys(RunConfig)]
    return frozenset(".".join(one[:end]) for one in leaves for end in range(1, len(one) + 1))


def _set_engine(draft: Draft) -> None:
    for given in draft.all("engine.name"):
        _apply(draft, given, "engine.name")
    is_vllm = draft.framework.name == "openrlhf" and draft.has("engine.memory_share")
    if is_rl(draft) and is_vllm and not is_quantised(draft):
        draft.set("engine.type", "vllm")


def _set_adapter(draft: Draft) -> None:
    """Begin the section `lora`, or enter its settings as not needed."""
    given, rank = draft.value("lora.enabled"), draft.value("lora.rank", 0)
    objects = [one for one in draft.left if one.value == ADAPTER]
    if objects:
        has_adapter = True
    elif given is None:
        is_named = any(one.name == "lora_r" for one in draft.file.settings)
        by_default = draft.framework.name == "llama_factory"
        has_adapter = by_default or (
            bool(rank) and not (draft.framework.name == "trl" and is_named)
        )
    else:
        has_adapter = given is True or str(given).lower() in ("lora", "qlora")
    if not has_adapter:
        keys = tuple(key for key in (*_own_keys(), "lora.enabled") if key.startswith("lora."))
        draft.leave_all(keys, Status.NOT_NEEDED, "no adapter is trained")
        return
    draft.set("lora", {})
    for one in (*draft.all("lora.enabled"), *objects):
        draft.note(one, "lora", "an adapter is trained")
    if draft.framework.name == "llama_factory" and not draft.has("lora.alpha"):
        draft.set("lora.alpha", 2 * (rank or 8))
        draft.comments["lora.alpha"] = "the default of LLaMA-Factory: twice the rank"


def _set_names(draft: Draft, stem: str) -> None:
    """Set name and runs_dir, from the run's name or from where it is written."""
    folders, names = draft.all("runs_dir"), draft.all("name")
    name = str(names[0].value) if names else stem
    for given in folders:
        folder = PurePath(str(given.value))
        if not names:
            name = folder.name or stem
        parent = str(folder.parent)
        if parent not in (".", "/"):
            draft.set("runs_dir", parent)
        draft.note(given, "runs_dir", f"{draft.get('runs_dir', 'runs')}/{_named(name)}")
    for given in names:
        draft.note(given, "name", _named(name))
    draft.recipe = {"name": _named(name), **draft.recipe}


def _named(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:100] or "imported"


def _convert_one(draft: Draft, given: Given) -> None:
    """Enter one setting: by its key, as a switch, as needless, or as not known."""
    if given not in draft.left:
        return
    keys = _fitting_keys(draft, draft.keys(given))
    for key in keys:
        if key in _own_keys() or key in _PLACES:
            _apply(draft, given, key)
            return
        if key in PLANNED:
            _enter_planned(draft, given, key)
            return
    if _switched(draft, given) or _per_epoch(draft, given):
        return
    why = why_needless(fold(given.name))
    for key in keys:
        why = _WHY_FOREIGN.get(key, "") or why
        if key in FOREIGN:
            why = why or f"only {draft.framework.title} needs it: {FOREIGN[key].lower()}"
    if why:
        draft.leave(given, Status.NOT_NEEDED, why.rstrip("."))
    else:
        draft.leave(given, Status.UNKNOWN, "no key of a recipe is known for it")


def _fitting_keys(draft: Draft, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return our keys for a name, first those that belong to the chosen kind of training."""
    if is_rl(draft):
        return tuple(sorted(keys, key=lambda key: not key.startswith("algorithm.")))
    # Where nothing is sampled, a pass over the samples of a step is one over the data.
    keys = tuple("trainer.epochs" if key == "trainer.epochs_per_step" else key for key in keys)
    return tuple(sorted(keys, key=lambda key: key.startswith(("algorithm.kl", *_SECTIONS_OF_RL))))


def _per_epoch(draft: Draft, given: Given) -> bool:
    """Enter a number of events in an epoch: how many steps that has is known with the data."""
    key = _PER_EPOCH.get(fold(given.name))
    if key is None:
        return False
    why = f"set it to the steps of an epoch / {given.value}; `homeostat check` counts the steps"
    draft.leave(given, Status.APPROXIMATED, why, key=key)
    return True


def _switched(draft: Draft, given: Given) -> bool:
    """Enter a switch of the tables, bf16 for one; `auto` is as good as on."""
    name = fold(given.name)
    found = draft.framework.switched(name, True if given.value == "auto" else given.value)
    if found is None:
        if name in draft.framework.flags:
            draft.leave(given, Status.NOT_NEEDED, "it is off")
            return True
        return False
    key, value = found
    if value in ("fp16", "fp8"):
        how = "fp16 is not here" if value == "fp16" else "see trainer.fp8 for FP8"
        draft.take(given, key, "bf16", how=how)
    else:
        draft.take(given, key, "auto" if given.value == "auto" else value)
    return True


def _enter_planned(draft: Draft, given: Given, key: str) -> None:
    is_off = given.value in (False, 0, 1, 1.0, "none", "cpu") and key != "rollout.max_turns"
    if is_off and given.value is not True:
        draft.leave(given, Status.NOT_NEEDED, "it is off, as here")
    else:
        draft.leave(given, Status.PLANNED, PLANNED[key].rstrip("."), key=key)


def _apply(draft: Draft, given: Given, key: str) -> None:
    place = _PLACES.get(key, key)
    if not is_rl(draft) and place.startswith(_SECTIONS_OF_RL):
        draft.leave(given, Status.NOT_NEEDED, "nothing is sampled")
        return
    if _is_of_other_engine(draft, place):
        draft.leave(given, Status.NOT_NEEDED, "the native engine has no such setting")
        return
    if draft.get(place) is not None and key not in ("observe.sinks", "engine.name"):
        draft.leave(given, Status.NOT_NEEDED, f"{place} is set by another setting")
        return
    outcome = CONVERTERS.get(key, plain)(given, draft)
    if not isinstance(outcome, Converted):
        draft.leave(given, outcome.status, outcome.why)
        return
    for more, value in outcome.more.items():
        draft.set(more, value)
    if outcome.value is None and outcome.more:
        more, value = next(iter(outcome.more.items()))
        draft.note(given, more, value, how=outcome.how)
    else:
        draft.take(given, place, outcome.value, how=outcome.how)


def _is_of_other_engine(draft: Draft, place: str) -> bool:
    """Return whether a key belongs to vLLM, and the recipe samples with the native engine."""
    is_native = draft.get("engine.type", "native") == "native" and place != "engine.type"
    section, _, name = place.partition(".")
    return section == "engine" and is_native and name not in NativeEngineConfig.model_fields


def _set_defaults(draft: Draft) -> None:
    """State the framework's defaults that differ from ours, and the upper clip range."""
    title = ALL[draft.framework.name].title
    low = draft.get("algorithm.clip_low")
    if low is not None and draft.get("algorithm.clip_high") is None:
        draft.set("algorithm.clip_high", low)
    algorithm = draft.get("algorithm.type")
    defaults = defaults_of(draft.framework.name, algorithm=algorithm, is_rl=is_rl(draft))
    if draft.file.plain_arguments:
        defaults |= OF_TRAINING_ARGUMENTS
    is_object = any(one.value == ADAPTER for one in draft.file.settings)
    if draft.get("lora") is not None:
        defaults |= adapter_of(draft.framework.name, is_object=is_object, is_rl=is_rl(draft))
    has_schedule = draft.get("trainer.schedule.type") is not None
    for key, value in defaults.items():
        other = replaced_by(key)
        is_end = key.endswith("min_lr_share") and has_schedule
        if draft.get(key) is None and not is_end and not (other and draft.get(other) is not None):
            draft.set(key, value)
            is_peft = key.startswith("lora.") and is_object
            why = f"the default of {'peft' if is_peft else title}"
            if key == "rollout.samples_per_prompt" and draft.framework.name != "trl":
                why += " is 1, and 2 is the least here"
            draft.comments.setdefault(key, why)
    if draft.get("trainer.schedule") is not None and not draft.get("trainer.schedule.type"):
        draft.set("trainer.schedule.type", "cosine")
    if draft.get("critic.schedule") is not None and not draft.get("critic.schedule.type"):
        draft.set("critic.schedule.type", "constant")


def stem_of(path: Path) -> str:
    """Return a name for a recipe that was made from a file."""
    return _named(path.stem)
