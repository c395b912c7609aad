"""GPUs that a new recipe may be planned for: known names and their memory, or a size."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from homeostat.config.base import parse_bytes
from homeostat.errors import ConfigError, Problem
from homeostat.observe.format import byte_size

MIB = 2**20
# MiB that the driver reports, which is a little less than the data sheet says.
KNOWN: dict[str, int] = {
    "a10": 23028,
    "a10g": 23028,
    "a100-40": 40960,
    "a100-80": 81920,
    "a6000": 49140,
    "b200": 183359,
    "h20": 97871,
    "h100": 81559,
    "h200": 143771,
    "l4": 23034,
    "l40s": 46068,
    "rtx3090": 24576,
    "rtx4090": 24564,
    "rtx5090": 32607,
}
# Other spellings of these names, as `_plain` writes them.
_ALIASES = {"a100": "a100-80", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090"}
_IGNORED = ("nvidia", "geforce", "tesla", "rtx", "sxm", "pcie", "gb")
MAX_COUNT = 8


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one machine that is elsewhere: how many, and the memory of each."""

    memory_bytes: int
    count: int = 1
    name: str = ""

    def describe(self) -> str:
        """Name them for people."""
        size = byte_size(self.memory_bytes)
        one = f"{self.name} ({size})" if self.name else f"a GPU with {size}"
        return one if self.count == 1 else f"{self.count} x {one.removeprefix('a ')}"


def find_gpus(name: str | None, memory: str | None, count: int) -> Gpus | None:
    """Return the GPUs that the options name; None for the device of this machine.

    Raises ConfigError for a name that is not known, a wrong size, or options that exclude others.
    """
    if name is not None and memory is not None:
        what = "the name of a GPU says how much memory it has."
        raise ConfigError([Problem("--memory", what, "Leave one of the two out.")])
    if name is None and memory is None:
        if count > 1:
            what = "several GPUs are planned for by the memory of one of them."
            raise ConfigError([Problem("--gpus", what, "Add --gpu NAME or --memory SIZE.")])
        return None
    if memory is not None:
        return Gpus(_size(memory), count)
    assert name is not None, "one of the two is given"
    found = _known(name)
    return Gpus(KNOWN[found] * MIB, count, found)


def parse_answer(text: str) -> tuple[str | None, str | None]:
    """Return the name of a GPU, or the size of its memory, from what a person typed."""
    text = text.strip()
    is_size = re.fullmatch(r"[\d.]+\s*[kmgt]i?b", text, flags=re.IGNORECASE)
    return (None, text) if is_size else (text, None)


def _known(name: str) -> str:
    names = {_plain(one): one for one in KNOWN} | _ALIASES
    found = names.get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(_plain(name), names, n=1)
        hint = f"Did you mean {names[near[0]]}? " if near else ""
        known = ", ".join(sorted(KNOWN))
        what = f"the GPU {name!r} is not known."
        hint += f"Known are {known}; any other one by --memory, for example --memory 48GiB."
        raise ConfigError([Problem("--gpu", what, hint)])
    return found


def _plain(name: str) -> str:
    """Return a name in lower case, without its maker and without spaces and dashes."""
    text = name.lower()
    for word in _IGNORED:
        text = text.replace(word, "")
    return re.sub(r"[^a-z0-9]", "", text)


def _size(text: str) -> int:
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise ConfigError([Problem("--memory", f"{error}.")]) from None
    assert isinstance(value, int), "of a text"
    return value
