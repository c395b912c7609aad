"""Answers to a list of prompts: streamed as text, or whole and in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homeostat.arrays import IntArray
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.generation.prompting import SamplingOptions, require_room
from homeostat.generation.streams import Streams
from homeostat.generation.text_stream import TextStream
from homeostat.rollout.engine import Request
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, StopReason

# How long the engine computes before what it has is shown: a tenth of a second looks immediate.
_PIECE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as text. `logprob` is the sum over its tokens, under the full distribution."""

    text: str
    num_tokens: int
    logprob: float
    stop_reason: StopReason


class SamplingRun:
    """All answers to some prompts. What is sampled depends on the seed alone, not on the batch."""

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: ChatTokenizer,
        prompts: Sequence[IntArray],
        options: SamplingOptions,
        *,
        samples: int,
        seed: int,
    ) -> None:
        self._engine, self._tokenizer, self._options = engine, tokenizer, options
        self._prompts, self._samples, self._seed = prompts, samples, seed

    def pieces(self) -> Iterator[str]:
        """Yield the text of the only answer, a piece at a time."""
        assert len(self._prompts) * self._samples == 1, "a single answer can be streamed"
        streams, text = Streams(self._engine), self._text_stream()
        self._submit(streams)
        while len(streams):
            for news in streams.advance(timeout_s=_PIECE_S):
                is_last = news.completion is not None
                yield text.finish(news.tokens) if is_last else text.push(news.tokens)

    def answers(self) -> Iterator[tuple[int, list[Answer]]]:
        """Yield (number of the prompt, its answers), in the order of the prompts."""
        streams = Streams(self._engine)
        self._submit(streams)
        done: dict[str, Answer] = {}
        for number in range(len(self._prompts)):
            ids = [_id(number, sample) for sample in range(self._samples)]
            while not all(id in done for id in ids):
                for news in streams.advance(timeout_s=60.0):
                    if news.completion is not None:
                        done[news.id] = self._answer(news.completion)
            yield number, [done.pop(id) for id in ids]

    def _submit(self, streams: Streams) -> None:
        context = self._engine.max_tokens
        # All prompts are judged before the first of them is computed.
        rooms = [require_room(len(tokens_T), context) for tokens_T in self._prompts]
        for number, (tokens_T, room) in enumerate(zip(self._prompts, rooms, strict=True)):
            sampling = self._options.for_engine(self._tokenizer, room=room)
            for sample in range(self._samples):
                key = f"prompt{number}" if self._samples > 1 else None
                id = _id(number, sample)
                streams.submit(Request(id, tokens_T, sampling, self._seed, session_key=key))

    def _text_stream(self) -> TextStream:
        return TextStream(
            self._tokenizer.decode,
            stop_ids=self._tokenizer.stop_ids,
            stop_strings=self._options.stop,
        )

    def _answer(self, completion: Completion) -> Answer:
        text = self._text_stream()
        text.finish(completion.tokens_T.tolist())
        logprob = float(completion.engine_logp_T.astype("float64").sum())
        return Answer(text.text, len(completion), logprob, completion.stop_reason)


def _id(number: int, sample: int) -> str:
    return f"{number}/{sample}"
