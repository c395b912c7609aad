"""Analyse an exception that no rule recognises.

The result names the library and the call that failed, the last frame of the user's code, what the
message says was wrong, which process failed first and what the others reported. It is *read*, not
*recognised*: it says where to look, not what to change. All functions are pure.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from homeostat.health.failures.code_owners import PACKAGES, owner_of, package_of
from homeostat.health.failures.details import Detail, details_of
from homeostat.health.failures.forms import engines, installation, trainers, validation
from homeostat.health.failures.frames import Frame
from homeostat.health.failures.library_messages import LibraryMessage, known_message
from homeostat.health.failures.other_failures import others_than
from homeostat.health.failures.places import by_place
from homeostat.health.failures.text import raising_code, whole_message
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.log import Log

_ROLES = (
    ("reward function", ("reward", "score", "verif", "grade", "judge", "accuracy")),
    ("data code", ("data", "collat", "tokeniz", "preprocess", "map_fn", "getitem", "prompt",
                   "load")),
    ("plugin", ("plugin", "callback", "hook", "extension", "custom")),
    ("config", ("config", "argument", "settings", "yaml")),
)  # fmt: skip

# Kind of a detail -> the illness that it usually means.
_CAUSES = (
    installation.CAUSES
    | engines.CAUSES
    | validation.CAUSES
    | trainers.CAUSES
    | {
        "device": "device-mismatch",
        "dtype": "dtype-mismatch",
        "shape": "shape-mismatch",
        "import": "library-version-mismatch",
        "setting": "unknown-setting",
        "unset": "setting-missing",
        "mistyped": "setting-wrong-type",
        "file": "path-missing",
        "keys": "checkpoint-keys-mismatch",
        "resume": "checkpoint-world-size-change",
        "quantised": "quantised-weights-misused",
        "exclusive": "settings-exclusive",
        "pickle": "object-not-picklable",
        "disk": "disk-full-or-quota",
    }
)
_ENTRIES = ("_call", "_wrapped", "__call__", "wrapper", "decorate", "main", "<module>")
_STDLIB = frozenset(sys.stdlib_module_names)
# Errors raised by code that uses a name, item or argument which does not exist.
_CODE_ERRORS = frozenset(("AttributeError", "IndexError", "KeyError", "NameError", "TypeError"))
# A model's own code is downloaded with its weights and written for one version of transformers.
_OF_MODELS = ("modeling_", "tokenization_", "configuration_", "processing_")
# Functions that select a model's code by its name.
_CHOOSES_MODEL = ("auto/configuration_auto.py", "auto/auto_factory.py", "models/registry.py")
# Only low-precision matrix products require multiples of 8 or 16.
_FP8 = ("FP8", "fp8", "Float8", "Transformer Engine", "mat1", "mat2")
# Only a programming error raises these. 12 of the 18 known cases in libraries were bugs.
_SLIPS = frozenset({"slip", "none", "type", "attribute"})
_LOADS_WEIGHTS = ("state_dict", "from checkpoint", "checkpoint")
# Words for what the work is divided among.
_PLACES = ("world", "gpus", "devices", "ranks")
# Files and functions in which launchers check their own arguments, and the errors that they raise
# then. A settings file also has other code, so there the function must be one that checks.
_CHECKS_SETTINGS = re.compile(
    r"(?:^|[/_])arg(?:ument)?s\.py$|validate_(?:args|cfg|config|arguments)$"
)
_HOLDS_SETTINGS = re.compile(r"(?:^|[/_])configs?\.py$|/configs?/[^/]{1,80}\.py$")
_CHECKS = re.compile(r"^(?:__post_init__|finalize|_{0,2}(?:validate|check|verify)\w{0,60})$")
_REFUSALS = ("AssertionError", "ValueError")
# A text used as a number: Python takes "8" % 2 for formatting.
_TEXT = re.compile(r"TypeError: (?:not all arguments converted during string|.{0,60}'str')")
# Exceptions that libraries raise only to refuse settings.
_REFUSES = frozenset({"MisconfigurationException", "ConfigurationError", "InvalidConfigError"})
# Words for the size of a rollout, which is divided among ranks like a batch.
_SAMPLED = ("sample", "prompt", "rollout", "generation", "replica", "outputs")
# Code that takes the first item of something that may be empty: next(iter(train_dataset)).
_TAKES_FIRST = re.compile(r"\bnext\(iter\((?P<of>[\w.\[\]'\"]{1,80})\)")
_ROWS = ("data", "loader", "rows", "samples", "examples", "train", "eval", "prompts")
_VIEW = re.compile(r"(\d{1,15}) values cannot be viewed as \[([\d, -]{1,80})\]")


@dataclass(frozen=True, slots=True)
class ExceptionReading:
    """The parts of an exception, from its frames and its message.

    `library` is the package in which it was raised, "" if that was the user's own code. `call` is
    the function of that package which the code above it called. `raised` is the innermost frame.
    `user` is the deepest frame of the user's code, and `role` what that code seems to be. `others`
    are sentences about the other processes, and about exceptions that followed from this one.
    `code` is the line of code that raised, "" if the log does not quote it. `place` is the illness
    found from the place (places.py), `stated` the library's message that the exception has, unless
    the user's own code raised it.
    """

    failure: Traceback
    library: str
    call: Frame | None
    raised: Frame | None
    user: Frame | None
    role: str
    details: tuple[Detail, ...]
    others: tuple[str, ...]
    code: str = ""
    place: tuple[str, str] | None = None
    stated: LibraryMessage | None = None

    @property
    def wrong(self) -> str:
        """Return what the message says was wrong; "" if no form fits it.

        If several forms report the same names, only the first is included.
        """
        told: dict[object, str] = {}
        for one in self.details:
            told.setdefault((one.kind, frozenset(one.names) or one.words), one.words)
        return "; ".join(told.values())

    @property
    def where(self) -> str:
        """Return a sentence about the call that failed and the code that led to it."""
        parts = []
        if self.library and self.call is not None:
            parts.append(f"{self.library} failed in {_called(self.call)}")
        elif self.raised is not None:
            parts.append(f"it was raised in {self.raised}")
        if self.user is not None and self.user != self.raised:
            parts.append(f"your {self.role} led to it at {self.user}")
        return "; ".join(parts)

    @property
    def likely(self) -> tuple[str, str] | None:
        """Return the illness that place and message usually mean, and why; None if unknown."""
        if self.place is not None:
            return self.place
        if self._checks_settings and _TEXT.search(self.failure.error):
            return "setting-wrong-type", "a setting is a text, but the code uses it as a number"
        if self.stated is not None:
            return self.stated.names[0], f"a message of {self.stated.raised_by} says so"
        for one in self.details:
            name = _CAUSES.get(one.kind) or self._by_owner(one)
            if one.kind == "import" and not _STDLIB.isdisjoint(one.names):
                # If a module of Python itself is missing, the installation is damaged; no version
                # is wrong.
                name = ""
            if one.kind == "resume" and "parallel" not in one.words:
                name = "checkpoint-keys-mismatch"
            if name == "shape-mismatch" and any(w in self.failure.message for w in _LOADS_WEIGHTS):
                name = "checkpoint-keys-mismatch"
            if name == "shape-mismatch" and _is_part_of_head(one.words):
                name = "heads-not-dividing-tp"
            if name:
                return name, one.words
        if (rows := self._without_rows) is not None:
            return "dataset-empty", f"the code takes the first item of {rows}, which is empty"
        if self._fails_to_import:
            return "library-version-mismatch", f"{self.library} cannot be imported"
        if self._refuses_settings or self.failure.name in _REFUSES:
            return "settings-exclusive", "the check of the settings refused them"
        refused = next((one for one in self.details if one.kind == "refused"), None)
        return ("settings-exclusive", refused.words) if refused is not None else None

    @property
    def also(self) -> tuple[str, ...]:
        """Return the illnesses that the message can state other than the likely one."""
        return self.stated.names[1:] if self.stated is not None and self.place is None else ()

    @property
    def is_loose(self) -> bool:
        """Return whether the first guess is more often right than this reading.

        Messages say "not supported" about versions, GPUs and models as often as about settings: of
        13 such readings none was right, and 11 of the guesses were.
        """
        if self.place is not None or self.stated is not None:
            return False
        return [one.kind for one in self.details if one.kind in _CAUSES][:1] == ["unsupported"]

    @property
    def _without_rows(self) -> str | None:
        """Return the name of the rows whose first one was requested although there are none."""
        found = _TAKES_FIRST.search(self.code) if self.failure.name == "StopIteration" else None
        if found is None or not any(word in found["of"].lower() for word in _ROWS):
            return None
        return found["of"]

    @property
    def _fails_to_import(self) -> bool:
        """Return whether a package's own code failed while it was imported.

        This code is the same for every user, so it fails because of the other installed packages.
        """
        is_module = self.raised is not None and self.raised.function == "<module>"
        return is_module and bool(self.library) and self.failure.name in _CODE_ERRORS

    @property
    def _refuses_settings(self) -> bool:
        """Return whether a library's check of its own arguments refused them."""
        is_told = bool(self.failure.message) and self._checks_settings
        return is_told and self.failure.kind in _REFUSALS

    @property
    def _checks_settings(self) -> bool:
        """Return whether the exception was raised where a library checks its arguments."""
        if self.raised is None or self.is_users_own:
            return False
        file, function = self.raised.file.replace("\\", "/"), self.raised.function or ""
        is_checked = _HOLDS_SETTINGS.search(file) and _CHECKS.search(function)
        return bool(is_checked) or any(map(_CHECKS_SETTINGS.search, (file, function)))

    @property
    def is_users_own(self) -> bool:
        """Return whether the user's own code raised the exception."""
        return self.raised is not None and _is_users(self.raised.file)

    @property
    def _is_libraries_own(self) -> bool:
        """Return whether a library raised it and no user code other than a script led to it."""
        return bool(self.library) and (self.user is None or self.role == "script")

    def _raised_in(self, files: tuple[str, ...]) -> bool:
        return self.raised is not None and self.raised.file.replace("\\", "/").endswith(files)

    def _by_owner(self, detail: Detail) -> str:
        """Return the illness if something is missing. It depends on whose code needed it."""
        if detail.kind == "argument" and any("reward" in name for name in detail.names[:1]):
            return "reward-fn-signature"
        if detail.kind in ("argument", "attribute") and "None" not in detail.words:
            # One library uses a name that another one does not have: their versions do not match.
            is_theirs = not self.is_users_own or _asks_library(detail)
            return "library-version-mismatch" if is_theirs else ""
        if detail.kind in _SLIPS and self._is_libraries_own:
            return "known-bad-version"
        if detail.kind == "divide":
            if any(word in self.failure.error for word in _FP8):
                return "fp8-shape-not-divisible"
            return _undivided(detail.words)
        if detail.kind == "key" and self._raised_in(_CHOOSES_MODEL):
            return "architecture-unsupported"
        if detail.kind == "key" and self.role == "data code":
            return "column-missing"
        package = installation.optional_package(detail.names[0]) if detail.kind == "name" else ""
        if package == "flash-attn":
            # Code imports these names if it can, and continues without them if it cannot.
            return "flash-attention-missing"
        if detail.kind == "name" and not self.is_users_own:
            if package:
                return "package-missing"
            return "library-version-mismatch" if self.library else ""
        return ""


