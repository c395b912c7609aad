"""Conditions that a signature may name in `when`, where words alone do not decide.

Each is a pure function of the view and, where it takes one, of the argument that the stanza gives.
`when = { is_shared = true }` names one without an argument. Several must all hold.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypedDict

from homeostat.health.signatures import counts, misfits, places, progress
from homeostat.health.view import RunView

# The word alone, after a progress bar that it cuts off, or with the number of the process or job.
_KILLED = re.compile(
    r"^(?:.{0,400}/(?:s|it|example|step)\])?\s{0,8}Killed\s*$"
    r"|: line \d{1,6}:\s{1,8}\d{1,9} Killed\s"
    r"|^\[\d{1,4}\]\s{0,4}[+-]?\s{1,8}(?:\d{1,9}\s{1,8})?[Kk]illed\s"
)
_LAST_LINES = 6
_PAD_AND_EOS = re.compile(r"pad_token_id\W{1,5}(\d{1,9})\D.{0,60}?eos_token_id\W{1,5}(\d{1,9})")
_REFUSED_ROWS = re.compile(r"(?<!\d)(\d{1,15}) of (\d{1,15}) rows cannot be used")
# A package's own name; a part of one without code may be missing in another version. Packages that
# load their parts when they are asked for have no location, either.
_BARE_FOLDER = re.compile(
    r"cannot import name '\w{1,120}' from '(?!transformers'|diffusers'|optimum')\w{1,80}' "
    r"\(unknown location\)"
)
_IMPORTED_FROM = re.compile(
    r"cannot import name '\w{1,120}' from '(\w{1,80})['.][^(]{0,120}\(([^()]{1,400}\.py)\)"
)
# Packages whose names people give to their own files and folders.
_OFTEN_SHADOWED = frozenset(
    (
        "accelerate", "datasets", "deepspeed", "peft", "ray", "tokenizers", "torch", "torchvision",
        "transformers", "trl", "vllm", "wandb",
    )
)  # fmt: skip
_MODULE = re.compile(r"No module named ['\"]?(\w{1,80})\.\w")
# Names that users give to their own folders, and packages that several projects fill: a part that
# is not there was never installed, or lies elsewhere.
_OWN_NAMES = frozenset(
    (
        "app", "common", "config", "configs", "core", "data", "dataset", "evaluation", "lib",
        "model", "models", "modules", "scripts", "src", "test", "tests", "tools", "train",
        "trainer", "training", "util", "utils",
    )
)  # fmt: skip
_SHARED_ROOTS = _OWN_NAMES | {
    "azure", "backports", "google", "hydra_plugins", "megatron", "nvidia", "ruamel",
}  # fmt: skip
_UNRECOGNISED = re.compile(r"Unrecognized model in ([A-Za-z][\w-]{1,60})/[\w.-]{1,100}\. Should")
_FOLDERS = frozenset(
    (
        "checkpoint", "checkpoints", "ckpt", "ckpts", "content", "data", "exp", "experiments",
        "lora", "model", "models", "out", "output", "outputs", "results", "runs", "save", "saves",
        "weights", "work",
    )
)  # fmt: skip
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON = re.compile(r"python3(?:\.\d{1,2})?")
_FILE = re.compile(r'File "([^"]{1,400}\.py)", line \d')
# Lines that import something and are looked at.
_MAX_IMPORTS = 200
_IMPORTS = re.compile(r"\s{0,40}(?:import (\w{1,60})|from (\w{1,60})[\w.]{0,200} import )")
_TWO_SHAPES = re.compile(
    r"shape torch\.Size\(\[(\d{1,9})((?:, \d{1,9}){0,3})\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[(\d{1,9})((?:, \d{1,9}){0,3})\]\)"
)
# No layer is that wide; vocabularies are.
_LEAST_VOCABULARY = 31_000
_BATCH_PRODUCT = re.compile(r"world_size ?\d{1,9} != \d{1,9} \* \d{1,9} \* 1(?!\d)")
# Places of an out-of-memory error that belong to the engine, not to the trainer.
_ENGINE_PLACES = {"wake", "capture", "kv", "profile", "engine", "load"}
# Tensors that do not fit and are looked at.
_MAX_SHAPES = 50
# transformers lists weights that it did not find, and with them buffers that it computes itself.
_NEW_WEIGHTS = "newly initialized: ["
# A key that is a type of model, such as qwen2_5_vl: names of models have sizes, dots and slashes.
_MODEL_TYPE = re.compile(
    r"KeyError: '(?=qwen|llama|mistral|gemma|deepseek|phi|glm)"
    r"(?![^']{0,80}(?:chat|instruct|\d[bB]\b))[\w-]{1,60}'"
)
# Where libraries look for it.
_LOOKED_UP = ("model_type", "CONFIG_MAPPING", "configuration_auto")
_QUOTED = re.compile(r"'([^']{1,200})'")
_KEYS_DIFFER = "key(s) in state_dict: "
_DOUBLE_QUOTED = re.compile(r'"([^"]{1,200})"')
_BUFFERS = (
    "inv_freq", "masked_bias", ".attn.bias", ".attention.bias", "position_ids", "rotary_emb.scale",
)  # fmt: skip
# Megatron prints its arguments in two columns.
_FOLDER = re.compile(r"(?<![\w-])(load|save) \.{3,80} (\S{1,300})")
# Settings of engines inside the trainer; a server is given its own when it is started.
_COLOCATED_ONLY = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
    "vllm_data_parallel_size",
)


def holds(view: RunView, when: Mapping[str, Any]) -> bool:
    """Return whether all conditions of a signature hold."""
    return all(_holds(view, name, argument) for name, argument in when.items())


def _holds(view: RunView, name: str, argument: Any) -> bool:
    predicate = PREDICATES[name]
    return predicate(view) if argument is True else predicate(view, argument)


class Order(TypedDict):
    """Patterns of two kinds of lines."""

    texts: Sequence[str]
    others: Sequence[str]


def stands_first(view: RunView, order: Order) -> bool:
    """Return whether the first line with one of the texts stands before all of the others."""
    first, other = view.log.first(*order["texts"]), view.log.first(*order["others"])
    return first is not None and (other is None or first.number <= other.number)


def shell_says_killed(view: RunView) -> bool:
    """Return whether one of the last lines is what a shell prints if its program was killed."""
    said = [line.text for line in view.log.lines if line.text.strip()]
    return any(_KILLED.search(text) is not None for text in said[-_LAST_LINES:])


def log_has(view: RunView, texts: Sequence[str]) -> bool:
    """Return whether the log has one of the patterns, which unlike `context` is not quoted."""
    return view.log.has(*texts)


def ends_with(view: RunView, texts: Sequence[str]) -> bool:
    """Return whether the log's last line has one of the patterns, and no metric was logged."""
    said = next((line for line in reversed(view.log.lines) if line.text.strip()), None)
    newest = view.log.last(*texts)
    return not view.metrics and newest is not None and newest == said


