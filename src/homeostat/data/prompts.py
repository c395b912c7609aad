"""Prompts as tokens, and the order in which a run uses them.

    sources -> rows -> chat template with the opening of the answer -> PromptSet -> PromptSampler

A prompt is rendered and tokenised as the same chat is in SFT, up to where the assistant's turn
begins; a plain text is opened as in SFT, and not closed. Rows that cannot be used are dropped or
refused by the same settings, with the same messages.

All prompts are held in memory with their columns: a prompt of 500 tokens takes some 10 kB, so
100,000 of them take 1 GB. A source's `limit` uses fewer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from homeostat.arrays import IntArray
from homeostat.config.data import DataConfig, PromptSource, ReasoningGymSource, RlSource
from homeostat.data.chat import encode_prompt, parse_prompt, with_system
from homeostat.data.gym import GymRows
from homeostat.data.mixing import EpochOrder
from homeostat.data.opening import open_source
from homeostat.data.overlong import OverlongTextError
from homeostat.data.prepare import Progress
from homeostat.data.references import References, with_reference
from homeostat.data.rows import cell, opening
from homeostat.data.sources import BadRowError, RowSource
from homeostat.data.store import PrepareReport
from homeostat.data.tally import Tally, judge
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.types import Prompt

PROGRESS_ROWS = 256


class PromptSet:
    """Prompts by number."""

    def __init__(
        self,
        prompts: list[Prompt],
        origins: list[str],
        report: PrepareReport,
        *,
        sources: Sequence[int] | None = None,
    ) -> None:
        """`sources` has the number of each prompt's source; without it all are of one source."""
        assert prompts, "judge refuses a source without prompts"
        self._prompts, self._origins = prompts, origins
        self.source_B: IntArray = np.array(sources or [0] * len(prompts), dtype=np.int64)
        self.report = report
        self.lengths: IntArray = np.array([len(prompt.tokens_T) for prompt in prompts])
        self.fingerprint = _content_digest(prompts)
        # Numbers the distinct prompts, for split_rows: equal ones stay on one side, because a
        # held-out prompt that is also trained on proves nothing.
        numbers: dict[bytes, int] = {}
        self.made_from_B: IntArray = np.array(
            [numbers.setdefault(prompt.tokens_T.tobytes(), len(numbers)) for prompt in prompts]
        )

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def asked_per_row(self) -> float:
        """Return how many prompts a row asks on average."""
        return 1.0

    def drawn(self, prompt_id: int) -> Sequence[int]:
        """Return the ids of the prompts that are asked when a row is drawn: the row's own."""
        return (prompt_id,)

    def asked(self, prompt_id: int) -> Prompt:
        """Return a prompt of `drawn` by its id."""
        return self[prompt_id]

    def row_of(self, prompt_id: int) -> int:
        """Return the row that asks a prompt."""
        return prompt_id

    def __getitem__(self, prompt_id: int) -> Prompt:
        if not 0 <= prompt_id < len(self):
            raise IndexError(f"prompt {prompt_id} of {len(self)}")
        return self._prompts[prompt_id]

    @property
    def max_token_id(self) -> int:
        """Return the largest id of all prompts; the model's vocabulary must contain it."""
        return max(int(prompt.tokens_T.max()) for prompt in self._prompts)

    def origin(self, prompt_id: int) -> str:
        """Return the place of a row: `file:line`, or `file[row]` counted from 0."""
        return self._origins[prompt_id]


