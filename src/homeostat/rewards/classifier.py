"""A sequence classifier as a reward: any HF checkpoint, ours or another's. Runs in its own worker.

    prompt, completion -> the model's own chat template -> tokens -> batches -> one output

Completions are sorted by their tokens before they are batched, so a score depends on which
completions are scored together, and not on their order. Rows are padded on the right with the pad
token of the model's config: transformers scores the last token of a row that is not this one.

Only safetensors are read and no code of the folder is run. torch and transformers are imported when
the reward is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from homeostat.errors import RewardError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Row(NamedTuple):
    """The tokens of a text, and for two texts which of them each token is part of."""

    ids: list[int]
    types: list[int] | None = None


class Classifier:
    """The reward: tokenises prompts with their completions and scores them in batches."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pick: Callable[[torch.Tensor], torch.Tensor],
        pair: bool,
        batch_size: int,
        max_length: int,
        truncates: bool,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pick = pick
        self.pair = pair
        self.truncates = truncates
        text_config = model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        self.max_length = min(max_length, positions or max_length)
        self.pad_id = text_config.pad_token_id
        # Without a pad token transformers scores single rows only.
        self.batch_size = batch_size if self.pad_id is not None else 1
        self.takes_types = "token_type_ids" in inspect.signature(model.forward).parameters

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: Any
    ) -> list[float | Exception]:
        rows = [self._encode(*one) for one in zip(prompts, completions, strict=True)]
        values: list[float | Exception] = [
            row if isinstance(row, Exception) else 0.0 for row in rows
        ]
        whole = [index for index, row in enumerate(rows) if not isinstance(row, Exception)]
        whole.sort(key=lambda index: (len(rows[index].ids), rows[index]))
        for start in range(0, len(whole), self.batch_size):
            chosen = whole[start : start + self.batch_size]
            scores = self._score([rows[index] for index in chosen])
            for index, score in zip(chosen, scores, strict=True):
                values[index] = score
        return values

    def _encode(self, prompt: Any, completion: Any) -> Row | RewardError:
        row = self._row(prompt, completion)
        excess = len(row.ids) - self.max_length
        if excess <= 0:
            return row
        if not self.truncates:
            return RewardError(
                f"prompt and completion have {len(row.ids)} tokens, and the reward model takes "
                f"{self.max_length}: raise max_length, or set overlong: truncate"
            )
        # The token that begins every text stays: encoders take the score at its place.
        starts = {self.tokenizer.bos_token_id, self.tokenizer.cls_token_id} - {None}
        kept = 1 if row.ids[0] in starts else 0
        return Row(*(part and part[:kept] + part[kept + excess :] for part in row))

    def _row(self, prompt: Any, completion: Any) -> Row:
        tokenizer = self.tokenizer
        if self.pair:
            found = tokenizer(_text(prompt), _text(completion))
            return Row(
                found["input_ids"], found.get("token_type_ids") if self.takes_types else None
            )
        if isinstance(prompt, str):
            ids = tokenizer(prompt + completion)["input_ids"]
            end = tokenizer.eos_token_id
            return Row(ids if end is None or ids[-1:] == [end] else [*ids, end])
        if tokenizer.chat_template is None:
            raise RewardError(
                "the reward model's tokenizer has no chat template, and the prompts are chats. Add "
                "a template to its folder, or set format: pair if it expects two plain texts."
            )
        text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        return Row(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _score(self, rows: Sequence[Row]) -> list[float]:
        import torch

        longest = max(len(row.ids) for row in rows)
        ids_BT = torch.full((len(rows), longest), self.pad_id or 0)
        mask_BT, types_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        for number, row in enumerate(rows):
            ids_BT[number, : len(row.ids)] = torch.tensor(row.ids)
            mask_BT[number, : len(row.ids)] = 1
            if row.types is not None:
                types_BT[number, : len(row.ids)] = torch.tensor(row.types)
        given = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if rows[0].types is not None:
            given["token_type_ids"] = types_BT
        with torch.inference_mode():
            found = self.model(**{k: v.to(self.model.device) for k, v in given.items()})
            return self.pick(found.logits.float()).tolist()


def reward_model(
    *,
    path: str,
    output: int | str | None,
    score: str,
    format: str,
    device: str,
    dtype: str,
    batch_size: int,
    max_length: int,
    overlong: str,
) -> Classifier:
    """Load the model and return the reward, from the keys of its config class."""
    import torch
    from transformers import AutoTokenizer

    if not Path(path, "config.json").is_file():
        raise RewardError(f"{path}: no config.json there. Name the folder of an HF classifier.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _load(path, dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return Classifier(
        model,
        tokenizer,
        pick=_picker(model.config, output, score),
        pair=format == "pair",
        batch_size=batch_size,
        max_length=max_length,
        truncates=overlong == "truncate",
    )


def _load(path: str, dtype: str) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        path,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers would draw what is missing at random, and warn: a causal model has no head.
    if missing := sorted(report["missing_keys"]):
        raise RewardError(
            f"{path} is no trained classifier: it has no weights for {', '.join(missing[:3])}. "
            "Train a reward model first (algorithm.type: reward_model)."
        )
    return model


def _picker(
    config: Any, output: int | str | None, score: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from logits [B, outputs] to scores [B]."""
    index = _output_index(config, output)

    def pick(logits: torch.Tensor) -> torch.Tensor:
        if score == "logit":
            return logits[:, index]
        if logits.shape[1] == 1:
            return logits[:, 0].sigmoid()
        return logits.softmax(dim=1)[:, index]

    return pick


def _output_index(config: Any, output: int | str | None) -> int:
    names: Mapping[int, str] = config.id2label
    known = ", ".join(f"{number} ({name})" for number, name in names.items())
    if output is None:
        if len(names) > 1:
            raise RewardError(
                f"output: the classifier has several outputs, {known}. Say which one is the score."
            )
        return 0
    if isinstance(output, str):
        found = [number for number, name in names.items() if name == output]
    else:
        found = [number for number in names if number == output]
    if not found:
        raise RewardError(f"output: the classifier has no {output!r}, only {known}.")
    return int(found[0])


def _text(value: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(value, str):
        return value
    return "\n\n".join(str(turn.get("content")) for turn in value)
