"""Generate and score text from Python: `homeostat.Model`, `homeostat.generate`, `homeostat.score`.

A prompt is a text or a list of messages ({"role", "content"}). A text goes through the chat
template as one user message, or is continued as it is, as the model was trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.arrays import IntArray
from homeostat.data.sources import BadRowError
from homeostat.errors import DataError
from homeostat.generation.choice import choose
from homeostat.generation.loading import (
    Device,
    Precision,
    load_text_model,
    open_engine,
    with_template,
)
from homeostat.generation.prompting import (
    SamplingOptions,
    chat_tokens,
    prompt_tokens,
    require_room,
)
from homeostat.generation.sampling_run import Answer, SamplingRun
from homeostat.generation.scoring import score_text
from homeostat.run.calling.surroundings import as_before

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Score:
    """A completion under the model: the log-prob of each token at temperature 1, and their sum."""

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Return the log-prob of the whole completion."""
        return float(np.sum(np.array(self.token_logprobs, dtype=np.float64)))


class Model:
    """A model that generates and scores: a model folder, a .gguf file, an adapter, or a run.

    Or a name on the Hugging Face hub ("owner/name"), with `revision` a branch, tag or commit; it is
    downloaded once. `step` selects the checkpoint of a run (a number, "best" or "latest"); `base`
    is the base model of an adapter whose own files do not say where it is.

    `note` says how it computes where weights are quantised, or where the run computed in another
    precision; empty for all other models.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | str | None = None,
        revision: str | None = None,
        base: str | os.PathLike[str] | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        context: int | None = None,
        device: Device = "auto",
        precision: Precision = "auto",
    ) -> None:
        if context is not None and context < 2:
            raise DataError(f"context is {context}; it must be at least 2 tokens.")
        choice = choose(
            Path(path),
            base=None if base is None else Path(base),
            step=None if step is None else str(step),
            revision=revision,
        )
        choice = with_template(choice, tokenizer=tokenizer, chat_template=chat_template)
        with as_before():
            self._model = load_text_model(choice, device=device, precision=precision)
            self._engine = open_engine(self._model, context=context)
        self.name, self.note = choice.describe(), self._model.note

    def __repr__(self) -> str:
        return f"<homeostat.Model {self.name}>"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        samples: int = 1,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        chat: bool | None = None,
        system: str | None = None,
    ) -> list[list[Answer]]:
        """Return `samples` answers to each prompt. The same seed gives the same answers."""
        if samples < 1:
            raise DataError(f"samples is {samples}; it must be at least 1.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        options = SamplingOptions(max_new_tokens, temperature, top_p, top_k, stop=stops)
        run = SamplingRun(
            self._engine,
            self._model.tokenizer,
            [self._tokens(one, chat=chat, system=system) for one in _several(prompts)],
            options,
            samples=samples,
            seed=seed,
        )
        with as_before():
            return [answers for _, answers in run.answers()]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: str | Sequence[str],
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> list[Score]:
        """Return the log-probs of one completion of each prompt, by the trainer's own function."""
        asked = _several(prompts)
        given = [completions] if isinstance(completions, str) else list(completions)
        if len(asked) != len(given):
            raise DataError(f"{len(asked)} prompts and {len(given)} completions: give one each.")
        return [
            self._score(self._tokens(one, chat=chat, system=system), text)
            for one, text in zip(asked, given, strict=True)
        ]

    def _score(self, prompt_T: IntArray, completion: str) -> Score:
        try:
            new_T, _ = self._model.tokenizer.encode(completion)
        except BadRowError as error:
            raise DataError(f"completion: {error}.") from None
        if not len(new_T):
            raise DataError("a completion is empty: it has no token to score.")
        if not len(prompt_T):
            raise DataError("a prompt is empty: nothing predicts the completion's first token.")
        require_room(len(prompt_T) + len(new_T) - 1, self._engine.max_tokens)
        with as_before():
            found = score_text(
                self._engine.model,
                np.concatenate([prompt_T, new_T]),
                top=0,
                device=self._engine.device,
                chunk_bytes=self._engine.chunk_bytes,
            )
        since = len(prompt_T) - 1
        return Score(tuple(map(int, new_T)), tuple(found.logprobs[since:]))

    def _tokens(self, prompt: Prompt, *, chat: bool | None, system: str | None) -> IntArray:
        as_chat = self._model.answers_chats if chat is None else chat
        if isinstance(prompt, str):
            if system is not None and not as_chat:
                raise DataError("system needs a chat, and this prompt is a plain text.")
            how = {"as_chat": as_chat, "system": system}
            return prompt_tokens(prompt, self._model.tokenizer, **how)
        if system is not None:
            raise DataError("system and messages exclude each other: messages have their own.")
        return chat_tokens([dict(message) for message in prompt], self._model.tokenizer)


def generate(
    model: Model | str | os.PathLike[str], prompts: Prompt | Sequence[Prompt], **options: Any
) -> list[list[Answer]]:
    """Return answers to prompts, with the options of `Model.generate`.

    A path is loaded by every call: make a Model of it to ask more than once.
    """
    return _opened(model).generate(prompts, **options)


def score(
    model: Model | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    completions: str | Sequence[str],
    **options: Any,
) -> list[Score]:
    """Return the log-probs of completions, with the options of `Model.score`."""
    return _opened(model).score(prompts, completions, **options)


def _opened(model: Model | str | os.PathLike[str]) -> Model:
    return model if isinstance(model, Model) else Model(model)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text, or the messages of one chat, is a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    found = list(prompts)
    if not found:
        raise DataError("there is no prompt.")
    return [found] if isinstance(found[0], Mapping) else found  # type: ignore[list-item]