def _asks_library(detail: Detail) -> bool:
    """Return whether a known package or a class lacks the name; scripts rarely define classes."""
    if detail.kind == "attribute":
        return detail.names[0].partition(".")[0] in PACKAGES
    return detail.kind == "argument" and "does not take" in detail.words and _is_class(detail)


def _is_class(detail: Detail) -> bool:
    called = detail.names[0] if len(detail.names) > 1 else ""
    return "__init__" in called or called.endswith("from_pretrained()") or called[:1].isupper()


def read_exception(failure: Traceback, around: Sequence[Traceback], log: Log) -> ExceptionReading:
    """Read the exception that ended a run. `around` are all failures at the log's end, in order."""
    library, call = _failed_call(failure)
    user = failure.deepest_user_frame
    code, message = raising_code(failure, log), whole_message(failure, log)
    is_users_own = bool(failure.frames) and _is_users(failure.frames[-1].file)
    return ExceptionReading(
        failure=failure,
        library=library,
        call=call,
        raised=failure.frames[-1] if failure.frames else None,
        user=user,
        role=role_of(user, caller=failure.caller) if user is not None else "",
        details=details_of(failure.kind, message),
        others=tuple(others_than(failure, around)),
        code=code,
        place=by_place(failure, around, code),
        stated=None if is_users_own else known_message(message),
    )


