"""The tokenizer of a run: text to tokens with character offsets, messages to text.

`load_tokenizer` uses transformers once; the result needs only the Rust tokenizer and the template,
so it pickles small and a worker process starts without torch.

Invariants: nothing is fetched from a network and no code from a model folder is run. Offsets are
exact: token n covers text[start:end] with the spaces it stands for.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from homeostat.arrays import IntArray
from homeostat.config.loading.beside import not_there
from homeostat.config.model import ModelConfig
from homeostat.data.overlong import OverlongTextError, exact_head, longest_token
from homeostat.data.sources import BadRowError
from homeostat.data.special_ids import choose_pad_id, find_prefix_ids, name_scoring_pad
from homeostat.data.stops import TurnEnd, configured_stops, find_turn_end, name_stops
from homeostat.data.templates import check_options, check_template, render
from homeostat.data.tokenizer_class import (
    find_broken_json,
    require_plain_files,
    require_tokenizer_file,
    template_place,
    tokenizer_from,
)
from homeostat.data.tokenizer_gguf import (
    read_gguf_special_tokens,
    require_gguf,
    take_gguf_special_tokens,
)
from homeostat.data.vendor_errors import RefuseVendorErrors
from homeostat.errors import ModelError
from homeostat.ops.gguf_frame import require_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning, and the template's variables: their texts, and its options."""

    eos_id: int
    pad_id: int
    stop_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    words: Mapping[str, str | bool | int | float]
    # The end of a turn of the chat template; None if there is no template, or it cannot be found.
    turn_end: TurnEnd | None = None