def prepare_prompts(
    sources: Sequence[RlSource],
    tokenizer: ChatTokenizer,
    data: DataConfig,
    *,
    references: References | None = None,
    progress: Progress | None = None,
) -> PromptSet:
    """Tokenise the prompts of the sources, with their reference answers. Raises DataError."""
    for source in sources:
        if source.chat:
            tokenizer.require_chat_template(wanted_by=_describe(source))
    opened = [_open(source) for source in sources]
    sizes = [_size(source, rows) for source, rows in zip(sources, opened, strict=True)]
    bounded = tokenizer.bounded(data.max_length)
    gathered = _Gathered(bounded, data.max_length, references, tokenizer)
    for number, (source, rows, size) in enumerate(zip(sources, opened, sizes, strict=True)):
        for index in range(size):
            if progress is not None and gathered.tally.seen % PROGRESS_ROWS == 0:
                progress(gathered.tally.seen, sum(sizes))
            gathered.add(source, rows, index)
        gathered.sources += [number] * (len(gathered.prompts) - len(gathered.sources))
    if progress is not None:
        progress(gathered.tally.seen, sum(sizes))
    report = gathered.report()
    judge(report, data, may_cut=False)
    return PromptSet(gathered.prompts, gathered.origins, report, sources=gathered.sources)


@dataclass(slots=True)
class _Gathered:
    """The prompts so far, and the counts of the other rows."""

    tokenizer: ChatTokenizer
    max_length: int
    references: References | None
    # Answers may be longer than prompts.
    unbounded: ChatTokenizer
    tally: Tally = field(default_factory=Tally)
    prompts: list[Prompt] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def add(self, source: RlSource, rows: RowSource, index: int) -> None:
        before, after = rows.brackets
        place = f"{before}{rows.number(index)}{after}"
        self.tally.seen += 1
        try:
            prompt = self._prompt(rows.row(index), source)
        except OverlongTextError as error:
            least = error.least_tokens
            self.tally.drop_overlong(place, num_tokens=least, max_length=self.max_length)
            return
        except BadRowError as error:
            self.tally.drop_bad(place, error)
            return
        num_tokens = len(prompt.tokens_T)
        if num_tokens > self.max_length:
            self.tally.drop_overlong(place, num_tokens=num_tokens, max_length=self.max_length)
            return
        self.prompts.append(prompt)
        self.origins.append(place)

    def _prompt(self, row: dict[str, Any], source: RlSource) -> Prompt:
        prompt = make_prompt(row, len(self.prompts), source, self.tokenizer)
        if self.references is None:
            return prompt
        messages = _messages(prompt.prompt, source)
        return with_reference(
            prompt, messages, source, references=self.references, tokenizer=self.unbounded
        )

    def report(self) -> PrepareReport:
        tokens = sum(len(prompt.tokens_T) for prompt in self.prompts)
        return self.tally.report(kept=len(self.prompts), tokens=tokens, trained_tokens=0)


def make_prompt(
    row: dict[str, Any], prompt_id: int, source: RlSource, tokenizer: ChatTokenizer
) -> Prompt:
    """Turn a row into a prompt, whose content is kept unchanged. Raises BadRowError."""
    prompt, columns = _read(row, source)
    if isinstance(prompt, str) and not prompt.strip():
        raise BadRowError("empty prompt", "the prompt holds no text")
    messages = _messages(prompt, source)
    if messages is None:
        tokens_T, _ = tokenizer.encode(prompt)
        opened_by = np.array(opening(tokens_T, tokenizer), dtype=np.int64)
        return Prompt(prompt_id, np.concatenate([opened_by, tokens_T]), prompt, columns)
    tokenizer.require_chat_template(wanted_by=_describe(source))
    return Prompt(prompt_id, encode_prompt(parse_prompt(messages), tokenizer), prompt, columns)


def _messages(prompt: Any, source: RlSource) -> list[Any] | None:
    """Return the messages of a chat; None for a text that is used as it is."""
    if isinstance(prompt, str) and not source.chat:
        return None
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return with_system(messages, source.system)


def _read(row: dict[str, Any], source: RlSource) -> tuple[Any, dict[str, Any]]:
    if isinstance(source, ReasoningGymSource):
        asked = [row["question"], *([] if source.instruction is None else [source.instruction])]
        return "\n".join(asked), row
    prompt = cell(row, source.prompt_column, "a text or a list of messages")
    if not isinstance(prompt, str | list):
        kind = type(prompt).__name__
        raise BadRowError("wrong type", f"column {source.prompt_column!r} holds a {kind}")
    return prompt, {name: held for name, held in row.items() if name != source.prompt_column}