def _failed_call(failure: Traceback) -> tuple[str, Frame | None]:
    """Return the library that raised, and the function through which it was called."""
    frames = [frame for frame in failure.frames if owner_of(frame.file) != "stdlib"]
    if not frames or owner_of(frames[-1].file) == "user":
        return "", None
    library = package_of(frames[-1].file)
    entered = frames[-1]
    for frame in reversed(frames[:-1]):
        if package_of(frame.file) != library:
            break
        entered = frame
    # Modules of torch call each other through __call__ wrappers, and commands start in main. In
    # these cases the innermost function is more informative.
    is_wrapper = entered.function.startswith(_ENTRIES)
    return library, frames[-1] if is_wrapper else entered


def role_of(frame: Frame, *, caller: str = "") -> str:
    """Return what the user's code seems to be, from the names of caller, function and file."""
    file = frame.file.replace("\\", "/").rpartition("/")[2].lower()
    for text in (caller.lower(), frame.function.lower(), file):
        for role, words in _ROLES:
            if any(word in text for word in words):
                return role
    return "script"


def _is_users(file: str) -> bool:
    """Return whether code is the user's own: not a library's, and not downloaded with a model."""
    name = file.replace("\\", "/").rpartition("/")[2]
    return owner_of(file) == "user" and not name.startswith(_OF_MODELS)


