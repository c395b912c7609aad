"""Read recipes from YAML, safely and without surprises.

Only the plain core of YAML is understood: `on` and `no` are words, not booleans; `1e-5` is a
number; dates are words; a key given twice is an error. Each value remembers its line, so that an
error can name it. Files of other frameworks are read by PyYAML there, for which `on` and `no` are
booleans: `parse_yaml(..., old_words=True)`.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from homeostat.errors import ConfigError, Problem

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 32
_SURROGATE = re.compile("[\ud800-\udfff]")

Place = tuple[str | int, ...]


class _CoreLoader(yaml.SafeLoader):
    """A SafeLoader whose plain scalars follow YAML 1.2's core schema."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """Refuse brackets that nest more deeply than any file may: they take quadratic time."""
        if self.flow_level > MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)


_CoreLoader.yaml_implicit_resolvers = {}


for _tag, _pattern, _first in (
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


class _OldLoader(_CoreLoader):
    """A loader for which yes, no, on and off are booleans, as in YAML 1.1."""


_OldLoader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in _CoreLoader.yaml_implicit_resolvers.items()
}
_OldLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"^(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"),
    list("yYnNoO"),
)

_SCALARS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:str": str,
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() in ("true", "yes", "on"),
    "tag:yaml.org,2002:int": int,
    "tag:yaml.org,2002:float": float,
}


def parse_yaml(text: str, *, name: str, old_words: bool = False) -> tuple[Any, dict[Place, int]]:
    """Return the value of a YAML text, and the line of each place in it.

    `old_words`: yes, no, on and off are booleans, as in YAML 1.1.
    """
    try:
        node = yaml.compose(text, Loader=_OldLoader if old_words else _CoreLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = mark.line + 1 if mark else None
        if isinstance(error, yaml.reader.ReaderError):
            line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem("", f"not valid YAML: {what}.", line=line)], file=name) from None
    except RecursionError:
        why = f"nested deeper than {MAX_DEPTH} levels."
        raise ConfigError([Problem("", why)], file=name) from None
    if node is None:
        return None, {}
    builder = _Builder(name)
    return builder.build(node, ()), builder.lines


def read_yaml(path: Path) -> tuple[Any, dict[Place, int]]:
    """Read and parse a YAML file; see `parse_yaml`."""
    name = str(path)
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            # Reading a pipe or a device might never end, so only regular files are accepted.
            raise ConfigError([Problem("", "a recipe is a plain file.")], file=name)
        if facts.st_size > MAX_FILE_BYTES:
            why = f"{facts.st_size} bytes are more than a recipe may have ({MAX_FILE_BYTES})."
            raise ConfigError([Problem("", why)], file=name)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        line = None
        if isinstance(error, UnicodeDecodeError):
            line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            [Problem("", f"cannot read it: {reason}.", line=line)], file=name
        ) from None
    return parse_yaml(text, name=name)


class _Builder:
    """Turn YAML nodes into plain values; record lines, refuse duplicates, cycles and bombs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Place, int] = {}
        self.num_nodes = 0
        self.open_nodes: set[int] = set()

    def fail(self, node: yaml.Node, place: Place, message: str) -> ConfigError:
        line = node.start_mark.line + 1
        return ConfigError([Problem(dotted(place), message, line=line)], file=self.name)

    def build(self, node: yaml.Node, place: Place) -> Any:
        self.lines.setdefault(place, node.start_mark.line + 1)
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise self.fail(node, place, f"more than {MAX_NODES} values in one file.")
        if id(node) in self.open_nodes:
            raise self.fail(node, place, "an alias that contains itself.")
        self.open_nodes.add(id(node))
        try:
            return self.value(node, place)
        finally:
            self.open_nodes.discard(id(node))

    def value(self, node: yaml.Node, place: Place) -> Any:
        if len(place) > MAX_DEPTH:
            raise self.fail(node, place[:4], f"nested deeper than {MAX_DEPTH} levels.")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), node
        return self.scalar(node, place)

    def scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        if _SURROGATE.search(node.value):
            raise self.fail(node, place, "half a surrogate pair is not a character.")
        read = _SCALARS.get(node.tag)
        if read is None:
            raise self.fail(node, place, f"the tag {node.tag!r} is not allowed here.")
        try:
            return read(node.value)
        except ValueError:
            kind = node.tag.rpartition(":")[2]
            raise self.fail(node, place, f"{node.value[:40]!r} is not a {kind}.") from None

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.fail(key_node, place, "a key must be a plain word.")
            key = key_node.value
            if _SURROGATE.search(key):
                raise self.fail(key_node, place, "a key holds half a surrogate pair.")
            if key in result:
                raise self.fail(key_node, (*place, key), "this key is given twice.")
            self.lines[(*place, key)] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, (*place, key))
        return result


def dotted(place: Place) -> str:
    """Join the names of a place with dots."""
    return ".".join(str(part) for part in place)
