"""A conversation with a model: messages so far, and the next answer as it is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.generation.prompting import SamplingOptions, chat_tokens, require_room
from homeostat.generation.streams import Streams
from homeostat.generation.text_stream import TextStream
from homeostat.rollout.engine import Request
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import StopReason

# How long the engine computes before what it has is shown.
_PIECE_S = 0.05


@dataclass(slots=True)
class Conversation:
    """The messages of one chat. The engine keeps the cache of a turn for the next one."""

    engine: NativeEngine
    tokenizer: ChatTokenizer
    options: SamplingOptions
    seed: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)
    last_reason: StopReason | None = None
    last_tokens: int = 0
    _turns: int = 0

    def restart(self, system: str | None = None) -> None:
        """Forget all messages; `system` becomes the first one."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def forget_answer(self) -> bool:
        """Remove the last answer, so that the last question can be asked again."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def ask(self, text: str) -> Iterator[str]:
        """Add a user's message and yield the answer, a piece at a time.

        An answer that is broken off (by closing the iterator) stays as far as it was shown.
        """
        self.messages.append({"role": "user", "content": text})
        yield from self.answer()

    def answer(self) -> Iterator[str]:
        """Yield the answer to the last message."""
        try:
            tokens_T = chat_tokens(self.messages, self.tokenizer)
            room = require_room(len(tokens_T), self.engine.max_tokens)
        except DataError:
            # A message that cannot be answered must not stand in the way of the next one.
            self.messages.pop()
            raise
        sampling = self.options.for_engine(self.tokenizer, room=room)
        self._turns += 1
        id = f"turn{self._turns}"
        streams = Streams(self.engine)
        streams.submit(
            Request(id, tokens_T, sampling, self.seed, session_key="chat", keep_cache=True)
        )
        text = TextStream(
            self.tokenizer.decode,
            stop_ids=self.tokenizer.stop_ids,
            stop_strings=self.options.stop,
        )
        self.last_reason, self.last_tokens = StopReason.ABORTED, 0
        try:
            while len(streams):
                for news in streams.advance(timeout_s=_PIECE_S):
                    self.last_tokens += len(news.tokens)
                    if news.completion is None:
                        yield text.push(news.tokens)
                    else:
                        self.last_reason = news.completion.stop_reason
                        yield text.finish(news.tokens)
        finally:
            streams.cancel(id)
            self.messages.append({"role": "assistant", "content": text.text})