def _is_part_of_head(words: str) -> bool:
    """Return whether a tensor that was to be viewed as whole heads holds only a fraction of one
    head.

    Attention views a row as [..., -1, head size]. If the tensor parallel degree exceeds the number
    of key-value heads, each rank holds a part of a head.
    """
    found = _VIEW.search(words)
    if found is None:
        return False
    sizes = [int(part) for part in found[2].split(",") if part.strip().lstrip("-").isdigit()]
    if sizes.count(-1) != 1 or sizes[-1] == -1 or len(sizes) < 3:
        return False
    unit = math.prod(size for size in sizes if size > 0)
    count = int(found[1])
    return 0 < count < unit and unit % count == 0


def _undivided(words: str) -> str:
    """Return the illness for a number that cannot be divided, from the words for that number."""
    low = words.lower()
    if "head" in low:
        return "heads-not-dividing-tp"
    if "batch" in low:
        return "batch-not-divisible"
    if any(word in low for word in _PLACES):
        return "parallel-degrees-mismatch"
    if "expert" in low or "ep_size" in low:
        return "expert-parallel-not-dividing"
    if "layer" in low or "pipeline" in low:
        return "parallel-sizes-inconsistent"
    if "tensor" in low or "tp_size" in low:
        return "heads-not-dividing-tp"
    if not any(c.isalpha() for c in low.replace("is not divisible by", "")):
        # Megatron and vLLM print this for anything that tensor parallelism splits.
        return "parallel-sizes-inconsistent"
    if any(word in low for word in ("gpu", "parallel", "dp_size", "cp_size", "sp_size", "ulysses")):
        return "parallel-sizes-inconsistent"
    return "batch-not-divisible" if any(word in low for word in _SAMPLED) else ""


def _called(frame: Frame) -> str:
    """Return a library's function with its file, relative to the package's folder."""
    path = frame.file.replace("\\", "/")
    parts = path.split("/")
    package = package_of(frame.file)
    start = (
        len(parts) - 1 - parts[::-1].index(package) if package in parts else max(0, len(parts) - 2)
    )
    return f"{frame.function or '?'} ({'/'.join(parts[start:])}:{frame.line})"
