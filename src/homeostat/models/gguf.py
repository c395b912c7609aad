"""Read GGUF files (llama.cpp's format): config and tensors under Hugging Face names.

    file.gguf -> metadata -> config.json as a dict (so that an export is an HF folder)
              -> tensors, de-quantised to fp32, renamed, q and k of Llama un-permuted

llama.cpp rotates neighbouring pairs of a Llama head and stores q and k with their rows permuted to
match; HF rotates halves. What differs between architectures is in models/gguf_families.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from homeostat.config.loading.beside import not_there
from homeostat.errors import MissingDependencyError, ModelError
from homeostat.models.gguf_families import FAMILIES
from homeostat.models.origin import ConfigOrigin
from homeostat.ops.gguf_frame import require_whole
from homeostat.ops.gguf_reader import open_gguf

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Keys of config.json -> the metadata they are read from, without the architecture's prefix.
_METADATA = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


class GgufFile:
    """One open file: its metadata, and its tensors on demand."""

    def __init__(self, path: Path) -> None:
        _require_gguf()
        self.path = path
        if not path.is_file():
            raise ModelError(f"model.path: {not_there(path)}")
        # The gguf library trusts the lengths in the file, so check them first.
        require_whole(path, setting="model.path")
        try:
            self._reader = open_gguf(path)
        except (ValueError, LookupError, OSError, ArithmeticError, TypeError) as error:
            raise ModelError(
                f"model.path: {path} cannot be read as GGUF; it is corrupt or truncated ({error})."
            ) from None
        self.architecture = self._value("general.architecture")
        num_experts = self._value(f"{self.architecture}.expert_count")
        if isinstance(num_experts, int) and num_experts > 0:
            raise ModelError(
                f"model.path: {path} holds a model with {num_experts} experts, and experts are "
                "read from HF checkpoints only: a .gguf file keeps them in other layouts, and "
                "mostly quantised. Name the folder of the model's HF checkpoint."
            )
        if self.architecture not in FAMILIES:
            raise ModelError(
                f"model.path: {path} holds architecture {self.architecture!r}; "
                f"GGUF is read for {', '.join(FAMILIES)}."
            )
        self._family = FAMILIES[self.architecture]

    @property
    def origin(self) -> ConfigOrigin:
        """Say how errors about `config` name this file and its metadata."""
        keys = {key: self._field(key) for key in _METADATA}
        if self._value(keys["head_dim"]) is None:
            keys["head_dim"] = f"{keys['hidden_size']} / {keys['num_attention_heads']}"
        return ConfigOrigin(
            file=f"model.path: {self.path}",
            keys={**keys, "vocab_size": "the number of rows of token_embd.weight"},
            way_out="Name the HF checkpoint of this model and set "
            "model.implementation=transformers: a .gguf file is read by the native decoder only.",
        )

    def config(self) -> dict[str, Any]:
        """Return what config.json would contain."""
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
            raise ModelError(f"model.path: {self.path} lacks the matrix token_embd.weight.")
        num_heads = self._whole("num_attention_heads")
        hidden_size = self._whole("hidden_size")
        config = {
            "architectures": [self._family.class_name],
            "model_type": self._family.model_type,
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": self._whole("intermediate_size"),
            "num_hidden_layers": self._whole("num_hidden_layers"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._whole("num_key_value_heads", num_heads),
            "head_dim": self._whole("head_dim", hidden_size // num_heads),
            "max_position_embeddings": self._whole("max_position_embeddings"),
            "rms_norm_eps": self._number("rms_norm_eps", 1e-6),
            "hidden_act": "silu",
            # GGUF has no flag for it: a tied model simply has no output matrix.
            "tie_word_embeddings": "output.weight" not in tensors,
            "rope_parameters": self._rope(),
        }
        config |= self._family.more(self, config)
        for key, field in _TOKEN_IDS.items():
            token = self._value(field)
            if token is not None and type(token) is not int:
                raise ModelError(f"model.path: {self.path}: {field} is {token!r:.80}, no number.")
            if token is not None:
                config[key] = token
        return config

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its HF name, in fp32, one at a time."""
        for tensor in self._reader.tensors:
            if tensor.name in self._family.derived:
                continue
            values = self._unpermute(tensor.name, self._values(tensor))
            if self._family.centred and tensor.name.endswith("norm.weight"):
                # llama.cpp stores what norms multiply by.
                values -= 1.0
            yield self._hf_name(tensor.name), values

    def _values(self, tensor: Any) -> Tensor:
        from gguf.quants import dequantize

        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"model.path: {self.path}: cannot de-quantise {tensor.name} "
                f"({tensor.tensor_type.name}: {error})."
            ) from None
        # Copy, because unquantised values are a read-only view of the file.
        values = torch.from_numpy(np.array(values, dtype=np.float32))
        # GGUF lists dimensions from the fastest to the slowest, torch the other way round.
        return values.reshape(tuple(int(size) for size in reversed(tensor.shape)))

    def tensor(self, name: str) -> Tensor | None:
        """Return one tensor by its name in the file; None if there is none."""
        found = [tensor for tensor in self._reader.tensors if tensor.name == name]
        return self._values(found[0]) if found else None

    def optional(self, key: str) -> Any:
        """Return a value of the metadata by its name without the architecture; None if it is
        missing.
        """
        return self._value(f"{self.architecture}.{key}")

    def shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the meta device, with only their shapes; otherwise like `tensors`."""
        for tensor in self._reader.tensors:
            if tensor.name in self._family.derived:
                continue
            size = tuple(int(size) for size in reversed(tensor.shape))
            yield self._hf_name(tensor.name), torch.empty(size, device="meta")

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self._number("rope_theta", 10_000.0)}
        kind = self._setting("rope_type", "none")
        if kind == "none":
            return {**rope, "rope_type": "default"}
        rope |= {"rope_type": kind, "factor": self._number("factor", 1.0)}
        if kind == "yarn":
            length = self._whole("original_max_position_embeddings")
            rope["original_max_position_embeddings"] = length
        return rope

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _OUTER_NAMES:
            return f"{_OUTER_NAMES[stem]}.{kind}"
        block, _, inner = stem.partition(".")[2].partition(".")
        if stem.startswith("blk.") and inner in self._family.names:
            return f"model.layers.{block}.{self._family.names[inner]}.{kind}"
        return name

    def _unpermute(self, name: str, values: Tensor) -> Tensor:
        inner = name.rpartition(".")[0].rpartition(".")[2]
        if not self._family.permuted or inner not in ("attn_q", "attn_k"):
            return values
        num_heads = self._whole("num_attention_heads")
        if inner == "attn_k":
            num_heads = self._whole("num_key_value_heads", num_heads)
        if values.shape[0] % (2 * num_heads):
            raise ModelError(
                f"model.path: {self.path}: {name} has {values.shape[0]} rows, which cannot be the "
                f"pairs of {num_heads} heads."
            )
        # Neighbouring pairs become halves: undo the permutation that llama.cpp applied.
        pairs = values.unflatten(0, (num_heads, -1, 2))
        return pairs.transpose(1, 2).reshape(values.shape)

    def _value(self, field: str) -> Any:
        found = self._reader.get_field(field)
        try:
            return None if found is None else found.contents()
        except (ValueError, LookupError, TypeError) as error:
            raise ModelError(
                f"model.path: {self.path}: {field} cannot be read; the file is corrupt ({error})."
            ) from None

    def _field(self, key: str) -> str:
        """The metadata field that holds a key of config.json."""
        return f"{self.architecture}.{_METADATA[key]}"

    def _setting(self, key: str, default: Any = None) -> Any:
        value = self._value(self._field(key))
        value = default if value is None else value
        if value is None:
            raise ModelError(f"model.path: {self.path} lacks {self._field(key)}.")
        return value

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self._setting(key, default)
        if type(value) is not int or value < 1:
            raise ModelError(
                f"model.path: {self.path}: {self.origin.keys[key]} is {value!r:.80}; one whole "
                "number for all layers, 1 or more, is needed."
            )
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._setting(key, default)
        if type(value) not in (int, float):
            raise ModelError(
                f"model.path: {self.path}: {self._field(key)} is {value!r:.80}, no number."
            )
        return float(value)


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingDependencyError.of(
            "gguf", extra="gguf", needed_for="Reading a .gguf file (model.path)"
        ) from None
