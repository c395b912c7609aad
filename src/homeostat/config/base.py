"""Base classes of the config: strict validation, and the metadata of a key.

A key carries its help text and its *resume class*, which says whether it may differ when a run
directory is resumed: `free` changes nothing that was computed, `warn` changes the run from this
point on, and `forbid` would turn the resumed run into a different experiment.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)

from homeostat.config.kind import RunKind

# Limits of Linux and macOS.
MAX_PATH_BYTES = 1023
MAX_NAME_BYTES = 255
# Numbers are handed to numpy and torch, whose integers have 64 bits.
MAX_INTEGER = 2**63 - 1

ResumeClass = Literal["free", "warn", "forbid"]

_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Settings(BaseModel):
    """Base of all config classes: unknown keys are refused, and values are never coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )

    @field_validator("*")
    @classmethod
    def _fit_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"the number is too large: at most {MAX_INTEGER}")
        return value


class Algorithm(Settings):
    """Base of all algorithms. `kind` says which training loop runs it."""

    kind: ClassVar[RunKind]


class RowAlgorithm(Algorithm):
    """Base of the algorithms that train on given rows, in contrast to those that sample."""

    @property
    def rows_per_example(self) -> int:
        """Return the number of rows, such as a pair, that are one example and stay together."""
        return 1


def key(
    default: Any = ...,
    *,
    help: str,
    resume: ResumeClass = "forbid",
    share: bool | Literal["name", "all"] = False,
    **limits: Any,
) -> Any:
    """Declare a config key with its help text, resume class and limits (`ge`, `gt`, `le`, ...).

    `share` only matters for text (config/loading/shareable.py): True shows the value in reports and
    bug reports, "name" shows only its last part, as for a path, and "all" shows a dict as it is.
    """
    if not isinstance(default, (Settings, dict, list)):
        limits["default"] = default
    else:
        limits["default_factory"] = lambda: default
    extra: dict[str, Any] = {"resume": resume}
    if share:
        extra["share"] = share
    return Field(description=help, json_schema_extra=extra, **limits)


def parse_bytes(value: object) -> object:
    """Convert '20GB' or '512MiB' to a number of bytes; leave other values for the type to check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = match.group(2).upper() if match else "?"
    if match is None or unit not in _BYTE_UNITS:
        raise ValueError(f"{value!r} is not a size. Write a number of bytes, '20GB' or '512MiB'")
    return int(float(match.group(1)) * _BYTE_UNITS[unit])


def check_path(text: str) -> str:
    """Refuse a path that no file system can hold, so that no later file operation fails on it."""
    if not text or "\0" in text:
        raise ValueError("a path must not be empty or contain a NUL character")
    name = max(text.split("/"), key=len)
    if len(os.fsencode(text)) > MAX_PATH_BYTES or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise ValueError(
            f"a path may have at most {MAX_PATH_BYTES} bytes, and each name in it at most "
            f"{MAX_NAME_BYTES}"
        )
    return text


def is_file_name(name: object) -> bool:
    """Return whether a name read from a file can be that of a file in a folder.

    A name with a slash could lead out of the folder; one that cannot be encoded (half a surrogate
    pair, which JSON allows) is refused by the operating system's calls.
    """
    if not isinstance(name, str) or name in (".", "..") or "/" in name:
        return False
    try:
        check_path(name)
    except ValueError:
        return False
    return True


PathText = Annotated[str, AfterValidator(check_path)]
ByteSize = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