def _open(source: RlSource) -> RowSource:
    if isinstance(source, ReasoningGymSource):
        return GymRows(source)
    return open_source(source, columns=None, required=[source.prompt_column])


def _size(source: RlSource, rows: RowSource) -> int:
    if isinstance(source, PromptSource) and source.limit is not None:
        return min(len(rows), source.limit)
    return len(rows)


def _describe(source: RlSource) -> str:
    place = source.task if isinstance(source, ReasoningGymSource) else source.path
    return f"{source.type} source {place}"


def _content_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the content, not the files: a copy on another disk is the same data."""
    digest = hashlib.sha256()
    for prompt in prompts:
        # Parquet has types that JSON lacks (dates, decimals): use their repr.
        text = json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=repr).encode()
        digest.update(f"{len(prompt.tokens_T)} {len(text)} ".encode())
        digest.update(prompt.tokens_T.astype("<i4").tobytes())
        digest.update(text)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The share of a group's samples that solved its prompt; None if none could be judged."""

    prompt_id: int
    rate: float | None


class PromptDraws(Protocol):
    """The order in which a run uses its prompts. The state is part of every checkpoint."""

    def draw(self, count: int, *, step: int, round: int) -> list[int]:
        """Return the prompts of a sampling round."""
        ...

    def learn(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Take in how often the prompts of a step were solved, in the order of their numbers."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that was learned last."""
        ...

    @property
    def epoch(self) -> float:
        """Return the number of prompts handed out over the number of prompts."""
        ...

    def state(self) -> dict[str, Any]: ...


class PromptSampler:
    """Hand out prompt ids, epoch after epoch.

    The order of an epoch depends only on (seed, epoch), so the state is the number of prompts
    handed out. A step may span two epochs; then, or if it takes more prompts than there are, it may
    contain a prompt twice, which gives two groups.
    """

    def __init__(
        self,
        prompt_ids: IntArray,
        *,
        seed: int,
        shuffle: bool,
        fingerprint: str,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._order = EpochOrder(prompt_ids, key=(seed,), shuffle=shuffle)
        digest = hashlib.sha256(f"{fingerprint} {(seed, shuffle)}".encode())
        digest.update(self._order.row_ids.tobytes())
        self._fingerprint = digest.hexdigest()
        self._cursor = 0 if state is None else self._resume_from(state)

    def take(self, count: int) -> list[int]:
        """Return the next `count` prompts."""
        taken = self._order.span(self._cursor, count)
        self._cursor += count
        return taken

    def draw(self, count: int, *, step: int, round: int) -> list[int]:
        """Return the prompts of a sampling round: the next ones, whatever step it belongs to."""
        return self.take(count)

    def learn(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Take in how often prompts were solved, which an epoch's order does not depend on."""

    def metrics(self) -> dict[str, float]:
        """Return nothing: an epoch's order has no metrics."""
        return {}

    @property
    def epoch(self) -> float:
        """Return how often every prompt was handed out."""
        return self._cursor / len(self._order.row_ids)

    def state(self) -> dict[str, Any]:
        return {"cursor": self._cursor, "data": self._fingerprint}

    def _resume_from(self, state: Mapping[str, Any]) -> int:
        cursor, data = state.get("cursor"), state.get("data")
        if type(cursor) is not int or cursor < 0 or not isinstance(data, str):
            raise DataError(f"the checkpoint's state.json: data is damaged: {dict(state)!r:.200}")
        if data != self._fingerprint:
            raise DataError(
                "the prompts are not those that the run started with, according to the "
                "checkpoint's state.json (or data.shuffle or seed changed), so it cannot be "
                "continued where it stopped. Restore the data files and settings, or start a new "
                "run with another `name`."
            )
        return cursor
