"""Find the illness from the place where an exception was raised.

Some messages mean nothing alone. An `EOFError` where torch reads a file means that the file is
incomplete. `KeyError: 'rollout'` in code that reads settings means that a setting is missing. For a
failed request, the server matters. All functions are pure.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from homeostat.health.failures.code_owners import PACKAGES, owner_of, package_of
from homeostat.health.failures.frames import Frame
from homeostat.health.failures.requests_failed import failed_request
from homeostat.health.failures.tracebacks import Traceback

Named = tuple[str, str]

# Variable names that scripts use for settings: cfg, self.config, model_cfg, args_config.
_HOLDS = r"\b\w{0,40}(?:cfg|config|conf|hparams|hyperparameters|settings)\w{0,20}"
# Code that reads a setting: cfg["obs_groups"], config["actor"].pop("class_name").
_LOOKS_UP = r"(?:\[['\"]?\w{1,60}['\"]?\]|\.\w{1,60}(?:\(['\"]\w{1,80}['\"])?)"
_READS_SETTING = re.compile(rf"{_HOLDS}(?P<chain>{_LOOKS_UP}{{1,5}})")
_KEY = re.compile(r"(?:\[|\.(?:pop|__getitem__)\()['\"](\w{1,80})['\"]")
_UNPACKS_SETTINGS = re.compile(rf"\*\*{_HOLDS}")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w{1,80})'")
_IS_NONE = re.compile(r"'NoneType' object (?:is not subscriptable|has no attribute)")
_NONE_LACKS = re.compile(r"'NoneType' object has no attribute '(?P<name>\w{1,80})'")
_GETS_NONE = re.compile(r"(?P<of>\w{1,80})\.get\(['\"](?P<key>\w{1,80})['\"]\)\.(?P<name>\w{1,80})")
_SETTINGS_FILE = re.compile(r"(?:cfg|conf|settings|hparams)\w{0,20}\.py$")
_IMPORTED_FROM = re.compile(
    r"cannot import name '\w{1,80}' from (?:partially initialized module )?'(?P<module>\w{1,80})'"
    r"[^()\n]{0,20}(?:\([^()/\n]{0,80}\) )?\((?P<file>[^()\n]{1,300}\.py)\)"
)
_STDLIB = frozenset(sys.stdlib_module_names)
# Modules of Python that users often name a script after. Their attributes hardly ever change.
_LACKS = re.compile(
    r"module '(?P<module>logging|random|copy|queue|types|token|tokenize|json|datetime|socket"
    r"|statistics|profile|select|secrets|email|html|code|calendar|csv|struct|numbers|operator)'"
    r" has no attribute '(?P<name>\w{1,80})'"
)
# Classes that hold settings as attributes.
_LACKS_SETTING = re.compile(
    r"'(?:types\.)?(?:SimpleNamespace|Namespace|AttrDict|DotDict|EasyDict|Munch)' object has no "
    r"attribute '(?P<name>\w{1,80})'"
)
_ENVIRONMENT = ("<frozen os>", "/os.py")
# Variables that launchers set for each process: torchrun, Slurm, MPI.
_LAUNCHERS = re.compile(
    r"(?:LOCAL_|NODE_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)|SLURM_\w{1,40}"
    r"|OMPI_\w{1,60}|PMI_\w{1,40}"
)
# Functions in which engines load weights, and the errors there that no checkpoint should cause.
_TAKES_WEIGHTS = ("weight_loader", "load_weights", "load_fused_expert_weights")
_LOADER_SLIPS = frozenset({"IndexError", "UnboundLocalError", "TypeError"})
_CUT_SHORT = frozenset({"EOFError", "BadZipFile", "UnpicklingError"})
_READS_WEIGHTS = ("torch/serialization.py", "torch/_weights_only_unpickler.py")
_SHARDED_STATE = "distributed/checkpoint/state_dict.py"
# Hub clients, and the names of the exceptions that they raise if they cannot reach the hub.
_HUBS = frozenset({"modelscope", "modelscope_hub", "huggingface_hub", "openmind_hub"})
_UNREACHED = re.compile(r"Network|Deadline|Timeout|Connect|Offline|MaxRetries")
_COLLATES = "data/_utils/collate.py"
# A worker sends tensors as names or handles, and the process that trains asks the worker for the
# memory behind them. Only a worker that has ended does not answer.
_READS_ROWS = ("torch/utils/data/dataloader.py",)
_ASKS_WORKER = ("multiprocessing/resource_sharer.py", "torch/multiprocessing/reductions.py")
_UNANSWERED = frozenset(
    {"ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError",
     "FileNotFoundError"}
)  # fmt: skip
_REWARDS = ("reward", "score", "verif", "grade", "judge")
_ENGINES = ("generat", "complet", "rollout", "engine", "vllm", "sglang", "chat", "infer", "sample")


def by_place(failure: Traceback, around: Sequence[Traceback], code: str) -> Named | None:
    """Return the illness that the place shows, and why; None if it shows none.

    `around` are the failures at the end of the log; `code` is the line of code that raised.
    """
    return (
        _shadowed(failure)
        or _of_settings(failure, code)
        or _of_library(failure)
        or _of_hub(failure)
        or _of_request(failure, around)
    )


def _shadowed(failure: Traceback) -> Named | None:
    """Recognise a user's file that is imported in place of a Python module or a known package."""
    lacks = _LACKS.search(failure.message)
    if lacks is not None and failure.name == "AttributeError":
        module = lacks["module"]
        own = f"Python's own {module} has {lacks['name']}"
        why = f"{own}: a file {module}.py was imported in its place"
        return "package-shadowed", why
    found = _IMPORTED_FROM.search(failure.message)
    if found is None or owner_of(found["file"]) != "user":
        return None
    file = found["file"].replace("\\", "/").lower()
    is_file = file.endswith(f"/{found['module']}.py") and "/lib/" not in file
    if is_file and found["module"] in _STDLIB | PACKAGES:
        return "package-shadowed", f"{found['file']} was imported in place of {found['module']}"
    return None


