"""Open the inputs of a run: `train`, `check` and `inspect` all do it with these functions.

data.train, data.validation -> tokenised rows, or prompts (RL) -> checks against tokenizer
and model -> rows to train on, rows held out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from homeostat.arrays import IntArray
from homeostat.config.curriculum import CurriculumConfig
from homeostat.config.data import DataConfig, RlSource, Source, SourcePlugin
from homeostat.config.parts import InputSettings
from homeostat.config.rollout import RolloutConfig
from homeostat.data.curriculum import CurriculumDraws
from homeostat.data.mixing import EpochOrder, Mixture, orders_of
from homeostat.data.opening import kind_of
from homeostat.data.prepare import Progress, prepare_rows, split_rows
from homeostat.data.prompts import PromptDraws, PromptSampler, PromptSet, prepare_prompts
from homeostat.data.references import References
from homeostat.data.store import RowStore
from homeostat.data.strided import prepare_texts
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import ConfigError, DataError, ModelError, Problem

Rows = TypeVar("Rows", RowStore, PromptSet)
Part = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class RowSet(Generic[Rows]):
    """Tokenised rows, and the ids of those that are used. Its length counts examples.

    An example has `rows_per_example` rows, whose ids stand together.
    """

    rows: Rows
    ids: IntArray
    rows_per_example: int = 1

    def __len__(self) -> int:
        return len(self.ids) // self.rows_per_example

    @property
    def sources(self) -> IntArray:
        """Return the number of the source of each example."""
        return self.rows.source_B[self.ids[:: self.rows_per_example]]


@dataclass(frozen=True, slots=True)
class Inputs(Generic[Rows]):
    """The rows to train on and, where there are any, the held-out ones."""

    train: RowSet[Rows]
    evaluation: RowSet[Rows] | None


def parts_of(data: DataConfig) -> tuple[Part, ...]:
    """Return the parts of the data that the recipe lists sources for."""
    return ("train", "validation") if data.validation else ("train",)


def prepare_row_part(
    data: DataConfig,
    tokenizer: ChatTokenizer,
    part: Part,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
) -> RowStore:
    """Tokenise one part of the rows that a run trains on, or take them from the cache."""
    return prepare_rows(
        _existing_sources(data, part),
        tokenizer,
        data,
        cache_dir=cache_dir,
        num_processes=data.num_processes,
        progress=progress,
    )


def prepare_prompt_part(
    config: InputSettings, tokenizer: ChatTokenizer, part: Part, *, progress: Progress | None = None
) -> PromptSet:
    """Tokenise one part of an RL run's prompts, or of the texts that it continues."""
    sources, energy = _existing_sources(config.data, part), config.energy
    if energy is not None and energy.is_strided:
        return prepare_texts(sources, tokenizer, config.data, ebft=energy, progress=progress)
    references = None
    # Held-out prompts are judged by reward functions, which need no reference.
    if energy is not None and part == "train":
        references = References(energy.reference_column, config.rollout.max_new_tokens)
    return prepare_prompts(
        sources, tokenizer, config.data, references=references, progress=progress
    )


def choose_rows(config: InputSettings, train: Rows, validation: Rows | None) -> Inputs[Rows]:
    """Choose the rows to train on and to hold out."""
    share, together = config.data.validation_share, config.rows_per_example

    def some(rows: Rows, ids: IntArray, *, most: int | None = None) -> RowSet[Rows]:
        return RowSet(rows, ids[: None if most is None else most * together], together)

    most = config.eval.max_rows
    if validation is not None:
        held_out = some(validation, _all_ids(validation), most=most)
        return Inputs(some(train, _all_ids(train)), held_out)
    if share == 0:
        return Inputs(some(train, _all_ids(train)), None)
    train_ids, held_out_ids = split_rows(train.made_from_B, share, config.seed)
    return Inputs(some(train, train_ids), some(train, held_out_ids, most=most))


def open_draws(
    data: DataConfig,
    curriculum: CurriculumConfig | None,
    prompts: RowSet[PromptSet],
    *,
    seed: int,
    state: Mapping[str, Any] | None = None,
) -> PromptDraws:
    """Return the order in which an RL run uses its prompts, from a checkpoint's state if given."""
    mixture, rows = Mixture.of(data), prompts.rows
    if mixture is None and curriculum is None:
        return PromptSampler(
            prompts.ids, seed=seed, shuffle=data.shuffle, fingerprint=rows.fingerprint, state=state
        )
    if mixture is None:
        orders = [EpochOrder(prompts.ids, key=(seed,), shuffle=data.shuffle)]
    else:
        orders = orders_of(
            prompts.ids, rows.source_B, names=mixture.names, seed=seed, shuffle=data.shuffle
        )
    return CurriculumDraws(
        orders,
        mixture=mixture,
        curriculum=curriculum,
        num_prompts=len(rows),
        seed=seed,
        fingerprint=rows.fingerprint,
        state=state,
    )


def require_source(path: str, *, setting: str) -> None:
    """Require that the path leads to a file or folder of a known kind; else name the setting."""
    try:
        kind_of(path)
    except DataError as error:
        raise DataError(f"{setting}: {error}") from None


def require_turn_end(
    config: InputSettings, tokenizer: ChatTokenizer, prompts: PromptSet, part: Part
) -> None:
    """Require that a chat has a token that ends the answer, unless the recipe says what ends it."""
    if config.rollout.stop or config.rollout.stop_token_ids or config.is_strided:
        return
    sources = _sources(config.data, part)
    has_chat = any(isinstance(source, RlSource) and source.chat for source in sources)
    # A list of messages is a chat whatever the source says.
    if has_chat or any(not isinstance(prompt.prompt, str) for prompt in prompts):
        tokenizer.require_turn_end(wanted_by=f"data.{part}")


def require_known_tokens(rows: RowStore | PromptSet, part: Part, *, vocab_size: int) -> None:
    """Require that the model knows every token that the tokenizer made of these rows."""
    if rows.max_token_id >= vocab_size:
        raise ModelError(
            f"data.{part}: the tokenizer gives token {rows.max_token_id}, and the model knows "
            f"tokens below {vocab_size} (vocab_size). Tokenizer and model do not match: check "
            "model.tokenizer and model.path, or add the new tokens' rows to the checkpoint's "
            "embeddings."
        )


def require_stop_ids(rollout: RolloutConfig, *, vocab_size: int) -> None:
    """Require that the model can sample every token that is to stop it."""
    unknown = [token for token in rollout.stop_token_ids if token >= vocab_size]
    if unknown:
        why = f"token {unknown[0]} lies outside the model's vocabulary of {vocab_size}."
        raise ConfigError([Problem("rollout.stop_token_ids", why, "Remove it.")])


def _sources(data: DataConfig, part: Part) -> tuple:
    return data.train if part == "train" else data.validation


def _existing_sources(data: DataConfig, part: Part) -> tuple:
    """Return the sources of a part of the data. Raises DataError if a path leads to no rows."""
    sources = _sources(data, part)
    for source in sources:
        if isinstance(source, Source) and not isinstance(source, SourcePlugin):
            require_source(source.path, setting=f"data.{part}")
    return sources


def _all_ids(rows: RowStore | PromptSet) -> IntArray:
    return np.arange(len(rows), dtype=np.int64)
