"""Raw texts that are continued at regular positions (ebft.mode=strided).

    text -> tokens -> anchors a = context_length, + stride, ...
                   -> prompt text[:a], truth text[a : a + generate_length]

A step draws whole texts. Each anchor of a text is a separate prompt, and what the text says next
is its reference, so that sampling, journal and updates know nothing of strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from homeostat.arrays import IntArray
from homeostat.config.data import DataConfig, TextSource
from homeostat.config.ebft import EbftConfig
from homeostat.data.opening import open_source
from homeostat.data.overlong import OverlongTextError
from homeostat.data.prepare import Progress
from homeostat.data.prompts import PROGRESS_ROWS, PromptSet
from homeostat.data.rows import encode_row, truncate
from homeostat.data.sources import BadRowError
from homeostat.data.store import PrepareReport
from homeostat.data.tally import Tally, judge
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.types import Prompt


class StridedSet(PromptSet):
    """Texts by number. A text that is drawn asks for a continuation at each of its anchors."""

    def __init__(
        self,
        texts: list[Prompt],
        origins: list[str],
        report: PrepareReport,
        *,
        sources: Sequence[int],
        ebft: EbftConfig,
        decode: Callable[[IntArray], str],
    ) -> None:
        super().__init__(texts, origins, report, sources=sources)
        self._ebft, self._decode = ebft, decode
        counts = [len(ebft.anchors(len(text.tokens_T))) for text in texts]
        self._first = np.concatenate([[0], np.cumsum(counts)])

    @property
    def num_asked(self) -> int:
        """Return the number of anchors of all texts."""
        return int(self._first[-1])

    @property
    def asked_per_row(self) -> float:
        return self.num_asked / len(self)

    def drawn(self, prompt_id: int) -> Sequence[int]:
        return range(int(self._first[prompt_id]), int(self._first[prompt_id + 1]))

    def asked(self, prompt_id: int) -> Prompt:
        if not 0 <= prompt_id < self.num_asked:
            raise IndexError(f"anchor {prompt_id} of {self.num_asked}")
        number = self.row_of(prompt_id)
        text = self[number]
        anchor = self._ebft.anchors(len(text.tokens_T))[prompt_id - int(self._first[number])]
        before_T = text.tokens_T[:anchor]
        return Prompt(
            prompt_id,
            before_T,
            self._decode(before_T),
            {**text.columns, "text": number, "position": anchor},
            reference_T=text.tokens_T[anchor : anchor + self._ebft.generate_length],
        )

    def row_of(self, prompt_id: int) -> int:
        return int(np.searchsorted(self._first, prompt_id, side="right")) - 1


def prepare_texts(
    sources: Sequence[TextSource],
    tokenizer: ChatTokenizer,
    data: DataConfig,
    *,
    ebft: EbftConfig,
    progress: Progress | None = None,
) -> StridedSet:
    """Tokenise the texts of the sources. Raises DataError."""
    cuts = data.overlong == "truncate"
    limited = tokenizer.cutting(data.max_length) if cuts else tokenizer.bounded(data.max_length)
    tally, texts, origins, numbers = Tally(), [], [], []
    for number, source in enumerate(sources):
        rows = open_source(source, columns=[source.text_column])
        size = len(rows) if source.limit is None else min(len(rows), source.limit)
        for index in range(size):
            if progress is not None and tally.seen % PROGRESS_ROWS == 0:
                progress(tally.seen, max(size, tally.seen))
            before, after = rows.brackets
            place = f"{before}{rows.number(index)}{after}"
            tally.seen += 1
            try:
                text = _text(rows.row(index), len(texts), source, limited, data, ebft=ebft)
            except OverlongTextError as error:
                limits = {"num_tokens": error.least_tokens, "max_length": data.max_length}
                tally.drop_overlong(place, **limits)
            except BadRowError as error:
                tally.drop_bad(place, error)
            else:
                tally.truncated += text.columns["is_cut"]
                texts.append(text)
                origins.append(place)
                numbers.append(number)
    report = tally.report(
        kept=len(texts), tokens=sum(len(text.tokens_T) for text in texts), trained_tokens=0
    )
    judge(report, data)
    how = {"sources": numbers, "ebft": ebft, "decode": tokenizer.decode}
    return StridedSet(texts, origins, report, **how)


def _text(
    row: dict,
    number: int,
    source: TextSource,
    tokenizer: ChatTokenizer,
    data: DataConfig,
    *,
    ebft: EbftConfig,
) -> Prompt:
    """Return a text in tokens. Raises BadRowError, or OverlongTextError where it is not cut."""
    (encoded,) = encode_row(row, source=source, tokenizer=tokenizer)
    is_cut = len(encoded[0]) > data.max_length
    if is_cut and data.overlong != "truncate":
        raise OverlongTextError(len(encoded[0]))
    tokens_T = truncate(encoded, data.max_length)[0] if is_cut else encoded[0]
    if not ebft.anchors(len(tokens_T)):
        raise BadRowError(
            "too short",
            f"{len(tokens_T)} tokens have no room for ebft.context_length={ebft.context_length} "
            f"and ebft.generate_length={ebft.generate_length}",
        )
    columns = {"is_cut": is_cut}
    return Prompt(number, tokens_T.astype(np.int64), row[source.text_column], columns)