def _of_settings(failure: Traceback, code: str) -> Named | None:
    """Recognise code that reads a setting which does not exist."""
    name, words = failure.name, failure.message
    looked_up = [found["chain"] for found in _READS_SETTING.finditer(code)]
    if name == "KeyError":
        key = words.strip("'\" ")
        if any(key in _KEY.findall(chain) for chain in looked_up):
            return "setting-missing", f"the settings have no {key}"
        if _LAUNCHERS.fullmatch(key):
            return "launcher-variables-missing", f"no launcher set the variable {key}"
        if failure.frames and _ends(failure.frames[-1], *_ENVIRONMENT):
            return "setting-missing", f"the environment variable {key} is not set"
    lacks = _LACKS_SETTING.search(words)
    if lacks is not None and failure.frames and owner_of(failure.frames[-1].file) == "user":
        return "setting-missing", f"the settings have no {lacks['name']}"
    none_lacks = _NONE_LACKS.search(words)
    is_below = none_lacks is not None and _reads_below(none_lacks["name"], code)
    is_key = _IS_NONE.search(words) and any(len(_KEY.findall(chain)) > 1 for chain in looked_up)
    if is_below or is_key:
        return "setting-missing", "a section of the settings that the code reads is empty"
    if none_lacks is not None and (key := _got_none(none_lacks["name"], failure, code)):
        return "setting-missing", f"the settings have no {key}"
    unknown = _UNEXPECTED.search(words)
    if unknown is not None and _UNPACKS_SETTINGS.search(code):
        return "unknown-setting", f"the settings have {unknown[1]}, which is not known"
    return None


def _reads_below(name: str, code: str) -> bool:
    """Return whether code reads a setting with this name in a section, as in config.data.train.

    A section has no methods: of config.tokenizer.encode() an object is None, not a section.
    """
    return re.search(rf"{_HOLDS}{_LOOKS_UP}{{1,5}}\.{name}\b(?!\()", code) is not None


def _got_none(name: str, failure: Traceback, code: str) -> str:
    """Return the setting that code asked for with get() and did not get; "" if it asked for none.

    It is a setting if the name of the variable or of the file says so.
    """
    file = failure.frames[-1].file if failure.frames else ""
    for found in _GETS_NONE.finditer(code):
        is_setting = re.fullmatch(_HOLDS, found["of"]) or _SETTINGS_FILE.search(file)
        if found["name"] == name and is_setting:
            return found["key"]
    return ""


def _of_library(failure: Traceback) -> Named | None:
    """Recognise exceptions whose meaning is known at certain places in torch or an engine."""
    if not failure.frames:
        return None
    raised = failure.frames[-1]
    if failure.name in _CUT_SHORT and _any_ends(failure.frames, _READS_WEIGHTS):
        return "checkpoint-file-damaged", "the file that torch reads is empty or ends too early"
    if failure.name == "KeyError" and _ends(raised, _SHARDED_STATE) and "optim" in raised.function:
        return (
            "optimizer-state-mismatch",
            "the optimizer holds parameters that the model does not have, as one does that was "
            "built before the model was sharded or wrapped",
        )
    takes_weights = raised.function.endswith(_TAKES_WEIGHTS) and owner_of(raised.file) != "user"
    if takes_weights and failure.name in _LOADER_SLIPS:
        return (
            "known-bad-version",
            "the engine's own weight loader failed: it does not fit this model or this split",
        )
    is_asking = _any_ends(failure.frames, _ASKS_WORKER)
    if failure.name in _UNANSWERED and is_asking and _any_ends(failure.frames, _READS_ROWS):
        return (
            "dataloader-worker-failed",
            "a DataLoader worker ended before its rows were read: it was killed or it crashed",
        )
    if "NoneType" in failure.message and _ends(raised, _COLLATES):
        return "user-code-failed", "a row is None: the dataset's __getitem__ returned nothing"
    return None


def _of_hub(failure: Traceback) -> Named | None:
    """Recognise a client of a model hub that could not reach the hub."""
    raised = failure.frames[-1] if failure.frames else None
    if (
        raised is None
        or package_of(raised.file) not in _HUBS
        or not _UNREACHED.search(failure.name)
    ):
        return None
    return "hub-unreachable", (
        "the name was looked up on a hub of models, which was not reached: a path that does not "
        "exist is taken for such a name, too"
    )


def _of_request(failure: Traceback, around: Sequence[Traceback]) -> Named | None:
    """Recognise a failed request by the names of the user's functions that made it.

    Clients chain their own exception to that of a lower layer, so all of them are searched.
    """
    frames = [frame for one in (failure, *around) for frame in one.frames]
    mine = [frame.function.lower() for frame in frames if owner_of(frame.file) == "user"]
    is_reward = any(word in function for function in mine for word in _REWARDS)
    is_engine = any(word in function for function in mine for word in _ENGINES)
    return failed_request(failure, is_reward=is_reward, is_engine=is_engine)


def _any_ends(frames: Iterable[Frame], files: tuple[str, ...]) -> bool:
    return any(_ends(frame, *files) for frame in frames)


def _ends(frame: Frame, *files: str) -> bool:
    return frame.file.replace("\\", "/").endswith(files)
