"""Faults of rows, templates, tokenizers and masks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.clinic import bodies
from homeostat.clinic.injector import FROM_START, SORT, SORT_SFT, Injector
from homeostat.clinic.recipes import Body, Raw
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import LossSpec, Role, TrainBatch

CHAT_SFT = Body("sort", "sft", rows="messages", steps=40)


class _Data(Injector):
    family, onset, body = Family.DATA, FROM_START, SORT_SFT


class TrainsOnNothing(_Data):
    """No row has anything to train on: every completion is empty."""

    name, expects = "train_on_nothing", ("all-labels-masked",)
    body, is_fatal = CHAT_SFT, True

    def prepare(self, raw: Raw, folder: Path) -> None:
        rows = bodies.read_rows(folder / "train.jsonl")
        for row in rows:
            for message in row["messages"]:
                message["train"] = False
        bodies.write_rows(folder / "train.jsonl", rows)


class WrongMask(_Data):
    """The mask of the batches was lost: prompts are trained on, too."""

    name = "wrong_mask"
    expects = ("mask-accounting-off",)
    onset = (8, 14)

    def started(self, parts: Any, session: Session) -> None:
        trainer, accumulate = parts.trainer, parts.trainer.accumulate

        def unmasked(
            role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
        ) -> None:
            if self.is_ill(step):
                batches = [_unmasked(batch) for batch in batches]
            accumulate(role, batches, spec, step=step)

        trainer.accumulate = unmasked


def _unmasked(batch: TrainBatch) -> TrainBatch:
    weights_N = np.ones_like(batch.weights_N)
    weights_N[np.cumsum(batch.lengths_B) - batch.lengths_B] = 0.0
    return replace(batch, weights_N=weights_N)


class ShiftedLabels(_Data):
    """Targets are off by one: a token's own hidden state predicts it."""

    name = "shifted_labels"
    expects = ("first-ratio-off", "first-ratio-not-one", "engine-logprob-mismatch")
    body, onset = SORT, (8, 14)

    def started(self, parts: Any, session: Session) -> None:
        trainer, accumulate = parts.trainer, parts.trainer.accumulate

        def shifted(
            role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
        ) -> None:
            if self.is_ill(step):
                batches = [replace(b, tokens_N=np.roll(b.tokens_N, -1)) for b in batches]
            accumulate(role, batches, spec, step=step)

        trainer.accumulate = shifted


class WrongTemplate(_Data):
    """The chat template is another model's: it knows one turn, and refuses a second."""

    name, expects = "wrong_template", ("chat-template-mismatch", "chat-template-rewrites-history")
    body, is_fatal = CHAT_SFT, True

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = folder / "model" / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["chat_template"] = (
            "{% if messages | length > 2 %}"
            "{{ raise_exception('Conversation roles must alternate user/assistant') }}"
            "{% endif %}" + settings["chat_template"]
        )
        file.write_text(json.dumps(settings))


class TornRow(_Data):
    """A line of the data file is cut in the middle."""

    name, expects, is_fatal = "torn_row", ("data-file-unreadable",), True

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = folder / "train.jsonl"
        lines = file.read_text().splitlines()
        number = random.Random(self.dose.seed).randrange(len(lines))
        lines[number] = lines[number][: len(lines[number]) // 2]
        file.write_text("\n".join(lines) + "\n")


class MissingColumn(_Data):
    """Many rows lack the column that is trained on, and are dropped as the recipe says."""

    name, strength = "rows_unusable", (0.5, 0.9)
    expects = ("rows-dropped",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        rng, file = random.Random(self.dose.seed), folder / "train.jsonl"
        rows = bodies.read_rows(file)
        for row in rows:
            if rng.random() < self.dose.strength:
                del row["completion"]
        bodies.write_rows(file, rows)
        raw["data"]["bad_rows"] = "drop"


class RowsTooLong(_Data):
    """data.max_length is below what most rows have, and they are dropped."""

    name = "rows_too_long"
    expects = ("rows-dropped", "rows-over-length")
    body = Body("sort", "sft", steps=40, num_digits=(3, 6, 7, 8, 9))

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["data"]["max_length"] = 12


class DuplicatedRows(_Data):
    """The data set is a few rows, many times over."""

    name, strength = "duplicated_rows", (4.0, 12.0)
    expects = ("duplicate-rows", "data-repeated", "overfitting")

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = folder / "train.jsonl"
        rows = bodies.read_rows(file)
        few = rows[: round(self.dose.strength)]
        bodies.write_rows(file, few * (len(rows) // len(few)))
        raw["trainer"]["max_steps"] = 60
        raw["eval"]["interval_steps"] = 4


class IdenticalPrompts(_Data):
    """All prompts to learn from are one and the same."""

    name, body = "identical_prompts", SORT
    expects = ("duplicate-rows",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        rows = bodies.read_rows(folder / "train.jsonl")
        bodies.write_rows(folder / "train.jsonl", [rows[self.dose.seed % len(rows)]] * len(rows))


class WrongTokenizer(_Data):
    """The tokenizer is another model's: the same symbols under other numbers."""

    name, body = "wrong_tokenizer", SORT
    expects = ("tokenizer-mismatch",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        other = bodies.write_model(folder / "other")
        file = other / "tokenizer.json"
        content = json.loads(file.read_text())
        digits = list(bodies.DIGITS)
        random.Random(self.dose.seed + 1).shuffle(digits)
        vocab = content["model"]["vocab"]
        vocab |= {digit: number for number, digit in enumerate(digits)}
        file.write_text(json.dumps(content))
        raw["model"]["tokenizer"] = str(other)


class LargerVocabulary(_Data):
    """The tokenizer knows more tokens than the model has rows in its embeddings."""

    name, is_fatal = "larger_vocabulary", True
    expects = ("token-id-out-of-range", "vocabulary-size-mismatch")

    def prepare(self, raw: Raw, folder: Path) -> None:
        bodies.write_model(folder / "model", vocab_size=len(bodies.SYMBOLS) - 14)


class PackingEmpty(_Data):
    """A micro-batch has room for one row and most of a second one, so each row is alone."""

    name, family, strength = "packing_empty", Family.PERFORMANCE, (19.0, 23.0)
    expects = ("packing-low",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["data"]["max_length"] = 16
        raw["trainer"]["max_tokens_per_device"] = round(self.dose.strength)


class NarrowFilters(_Data):
    """A filter asks for a mean reward that no group can have."""

    name, body, strength = "narrow_filters", SORT, (1.05, 2.0)
    expects = ("filters-starve-step",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rollout"]["filters"] = [{"type": "reward_mean", "low": self.dose.strength}]
        raw["rollout"]["max_rounds"] = 2


FAULTS: tuple[type[Injector], ...] = (
    TrainsOnNothing,
    WrongMask,
    ShiftedLabels,
    WrongTemplate,
    TornRow,
    MissingColumn,
    RowsTooLong,
    DuplicatedRows,
    IdenticalPrompts,
    WrongTokenizer,
    LargerVocabulary,
    PackingEmpty,
    NarrowFilters,
)
