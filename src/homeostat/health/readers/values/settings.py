"""Read settings from config files and from logs, under the framework's names.

    lr=1e-06   --lr 1e-06   lr: 1e-06   Namespace(lr=1e-06)   {'actor': {'lr': 1e-06}}
    Gradient Accumulation steps = 4        transformers==4.50.3

Nested names are joined by dots. `ours` finds our key for each, with the framework's table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from homeostat.errors import DataError
from homeostat.health.frameworks import ALL, Framework
from homeostat.health.readers.values.common_names import SETTINGS
from homeostat.health.readers.values.literals import mapping_at, plain_value

MAX_CONFIG_BYTES = 8_000_000
# YAML and TOML are parsed in Python, which takes about a second per 100 kB.
_MAX_PARSED_CHARS = 500_000
_MAX_SETTINGS = 20_000
_LARGEST = 10**300
_MAX_DEPTH = 24
_VALUE = r"(?:'[^'\n]{0,500}'|\"[^\"\n]{0,500}\"|\[[^\[\]\n]{0,500}\]|[^\s,;|`'\"()\[\]{}]{1,200})"
_ASSIGNED = re.compile(
    rf"(?<![\w.=<>!/-])(?P<name>[A-Za-z_][\w.]{{0,120}})(?P<sign>==?)(?P<value>{_VALUE})"
)
_FLAG = re.compile(rf"(?:^|\s)--(?P<name>[A-Za-z][\w.-]{{0,120}})(?:[= ]\s*(?P<value>{_VALUE}))?")
# A log level ends the prefix of a name; brackets may follow it.
_LEVEL = re.compile(r"\b(?:INFO|DEBUG)\b[^A-Za-z_\[]{0,12}+")
_MAX_LEVELS = 4
_COLON = re.compile(
    r"\s*+(?:\[[^\]]*+\]\s*+){0,4}"
    rf"(?P<name>[A-Za-z_][\w.-]{{1,120}}+)\s*+:\s++(?P<value>{_VALUE})\s*+$"
)
_BANNER = {
    "num epochs": "num_train_epochs",
    "num examples": "num_examples",
    "instantaneous batch size per device": "per_device_train_batch_size",
    "gradient accumulation steps": "gradient_accumulation_steps",
    "total optimization steps": "max_steps",
    "number of trainable parameters": "trainable_parameters",
    "total train batch size (w. parallel, distributed & accumulation)": "total_train_batch_size",
}
_BANNER_LINE = re.compile(
    rf"\s(?P<name>{'|'.join(map(re.escape, _BANNER))}) = (?P<value>[\d,.]{{1,40}})"
)
_TOTAL = re.compile(r"total (?:training|optimization) steps(?: =|:)\s*+(\d[\d,]{0,18})")
# Names that belong to processes and errors, not to the settings of the run.
_NOT_SETTINGS = frozenset(
    {
        "pid",
        "ip",
        "rank",
        "local_rank",
        "exitcode",
        "errno",
        "line",
        "node_id",
        "host",
        "finish_reason",
        "stop_reason",
    }
)
# Texts that are values: YAML does not convert some of them, and command lines convert none.
_MEANT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+|[-+]?\d{1,18}|true|false|none|null", re.I)


def settings_in(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of settings that a log line states."""
    if "=" in text:
        banner = _BANNER_LINE.search(text.lower())
        if banner:
            yield _BANNER[banner["name"]], plain_value(banner["value"])
            return
        if "==" not in text or "pip" not in text:
            yield from _assigned(text)
    if "--" in text:
        for found in _FLAG.finditer(text[:20_000]):
            value = found["value"] or "--"
            yield found["name"], True if value.startswith("--") else plain_value(value)
    if ": " in text and len(text) < 400:
        found = _stated(text)
        if found and is_known(found["name"]):
            yield found["name"], plain_value(found["value"])


def _stated(text: str) -> re.Match[str] | None:
    """Return the match if a line, apart from a logger's prefix, is a single `name: value`."""
    levels = islice(_LEVEL.finditer(text), _MAX_LEVELS)
    starts = [0, *(level.end() for level in levels)]
    return next((found for at in reversed(starts) if (found := _COLON.match(text, at))), None)


def _assigned(text: str) -> Iterator[tuple[str, Any]]:
    for found in _ASSIGNED.finditer(text[:20_000]):
        value = found["value"].rstrip(".:")
        # The value of a version pin stays a text, whatever it looks like.
        if found["sign"] == "==":
            yield found["name"], value
        elif found["name"] not in _NOT_SETTINGS and value:
            yield found["name"], plain_value(value)