def nothing_was_trained(view: RunView) -> bool:
    """Return whether no metric was logged."""
    return not view.metrics


def deepspeed_counts_one_process(view: RunView) -> bool:
    """Return whether DeepSpeed's product of batch sizes was made with a single process."""
    lines = view.log.find("gradient_acc_step * world_size")
    return any(_BATCH_PRODUCT.search(line.text) is not None for line in lines)


def no_gradient_seen(view: RunView) -> bool:
    """Return whether no gradient norm above zero was logged: then the warning may be true."""
    norms = view.series("grad_norm")
    return norms is None or not bool((norms.values > 0).any())


def pad_is_eos(view: RunView) -> bool:
    """Return whether the pad token is the end-of-sequence token, by settings or a printed line."""
    pad, eos = view.raw_settings.get("pad_token_id"), view.raw_settings.get("eos_token_id")
    if pad is not None and eos is not None:
        return pad == eos
    found = [_PAD_AND_EOS.search(line.text) for line in view.log.find("pad_token_id")]
    return any(match is not None and match[1] == match[2] for match in found)


def all_rows_refused(view: RunView) -> bool:
    """Return whether every row that was seen is among those that cannot be used."""
    lines = view.log.find("rows cannot be used:")
    found = [match for line in lines if (match := _REFUSED_ROWS.search(line.text)) is not None]
    return all(match[1] == match[2] for match in found)


def some_rows_refused(view: RunView) -> bool:
    """Return whether at least one row that was seen can be used."""
    return not all_rows_refused(view)


def imports_bare_folder(view: RunView) -> bool:
    """Return whether a package was imported that is a folder without code."""
    return any(_BARE_FOLDER.search(line.text) for line in view.log.find("(unknown location)"))


