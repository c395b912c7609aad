"""The file that a model's config was read from, so that an error names what the user can fix.

config.json -> its own path and keys
model.gguf  -> the path of the file, and the metadata keys that the config was derived from
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from homeostat.errors import ModelError

_WORD = re.compile(r"\w+")


class BadConfigError(Exception):
    """A config that cannot be used. The message speaks of the keys of config.json."""


class UnsupportedConfigError(BadConfigError):
    """A config that transformers could run and the native decoder cannot."""


@dataclass(frozen=True, slots=True)
class ConfigOrigin:
    """`keys`: the file's own names for keys of config.json. `way_out`: what to do about a model
    that the native decoder cannot run."""

    file: str = "config.json"
    keys: Mapping[str, str] = field(default_factory=dict)
    way_out: str = "Set model.implementation=transformers."

    @property
    def sizes(self) -> str:
        """The beginning of a sentence about how large the model is."""
        return f"{self.file}: the sizes there make"

    def error(self, fault: BadConfigError) -> ModelError:
        """The fault as an error that names the file, and its keys as the file calls them."""
        text = _WORD.sub(lambda word: self.keys.get(word[0], word[0]), str(fault))
        if isinstance(fault, UnsupportedConfigError):
            text = f"{text} {self.way_out}"
        return ModelError(f"{self.file}: {text}")
