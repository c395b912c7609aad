"""The facts that `homeostat inspect` shows about a recipe's rows or prompts, as plain values.

Rows that training would refuse are dropped here and reported as warnings, so that the valid ones
can still be inspected.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from homeostat.algorithms.row_loss import RowLoss
from homeostat.arrays import IntArray
from homeostat.config.curriculum import AnyFilter
from homeostat.config.data import DataConfig
from homeostat.config.parts import InputSettings
from homeostat.data.inputs import RowSet, choose_rows, prepare_prompt_part, prepare_row_part
from homeostat.data.loader import PlanLoader
from homeostat.data.mixing import SourcePart, source_parts
from homeostat.data.packing import fill
from homeostat.data.prepare import Progress
from homeostat.data.prompts import PromptSet
from homeostat.data.sources import readable
from homeostat.data.store import BadRow, PrepareReport, RowStore
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.types import TokenRow

NUM_UPDATES = 3
MAX_DROPPED_SHARE = 0.1
MIN_TRAINED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Token:
    """A token, the text it shows, and its loss weight.

    If a character consists of several tokens, the last one shows it.
    """

    id: int
    text: str
    weight: float
    special: bool


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """A row, or a prompt, which has nothing trained and columns for the rewards.

    `side` says which completion of a preference the row holds; it is empty in other rows.
    """

    row_id: int
    origin: str
    num_tokens: int
    num_trained: int
    tokens: tuple[Token, ...]
    columns: dict[str, str] = field(default_factory=dict)
    side: str = ""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """The number of rows that have from `low` to `high` tokens."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True, slots=True)
class InspectedUpdate:
    """One update: its rows and tokens, and the tokens and fill of each micro-batch."""

    step: int
    rows: int
    tokens: int
    micro_batch_tokens: tuple[int, ...]
    fill: float | None