def imports_own_file(view: RunView) -> bool:
    """Return whether a package's name led to a file of the project, by the path in the message."""
    found = (_IMPORTED_FROM.search(line.text) for line in view.log.find("cannot import name"))
    return any(match is not None and _is_own(match[1], match[2]) for match in found)


def _is_own(package: str, path: str) -> bool:
    """Return whether the path is neither an installed package's nor that of its own checkout."""
    parts = _parts(path)
    if package not in _OFTEN_SHADOWED or _INSTALLED & set(parts) or parts.count(package) > 1:
        return False
    # The folder that holds the package; a single file of that name is no checkout of it.
    holder = parts[parts.index(package) - 1] if package in parts else ""
    return holder not in ("src", "python", "pytorch")


def _parts(path: str) -> list[str]:
    return path.lower().replace("\\", "/").split("/")


def imports_namesake(view: RunView) -> bool:
    """Return whether an installed package has the name of a module of the project's own."""
    found = (_IMPORTED_FROM.search(line.text) for line in view.log.find("cannot import name"))
    return any(
        match is not None and match[1] in _OWN_NAMES and bool(_INSTALLED & set(_parts(match[2])))
        for match in found
    )


def lacks_part_of_own(view: RunView) -> bool:
    """Return whether the last module not found is part of one with a project's usual name.

    Python names the part only if it found a module of the first name.
    """
    line = view.log.last("No module named")
    found = _MODULE.search(line.text) if line is not None else None
    return found is not None and found[1] in _OWN_NAMES


def script_hides_module(view: RunView) -> bool:
    """Return whether an import led to a user's file of that name.

    Either a library or Python itself imports the file, or the file imports itself.
    """
    lines = view.log.lines
    for line in islice(view.log.find("import "), _MAX_IMPORTS):
        at = bisect_left(lines, line.number, key=lambda one: one.number)
        if 0 < at < len(lines) - 1 and _leads_astray(*(one.text for one in lines[at - 1 : at + 2])):
            return True
    return False


def _leads_astray(frame: str, source: str, following: str) -> bool:
    found = _IMPORTS.match(source)
    before, after = _FILE.search(frame), _FILE.search(following)
    if found is None or before is None or after is None:
        return False
    name, path, own = found[1] or found[2], _parts(before[1]), _parts(after[1])
    if own[-1] != f"{name.lower()}.py" or _is_library(own):
        return False
    return _is_library(path) or path[-1] == own[-1]


def _is_library(parts: Sequence[str]) -> bool:
    return bool(_INSTALLED & set(parts)) or any(map(_PYTHON.fullmatch, parts[:-1]))


def lacks_part_of_package(view: RunView) -> bool:
    """Return whether the last module that was not found belongs to a package that was found."""
    line = view.log.last("No module named")
    found = _MODULE.search(line.text) if line is not None else None
    return found is not None and found[1] not in _SHARED_ROOTS


def hub_model_unrecognised(view: RunView) -> bool:
    """Return whether an unrecognised model looks like a name on the hub, not like a folder."""
    found = (_UNRECOGNISED.search(line.text) for line in view.log.find("Unrecognized model in"))
    return any(match is not None and match[1].lower() not in _FOLDERS for match in found)


def lacks_model_type(view: RunView) -> bool:
    """Return whether a key that was not found is a type of model, and not in the user's own table.

    A project's own tables of models, templates or weights have similar keys.
    """
    is_type = any(_MODEL_TYPE.search(line.text) for line in view.log.find("KeyError: '"))
    return is_type and places.not_raised_in_own_code(view, _LOOKED_UP)


def trains_lora(view: RunView) -> bool:
    """Return whether an adapter is trained, by the settings or the log's words."""
    rank = view.number("lora.rank") or 0.0
    raw = next((view.raw_settings[k] for k in view.raw_settings if k.endswith("lora_rank")), 0)
    return rank > 0 or str(raw) not in ("0", "", "None") or view.log.has("lora_rank", "lora rank")


def mixes_vllm_modes(view: RunView) -> bool:
    """Return whether TRL's colocate mode is set together with the address of a vLLM server."""
    raw = view.raw_settings
    server = raw.get("vllm_server_host") or raw.get("vllm_server_base_url")
    said = view.log.has("vllm_mode: colocate", "vllm_mode=colocate", "vllm_mode colocate")
    served = view.log.has("vllm_server_host", "vllm_server_base_url")
    return (raw.get("vllm_mode") == "colocate" and bool(server)) or (said and served)