class ChatTokenizer:
    """Text and messages to tokens and back. Picklable; `save` works in the loading process."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        special: SpecialTokens,
        chat_template: str | None,
        notes: tuple[str, ...] = (),
        original: PreTrainedTokenizerFast | None = None,
    ) -> None:
        self._backend = backend
        self._original = original
        self.special = special
        self.chat_template = chat_template
        own = getattr(original, "chat_template", None)
        self.own_template = own if isinstance(own, str) else None
        self.notes = notes
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.fingerprint = self._hash()
        self._longest = longest_token(backend)
        # Set if longer rows are dropped anyway: tokenising megabytes takes seconds and memory.
        self.max_tokens: int | None = None
        self.cut_tokens: int | None = None  # Set if longer rows are truncated.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_original": None}

    @property
    def eos_id(self) -> int:
        return self.special.eos_id

    @property
    def pad_id(self) -> int:
        return self.special.pad_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end a turn when they are generated."""
        return self.special.stop_ids

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Return the ids that open a plain document, such as begin-of-sequence.

        Rendered chats contain theirs in the text.
        """
        return self.special.prefix_ids

    def encode(self, text: str) -> tuple[IntArray, IntArray]:
        """Return ids, and offsets [T, 2] into the text. No special token is added.

        Raises OverlongTextError if `max_tokens` is set and the text must have more.
        """
        # The lower bound costs nothing, while tokenising megabytes takes seconds.
        if self.max_tokens is not None and self.least_tokens(text) > self.max_tokens:
            raise OverlongTextError(self.least_tokens(text))
        return _arrays(self._encode(text))

    def encode_head(self, text: str) -> tuple[IntArray, IntArray, int]:
        """Like `encode`, but also return the number of characters that the tokens cover.

        That is the whole text, unless `cut_tokens` is set and the text has many more: then only its
        first tokens, more than `cut_tokens`, are returned.
        """
        if self.cut_tokens is None or self._longest is None:
            return *self.encode(text), len(text)
        encoding, num_tokens = exact_head(
            self._encode, text, min_tokens=self.cut_tokens, longest=self._longest,
            is_content=self._is_content,
        )  # fmt: skip
        ids, offsets = _arrays(encoding)
        is_whole = num_tokens == len(ids)
        # Labels must not reach beyond the tokens that are certain.
        known = len(text) if is_whole else int(offsets[num_tokens - 1, 1])
        return ids[:num_tokens], offsets[:num_tokens], known

    def _encode(self, text: str) -> Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            # JSON may contain lone surrogates as escapes; the Rust tokenizer refuses them.
            raise BadRowError("not valid Unicode", "the text holds half a surrogate pair") from None

    def _is_content(self, token: int, text: str) -> bool:
        return bool(text.strip()) and token not in self.stop_ids and not self.is_special(token)

    def bounded(self, max_tokens: int) -> ChatTokenizer:
        """Return a copy whose `encode` refuses texts that must have more tokens."""
        other = copy.copy(self)
        other.max_tokens = max_tokens
        return other

    def cutting(self, max_tokens: int) -> ChatTokenizer:
        """Return a copy whose `encode_head` need not return more than this many tokens plus one."""
        other = copy.copy(self)
        other.cut_tokens = max_tokens
        return other

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, in no time.

        It is 0 if a token may stand for any number of characters.
        """
        return -(-len(text) // self._longest) if self._longest else 0

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of the tokens, including special ones."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """Return the messages as one text. Raises BadRowError with the template's own message."""
        assert self.chat_template is not None, "require_chat_template comes first"
        return render(
            self.chat_template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            words=self.special.words,
        )

    def require_turn_end(self, *, wanted_by: str) -> None:
        """Refuse a template whose turns no token ends: every answer would run to the limit."""
        end = self.special.turn_end
        if end is not None and end.token is None:
            raise end.refusal(wanted_by=wanted_by)

    def require_chat_template(self, *, wanted_by: str) -> None:
        if self.chat_template is None:
            raise ModelError(
                f"{wanted_by}: the tokenizer has no chat template, so messages cannot become "
                "text. Set model.chat_template to a Jinja file, name an instruct model in "
                "model.tokenizer, or use plain text: a text source, or chat: false on the source."
            )

    def save(self, folder: Path, *, scores: bool = False) -> None:
        """Write the tokenizer in HF's format, with the template and pad token of this run.

        Beside a classifier, which `scores` rows, both get a pad token with which no row ends.
        """
        assert self._original is not None, "a tokenizer that was sent to a worker cannot be saved"
        # The export must behave as the run did, whatever the original files said.
        self._original.pad_token = self._original.convert_ids_to_tokens(self.pad_id)
        if scores:
            name_scoring_pad(self._original, folder, ends=self.stop_ids | {self.eos_id})
        self._original.chat_template = self.chat_template
        self._original.save_pretrained(str(folder))
        end = self.special.turn_end
        if end is not None and end.token not in (None, self.eos_id) and not scores:
            name_stops(folder / "generation_config.json", self.stop_ids)

    def description(self) -> dict[str, Any]:
        """Return what tokenizer.json says: the model, its vocabulary, and how texts are split."""
        return json.loads(self._backend.to_str())

    def vocabulary_digest(self) -> str:
        """Return a digest of the mapping from pieces to ids, and of nothing else."""
        pieces = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()

    def _hash(self) -> str:
        parts = {
            # The whole tokenizer, not its path: files can change under the same name.
            "tokenizer": self._backend.to_str(),
            "template": self.chat_template,
            "eos": self.eos_id,
            "stop": sorted(self.stop_ids),
            "prefix": self.prefix_ids,
            "words": dict(self.special.words),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _arrays(encoding: Encoding) -> tuple[IntArray, IntArray]:
    ids = np.array(encoding.ids, dtype=np.int64)
    return ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)


def load_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """Load the tokenizer of the model settings. Raises ModelError with the setting's name."""
    setting = "model.path" if model.tokenizer is None else "model.tokenizer"
    place = model.path if model.tokenizer is None else model.tokenizer
    original = _load_original(place, setting)
    if not original.is_fast:
        raise ModelError(
            f"{setting}: {place} has only a Python tokenizer, which does not report where in the "
            "text a token is, so labels would be guesses. Use a folder with tokenizer.json."
        )
    template = _chat_template(original, model, f"{setting}: {template_place(Path(place))}")
    with RefuseVendorErrors(f"{setting}: the tokenizer of {place} cannot be used"):
        backend = _exact_backend(original)
        special, notes = _special_tokens(original, backend, model, setting)
        if template is not None:
            special, more = _with_turn_end(special, template, backend)
            notes += more
        return ChatTokenizer(
            backend, special=special, chat_template=template, notes=notes, original=original
        )


def _load_original(place: str, setting: str) -> PreTrainedTokenizerFast:
    path = Path(place)
    # Never contact a hub, and never run code that came with a checkpoint.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    special: dict[str, int] = {}
    with RefuseVendorErrors(
        f"{setting}: no tokenizer could be loaded from {place!r}",
        find_fault=partial(find_broken_json, path),
    ):
        if not path.exists():
            raise ModelError(f"{setting}: {not_there(path)}")
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise ModelError(f"{setting}: {place} is neither a folder nor a .gguf file.")
            require_gguf(setting)
            # The gguf library trusts the lengths in the file, so check them first.
            require_whole(path, setting=setting)
            special = read_gguf_special_tokens(path, setting=setting)
            options["gguf_file"] = path.name
            path = path.parent
        else:
            require_plain_files(path, setting=setting)
            require_tokenizer_file(path, setting=setting)

        original = tokenizer_from(path, options)
        take_gguf_special_tokens(original, special)
        return original


def _chat_template(
    original: PreTrainedTokenizerFast, model: ModelConfig, setting: str
) -> str | None:
    found: Any = original.chat_template
    if model.chat_template is not None:
        setting, path = "model.chat_template", Path(model.chat_template)
        if path.exists() and not path.is_file():
            raise ModelError(f"{setting}: {path} is not a plain file.")
        try:
            found = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ModelError(f"{setting}: {model.chat_template!r}: {reason}.") from None
    # Older tokenizers have several named templates; only "default" is unambiguous.
    if isinstance(found, dict):
        if "default" not in found:
            raise ModelError(
                f"{setting}: the tokenizer has several chat templates "
                f"({', '.join(sorted(found))}) and none is the default. Save the one that you "
                "want to a file and set model.chat_template to it."
            )
        found = found["default"]
    if found is not None:
        check_template(found, setting=setting)
        check_options(found, model.chat_template_options, setting="model.chat_template_options")
    elif model.chat_template_options:
        raise ModelError(
            "model.chat_template_options: the tokenizer has no chat template that could use "
            "them. Remove them, or set model.chat_template."
        )
    return found


def _exact_backend(original: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy that never truncates or pads, and whose offsets include leading spaces."""
    description = json.loads(original.backend_tokenizer.to_str())
    _keep_spaces(description.get("post_processor"))
    description["truncation"] = description["padding"] = None
    return Tokenizer.from_str(json.dumps(description))


def _keep_spaces(part: Any) -> None:
    if isinstance(part, dict):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
        for child in part.values():
            _keep_spaces(child)
    elif isinstance(part, list):
        for child in part:
            _keep_spaces(child)


def _special_tokens(
    original: PreTrainedTokenizerFast, backend: Tokenizer, model: ModelConfig, setting: str
) -> tuple[SpecialTokens, tuple[str, ...]]:
    stop_ids = configured_stops(model)
    eos_id = original.eos_token_id
    if eos_id is None:
        if not stop_ids:
            raise ModelError(
                f"{setting}: neither the tokenizer nor generation_config.json names an "
                "end-of-sequence token, so no row could teach the model to stop. Set eos_token "
                "in tokenizer_config.json (of a .gguf file: tokenizer.ggml.eos_token_id)."
            )
        eos_id = min(stop_ids)
    pad_id, notes = choose_pad_id(original, model, eos_id)
    words = {
        name: word for name, word in original.special_tokens_map.items() if isinstance(word, str)
    }
    words |= model.chat_template_options
    special = SpecialTokens(
        eos_id=eos_id,
        pad_id=pad_id,
        stop_ids=frozenset({eos_id, *stop_ids}),
        prefix_ids=find_prefix_ids(backend),
        words=words,
    )
    return special, notes


def _with_turn_end(
    special: SpecialTokens, template: str, backend: Tokenizer
) -> tuple[SpecialTokens, tuple[str, ...]]:
    """Add the token that ends a turn of the template to the stop tokens, and log a new one."""
    end = find_turn_end(template, special.words, backend)
    special = replace(special, turn_end=end)
    if end is None or end.token is None or end.token in special.stop_ids:
        return special, ()
    word = backend.id_to_token(end.token)
    note = (
        f"the chat template ends a turn with {word!r}, which the model's files do not name as an "
        "end of sequence: it is a stop token of this run"
    )
    return replace(special, stop_ids=special.stop_ids | {end.token}), (note,)
