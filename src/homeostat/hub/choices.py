"""Choose the files of a repository that a setting needs, so that nothing else is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from homeostat.data.dataset_folder import README, choose_files
from homeostat.errors import ConfigError, DataError, Problem
from homeostat.hub.request import Choose, ReadText
from homeostat.json_text import parse_json

# What is needed of a model: all of it, only what turns text into tokens, or only its sizes.
Need = Literal["weights", "tokenizer", "config"]

CONFIG, ADAPTER = "config.json", "adapter_config.json"
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
_SMALL = (".json", ".model", ".txt", ".jinja", ".tiktoken")


def model_files(setting: str, *, need: Need) -> Choose:
    """Return a function that chooses the files of a model, a classifier or an adapter."""

    def choose(names: Sequence[str], read: ReadText) -> list[str]:
        top = [name for name in names if "/" not in name]
        if CONFIG not in top and ADAPTER not in top:
            raise ConfigError([_no_model(setting, names)])
        if ADAPTER in top and CONFIG not in top and setting == "model.path":
            raise ConfigError([_adapter(setting, read(ADAPTER))])
        if need == "config":
            return [name for name in (CONFIG, ADAPTER) if name in top]
        small = [name for name in top if name.endswith(_SMALL)]
        weights = _weights(top, read) if need == "weights" else []
        if need == "weights" and not weights:
            raise ConfigError([_no_weights(setting, top)])
        return sorted({*small, *weights})

    return choose


def one_file(setting: str, name: str, file: str) -> Choose:
    """Return a function that chooses one file, for example a .gguf file."""

    def choose(names: Sequence[str], _: ReadText) -> list[str]:
        if file in names:
            return [file]
        alike = sorted(one for one in names if one.endswith(file[file.rfind(".") :]))
        there = ", ".join(alike[:10]) or "none of that kind"
        raise ConfigError([Problem(setting, f"{name} has no file {file!r}.", f"It has: {there}.")])

    return choose


def dataset_files(
    place: str, name: str, *, config: str | None, split: str | None, default: str | None
) -> Choose:
    """Return a function that chooses the files of a split, and the README that describes it."""

    def choose(names: Sequence[str], read: ReadText) -> list[str]:
        readme = read(README) if README in names else None
        try:
            chosen = choose_files(
                names, readme, config=config, split=split, place=name, default=default
            )
        except DataError as error:
            script = " It is made by a script: set revision: refs/convert/parquet."
            hint = script if any(one.endswith(".py") for one in names) else ""
            raise DataError(f"{place}: {error}{hint}") from None
        return [*chosen.files, *([README] if readme is not None else [])]

    return choose


def _weights(top: Sequence[str], read: ReadText) -> list[str]:
    """Return the safetensors files; of a sharded model those that its index names."""
    if _INDEX in top:
        try:
            shards = parse_json(read(_INDEX) or "").get("weight_map", {}).values()
        except (ValueError, AttributeError):
            shards = ()
        return sorted({one for one in shards if isinstance(one, str) and one in top})
    return [name for name in _WEIGHTS if name in top]


def _no_model(setting: str, names: Sequence[str]) -> Problem:
    packed = sorted(name for name in names if name.endswith(".gguf"))
    if packed:
        hint = f"Name one of its files: <name>/{packed[0]}" + (
            f" (or {', '.join(packed[1:6])})." if packed[1:] else "."
        )
        return Problem(setting, "the repository holds GGUF files.", hint)
    return Problem(
        setting,
        f"the repository has no {CONFIG}, so it is no model.",
        "Is it a dataset, or in another format?",
    )


def _adapter(setting: str, text: str | None) -> Problem:
    try:
        base = parse_json(text or "").get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    named = f" ({base})" if isinstance(base, str) and base else ""
    return Problem(
        setting,
        "this is a LoRA adapter, which is no model by itself.",
        f"Set model.path to its base model{named}, and lora.path to this name.",
    )


def _no_weights(setting: str, top: Sequence[str]) -> Problem:
    pickled = [name for name in top if name.endswith((".bin", ".pth", ".pt"))]
    why = f"only pickled ones ({pickled[0]}), and unpickling runs code" if pickled else "none"
    return Problem(
        setting,
        f"the repository has no weights as safetensors: {why}.",
        "Choose a revision or another repository that has them.",
    )