def serves_colocated(view: RunView) -> bool:
    """Return whether TRL's server mode is set with settings that only colocated engines read."""
    last = {str(key).rpartition(".")[2]: value for key, value in view.raw_settings.items()}
    given = [name for name in _COLOCATED_ONLY if last.get(name) not in (None, False)]
    return str(last.get("vllm_mode", "")).strip("'\"") == "server" and bool(given)


def vocabularies_differ(view: RunView) -> bool:
    """Return whether all tensors that do not fit differ in their first axis, a vocabulary's."""
    lines = list(islice(view.log.find("copying a param with shape"), _MAX_SHAPES))
    found = [_TWO_SHAPES.search(line.text) for line in lines]
    return bool(found) and all(match is not None and _is_vocabulary(match) for match in found)


def _is_vocabulary(match: re.Match[str]) -> bool:
    is_wide = min(int(match[1]), int(match[3])) >= _LEAST_VOCABULARY
    return is_wide and match[1] != match[3] and match[2] == match[4]


def only_buffers_differ(view: RunView) -> bool:
    """Return whether all names that are missing or unexpected are buffers that a model computes."""
    lines = list(islice(view.log.find(_KEYS_DIFFER), _MAX_SHAPES))
    listed = [line.text.partition(_KEYS_DIFFER)[2].rstrip(" .`") for line in lines]
    names = [name for part in listed for name in _DOUBLE_QUOTED.findall(part)]
    is_whole = all(part.endswith('"') for part in listed)
    fits = bool(names) and not view.log.has("size mismatch for")
    return is_whole and fits and all(name.endswith(_BUFFERS) for name in names)


def new_weights_matter(view: RunView) -> bool:
    """Return whether a weight that was not found is more than a buffer that the model computes."""
    lines = islice(view.log.find(_NEW_WEIGHTS), _MAX_SHAPES)
    found = [_QUOTED.findall(line.text.partition(_NEW_WEIGHTS)[2]) for line in lines]
    names = [name for names in found for name in names]
    return not names or not all(name.endswith(_BUFFERS) for name in names)


def loads_elsewhere(view: RunView) -> bool:
    """Return whether Megatron loads from another folder than the one that the run saves to."""
    lines = (*view.log.find("load ..."), *view.log.find("save ..."))
    found = {match[1]: match[2] for line in lines if (match := _FOLDER.search(line.text))}
    return "load" not in found or found["load"] != found.get("save")


def trainer_is_out_of_memory(view: RunView) -> bool:
    """Return whether memory ran out, and in none of the places that belong to the engine."""
    return view.log.has(*places.OOM) and not places.places(view.log) & _ENGINE_PLACES


PREDICATES: dict[str, Callable[..., bool]] = {
    one.__name__: one
    for one in (
        all_rows_refused,
        deepspeed_counts_one_process,
        ends_with,
        hub_model_unrecognised,
        imports_bare_folder,
        imports_namesake,
        imports_own_file,
        lacks_model_type,
        lacks_part_of_own,
        lacks_part_of_package,
        loads_elsewhere,
        log_has,
        mixes_vllm_modes,
        new_weights_matter,
        no_gradient_seen,
        nothing_was_trained,
        only_buffers_differ,
        pad_is_eos,
        script_hides_module,
        serves_colocated,
        shell_says_killed,
        some_rows_refused,
        stands_first,
        trainer_is_out_of_memory,
        trains_lora,
        vocabularies_differ,
        counts.is_concurrency_bound,
        counts.is_preempted_often,
        counts.is_stuck_after_update,
        counts.pool_had_room,
        counts.ranks_disagree,
        counts.seen_at_least,
        counts.sleep_freed_nothing,
        counts.sleep_leaks,
        counts.stops_at_start,
        counts.waited_long,
        misfits.cut_for_other_ranks,
        misfits.four_bits_packed,
        misfits.token_rows_differ,
        places.is_fragmented,
        places.is_held_elsewhere,
        places.is_shared,
        places.not_raised_in_own_code,
        places.oom_at,
        places.oom_nowhere,
        places.raised_beyond_user,
        places.raised_in_library,
        places.tried_at_least_gib,
        progress.is_not_only_tuning,
        progress.preparation_goes_on,
    )
}