def total_steps_in(text: str) -> int | None:
    """Return the number of steps of the run, if a line states it."""
    found = _TOTAL.search(text.lower()) if "otal" in text else None
    return int(found[1].replace(",", "")) if found else None


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested mappings; nested names are joined by dots."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Mapping[str, Any], int]] = [("", settings, 0)]
    while waiting:
        prefix, inner, depth = waiting.pop()
        for name, value in inner.items():
            if len(found) >= _MAX_SETTINGS:
                return found
            if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
                waiting.append((f"{prefix}{name}.", value, depth + 1))
            else:
                found[f"{prefix}{name}"] = _meant(value)
    return found


def _meant(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _LARGEST:
        # The number is too large for a float. No setting is that large, and sums with it would
        # fail.
        return math.inf if value > 0 else -math.inf
    # "0.20" stays a text, because it may be a version. Callers can convert it.
    return plain_value(value) if isinstance(value, str) and _MEANT.fullmatch(value) else value


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file: JSON, YAML, TOML, or a printed literal. Raises DataError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: the config cannot be read: {error.strerror}.") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise DataError(f"{path}: too large for a config: over {MAX_CONFIG_BYTES:,} bytes.")
    found = config_of(data.decode("utf-8", errors="replace"), name=path.name)
    if found is None:
        raise DataError(
            f"{path}: contains no settings that can be read. Give a JSON file, or a YAML or TOML "
            f"file of at most {_MAX_PARSED_CHARS:,} characters, with names and values (--config)."
        )
    return found


def config_of(text: str, *, name: str = "") -> dict[str, Any] | None:
    """Return the settings in a text, nested as they are there; None if it has none."""
    literal = mapping_at(text, len(text) - len(text.lstrip()))
    if literal is not None and not text[literal[1] :].strip():
        return literal[0] or None
    if len(text) > _MAX_PARSED_CHARS:
        return None
    found = _toml(text) if name.endswith(".toml") else _yaml(text)
    return {str(key): value for key, value in found.items()} if found else None


def _toml(text: str) -> dict[str, Any] | None:
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _is_deep(text: str) -> bool:
    """Return whether brackets nest deeper than in any config; YAML would take quadratic time."""
    depth = 0
    for found in re.finditer(r"[\[{]|[\]}]", text):
        depth += 1 if found.group() in "[{" else -1
        if depth > _MAX_DEPTH:
            return True
    return False


def _yaml(text: str) -> dict[Any, Any] | None:
    # Aliases can make a small file huge, and a config does not need them.
    if re.search(r"(?m)(?:^|[\s\[,:-])\*[A-Za-z_]", text) or _is_deep(text):
        return None
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError):
        return None
    return found if isinstance(found, dict) else None


def fold_setting(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


@lru_cache(maxsize=64)
def _names_of(framework: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return full name -> our key, and last part of a name -> our key if it is unambiguous."""
    full: dict[str, str] = {}
    tails: dict[str, set[str]] = {}
    for key, names in ALL[framework].settings.items() if framework in ALL else ():
        for name in names:
            folded = fold_setting(name)
            full.setdefault(folded, key)
            tails.setdefault(folded.rpartition(".")[2], set()).add(key)
    sure = {tail: min(keys) for tail, keys in tails.items() if len(keys) == 1 and "_" in tail}
    return full, sure


@lru_cache(maxsize=1)
def _all_names() -> frozenset[str]:
    names = [_names_of(name) for name in ALL]
    return frozenset(SETTINGS).union(*(full for full, _ in names), *(tail for _, tail in names))


def is_known(name: str) -> bool:
    """Return whether any framework has a setting with this name."""
    return fold_setting(name) in _all_names()


def ours(raw: Mapping[str, Any], framework: Framework) -> dict[str, Any]:
    """Return settings under our keys. If several names mean one key, the most certain is used."""
    full, tails = _names_of(framework.name)
    found: dict[str, tuple[int, Any]] = {}
    for name, value in raw.items():
        for rank, key in enumerate(_candidates(fold_setting(str(name)), full, tails)):
            if key is not None:
                if key not in found or rank <= found[key][0]:
                    found[key] = (rank, value)
                break
    switched = filter(None, (framework.switched(str(n), value) for n, value in raw.items()))
    return dict(switched) | {key: value for key, (_, value) in found.items()}


def _candidates(
    name: str, full: Mapping[str, str], tails: Mapping[str, str]
) -> Iterator[str | None]:
    """Yield our keys for a name, the most certain first. Parts such as "name" are too vague."""
    yield full.get(name)
    head, _, tail = name.rpartition(".")
    if head:
        # In the log, the framework's name may be inside one or more further sections.
        yield full.get(name.partition(".")[2])
        if "_" in tail:
            yield full.get(tail)
    yield tails.get(tail)
    yield SETTINGS.get(tail) if not head or "_" in tail or "optim" in head else None