@dataclass(frozen=True, slots=True)
class Warned:
    """Something to know before training. An error is what `train` would refuse."""

    level: Literal["error", "warning"]
    message: str
    examples: tuple[BadRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspection:
    """All results. `train_rows` counts prompts if `is_rl`; there are no updates to show then.

    `unit` is what the counts of the report and `train_rows` count.
    """

    is_rl: bool
    vocab_size: int
    stops: tuple[str, ...]
    notes: tuple[str, ...]
    report: PrepareReport
    train_rows: int
    total_steps: int | None
    lengths: tuple[LengthBin, ...]
    rows: tuple[InspectedRow, ...]
    updates: tuple[InspectedUpdate, ...]
    warnings: tuple[Warned, ...]
    unit: Literal["rows", "pairs"] = "rows"
    # The part of every source, if there are several.
    mix: tuple[SourcePart, ...] = ()
    # The filters of sampled groups and their settings (RL).
    filters: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_rows(
    config: InputSettings,
    tokenizer: ChatTokenizer,
    *,
    loss: RowLoss,
    cache_dir: Path,
    num_rows: int,
    row_ids: list[int],
    progress: Progress | None = None,
) -> Inspection:
    """Tokenise the training rows and inspect `row_ids`, or the first `num_rows`."""
    lenient = _lenient(config.data, overlong=_kept_overlong(config.data))
    store = prepare_row_part(lenient, tokenizer, "train", cache_dir=cache_dir, progress=progress)
    train = choose_rows(config, store, None).train
    chosen = row_ids or list(range(min(num_rows * config.rows_per_example, len(store))))
    return Inspection(
        is_rl=False,
        vocab_size=tokenizer.vocab_size,
        stops=_stops(tokenizer),
        notes=tokenizer.notes,
        report=store.report,
        train_rows=len(train),
        total_steps=config.trainer.total_steps(len(train)),
        lengths=length_bins(store.lengths),
        rows=tuple(
            _look_at(store, row_id, tokenizer, rows_per_example=config.rows_per_example)
            for row_id in chosen
        ),
        updates=_first_updates(config, store, train.ids, loss),
        warnings=tuple(find_warnings(store.report, config.data)),
        unit="rows" if config.rows_per_example == 1 else "pairs",
        mix=_mix(config, train),
    )


def inspect_prompts(
    config: InputSettings,
    tokenizer: ChatTokenizer,
    *,
    num_rows: int,
    row_ids: list[int],
    progress: Progress | None = None,
) -> Inspection:
    """Tokenise the training prompts and inspect `row_ids`, or the first `num_rows`."""
    lenient = replace(config, data=_lenient(config.data, overlong="drop"))
    prompts = prepare_prompt_part(lenient, tokenizer, "train", progress=progress)
    train = choose_rows(config, prompts, None).train
    chosen = row_ids or list(range(min(num_rows, len(prompts))))
    return Inspection(
        is_rl=True,
        vocab_size=tokenizer.vocab_size,
        stops=_stops(tokenizer),
        notes=tokenizer.notes,
        report=prompts.report,
        train_rows=len(train),
        total_steps=None,
        lengths=length_bins(prompts.lengths),
        rows=tuple(_look_at_prompt(prompts, prompt_id, tokenizer) for prompt_id in chosen),
        updates=(),
        warnings=tuple(find_warnings(prompts.report, config.data, is_rl=True)),
        mix=_mix(config, train),
        filters=tuple(map(_described, config.rollout.filters)),
    )


def _described(one: AnyFilter) -> str:
    """Return a filter's type with the settings that the recipe gives it."""
    given = one.model_dump(exclude={"type"}, exclude_unset=True)
    return ", ".join([one.type, *(f"{name} {value}" for name, value in given.items())])


def _mix(
    config: InputSettings, train: RowSet[RowStore] | RowSet[PromptSet]
) -> tuple[SourcePart, ...]:
    if len(config.data.train) < 2:
        return ()
    per_step = config.rows_per_step
    total = config.trainer.total_steps(len(train), rows_per_step=per_step)
    return source_parts(config.data, train.sources, total_steps=total, rows_per_step=per_step)


def _stops(tokenizer: ChatTokenizer) -> tuple[str, ...]:
    return tuple(sorted(tokenizer.decode([token]) for token in tokenizer.stop_ids))


def _lenient(data: DataConfig, *, overlong: str) -> DataConfig:
    """Return the settings with bad rows dropped, so that the sound ones can be looked at."""
    return data.model_copy(update={"bad_rows": "drop", "overlong": overlong})


def _kept_overlong(data: DataConfig) -> str:
    return "drop" if data.overlong == "refuse" else data.overlong


def _require_row(row_id: int, num_rows: int) -> None:
    if not 0 <= row_id < num_rows:
        raise DataError(f"--row-id {row_id}: the rows are numbered from 0 to {num_rows - 1}.")


def _look_at_prompt(prompts: PromptSet, prompt_id: int, tokenizer: ChatTokenizer) -> InspectedRow:
    _require_row(prompt_id, len(prompts))
    prompt = prompts[prompt_id]
    untrained_T = np.zeros(len(prompt.tokens_T), dtype=np.float32)
    row = TokenRow(prompt_id, prompt.tokens_T, untrained_T)
    columns = {name: readable(str(held), max_chars=200) for name, held in prompt.columns.items()}
    return InspectedRow(
        row_id=prompt_id,
        origin=prompts.origin(prompt_id),
        num_tokens=len(row),
        num_trained=0,
        tokens=tuple(spell(row, tokenizer)),
        columns=columns,
    )


def _look_at(
    store: RowStore, row_id: int, tokenizer: ChatTokenizer, *, rows_per_example: int
) -> InspectedRow:
    _require_row(row_id, len(store))
    row = store[row_id]
    return InspectedRow(
        row_id=row_id,
        origin=store.origin(row_id),
        num_tokens=len(row),
        num_trained=int(np.count_nonzero(row.weights_T)),
        tokens=tuple(spell(row, tokenizer)),
        side=_side(float(store.labels_B[row_id]), row_id, rows_per_example=rows_per_example),
    )


def _side(label: float, row_id: int, *, rows_per_example: int) -> str:
    if math.isnan(label):
        return ""
    if rows_per_example == 1:
        return {1.0: "desirable", -1.0: "undesirable"}.get(label, f"score {label:g}")
    # A pair may have a margin of 0, so that the label has no sign.
    side = "rejected" if row_id % rows_per_example else "chosen"
    return f"{side} of pair {row_id // rows_per_example}"


def spell(row: TokenRow, tokenizer: ChatTokenizer) -> list[Token]:
    """Return each token with the text that it adds after the one before it."""
    found: list[Token] = []
    before: list[int] = []
    pending: list[int] = []
    last = len(row) - 1
    for place, (token, weight) in enumerate(zip(row.tokens_T, row.weights_T, strict=True)):
        pending.append(int(token))
        text = tokenizer.decode(before + pending)[len(tokenizer.decode(before)) :]
        # A character outside ASCII has up to four bytes, and so up to four tokens.
        if text.endswith("\ufffd") and len(pending) < 4 and place < last:
            text = ""
        else:
            before, pending = pending, []
        special = tokenizer.is_special(int(token))
        found.append(Token(int(token), text, float(weight), special))
    return found


def length_bins(lengths: IntArray) -> tuple[LengthBin, ...]:
    """Count rows by length in powers of two, from the shortest row to the longest."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    bins = []
    for power in range(int(powers.min()), int(powers.max()) + 1):
        rows = int(np.count_nonzero(powers == power))
        bins.append(LengthBin(2**power, 2 ** (power + 1) - 1, rows))
    return tuple(bins)


def _first_updates(
    config: InputSettings, store: RowStore, train_ids: IntArray, loss: RowLoss
) -> tuple[InspectedUpdate, ...]:
    budget = config.trainer.tokens_per_micro_batch if config.trainer.packing else None
    found = []
    with PlanLoader(
        store,
        row_ids=train_ids,
        trainer=config.trainer,
        data=config.data,
        loss=loss,
        seed=config.seed,
    ) as loader:
        for plan in loader:
            sizes = tuple(batch.num_tokens for batch in plan.micro_batches)
            share = fill(sizes, num_bins=len(sizes), max_tokens=budget) if budget else None
            found.append(InspectedUpdate(plan.step, plan.num_rows, plan.num_tokens, sizes, share))
            if len(found) == NUM_UPDATES:
                break
    return tuple(found)


def find_warnings(report: PrepareReport, data: DataConfig, *, is_rl: bool = False) -> list[Warned]:
    """Return warnings about the prepared rows."""
    found: list[Warned] = []
    if report.num_bad:
        level = "error" if data.bad_rows == "refuse" else "warning"
        kinds = ", ".join(f"{count} {reason}" for reason, count in report.bad.items())
        message = f"{report.num_bad} of {report.seen} rows cannot be used ({kinds})."
        found.append(Warned(level, message, report.examples))
    overlong = report.dropped_overlong
    if overlong and data.overlong == "refuse":
        message = f"{overlong} rows are longer than data.max_length={data.max_length}."
        found.append(Warned("error", message, report.overlong_examples))
    lost = report.seen - report.kept
    if lost > MAX_DROPPED_SHARE * report.seen:
        share = lost / report.seen
        ways = "Raise data.max_length" + ("." if is_rl else " or set data.overlong=truncate.")
        hint = f" {ways}" if overlong else ""
        message = f"only {report.kept} of {report.seen} rows are left ({share:.0%} dropped).{hint}"
        found.append(Warned("warning", message))
    if report.truncated:
        message = f"{report.truncated} rows are truncated, and do not teach the model to stop."
        found.append(Warned("warning", message))
    if not is_rl and report.trained_tokens < MIN_TRAINED_SHARE * report.tokens:
        share = report.trained_tokens / report.tokens
        found.append(Warned("warning", f"only {share:.2%} of all tokens are trained."))
    return found
