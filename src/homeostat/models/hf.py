"""Read Hugging Face checkpoint folders as a stream of tensors, and write them in shards.

Invariants: reading never writes (no lock, no cache, no temporary file), so any number of processes
may read one folder at once; pickled weights are never opened; one tensor is in memory at a time
when reading, one shard when writing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from homeostat.config.base import is_file_name
from homeostat.config.loading.beside import not_there
from homeostat.errors import ModelError
from homeostat.json_text import parse_json
from homeostat.models.origin import ConfigOrigin

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9

_SUFFIX = ".safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path, *, setting: str = "model.path") -> dict[str, Any]:
    """Read a JSON object from the folder that `setting` names."""
    require_plain(path, setting=setting)
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{setting}: {not_there(path)} Is this the folder of an HF checkpoint?"
        ) from None
    except OSError as error:
        raise ModelError(f"{setting}: cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise ModelError(f"{setting}: {path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{setting}: {path} must hold a JSON object.")
    return value


def require_plain(path: Path, *, setting: str) -> None:
    """Refuse a folder, and a pipe or device, which may never end."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{setting}: {path} is not a plain file.")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    return read_json(folder / "config.json")


def config_origin(folder: Path) -> ConfigOrigin:
    return ConfigOrigin(file=f"model.path: {folder / 'config.json'}")


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """Read generation_config.json, if there is one."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of its index, or the single one."""
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"model.path: {folder} holds pickled weights only ({pickled[0]}). Unpickling runs "
            "code from the file, so it is never done here. Convert them to safetensors."
        )
    raise ModelError(f"model.path: {folder} holds neither {SINGLE} nor {INDEX}.")


def tensor_names(folder: Path) -> list[str]:
    """Return the names of all tensors of the folder, without reading them."""
    names: list[str] = []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names += file.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.path: {path} cannot be read; it is missing, corrupt or truncated ({error})."
            ) from None
    return names


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the folder by name, one at a time, on the CPU."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping: it has no __iter__)
                    yield name, file.get_tensor(name)
        except FileNotFoundError:
            raise ModelError(f"model.path: {path}, named by {INDEX}, does not exist.") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.path: {path} cannot be read; it is corrupt or truncated ({error})."
            ) from None


def save_hf(
    state: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    source_config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write config.json and the weights, as one file or as shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    names: list[list[str]] = []
    num_bytes = 0
    dtype = torch.float32
    for shard in _shards(state, max_shard_bytes):
        # The number of shards is known only at the end of the stream.
        part = folder / f"part-{len(parts):05d}.safetensors"
        save_file(shard, part, metadata={"format": "pt"})
        parts.append(part)
        names.append(list(shard))
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
        # Packed integers say nothing of the precision that the model computes in.
        dtype = next((t.dtype for t in shard.values() if t.is_floating_point()), dtype)
    assert parts, "no tensors to save"
    _name_shards(folder, parts, names, num_bytes)
    _write_json(folder / "config.json", _with_dtype(source_config, dtype))
    if generation_config is not None:
        _write_json(folder / "generation_config.json", generation_config)


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"model.path: {folder / INDEX} has no weight_map.")
    for name in weight_map.values():
        if not is_file_name(name) or Path(name).suffix != _SUFFIX:
            raise ModelError(
                f"model.path: {folder / INDEX} names {name!r}, which is no safetensors file "
                "of its folder."
            )
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    for path in paths:
        require_plain(path, setting="model.path")
    return paths


def _shards(
    state: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in state:
        if shard and num_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, num_bytes = {}, 0
        # safetensors needs contiguous tensors; one shard at a time bounds the host memory.
        shard[name] = tensor.detach().to("cpu").contiguous()
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def _name_shards(folder: Path, parts: list[Path], names: list[list[str]], num_bytes: int) -> None:
    if len(parts) == 1:
        # A single shard gets the conventional name, which other libraries look for first.
        os.replace(parts[0], folder / SINGLE)
        return
    weight_map = {}
    for number, (part, inside) in enumerate(zip(parts, names, strict=True), start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        os.replace(part, folder / file)
        weight_map |= dict.fromkeys(inside, file)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    _write_json(folder / INDEX, index)


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config with the dtype of the saved weights, under the key that it used."""
    # transformers renamed the key; keep the one that the checkpoint used.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
