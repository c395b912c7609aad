"""What an evaluation harness asks of a model: log-likelihoods of given texts, and greedy answers.

This module knows no harness; generation/harness_lm.py gives it the form that
lm-evaluation-harness expects. Texts are opened as in training (begin-of-sequence) and never closed.

Suffixes: `_T` tokens of one text, `_M` scored tokens, `_D` model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from homeostat.arrays import IntArray
from homeostat.errors import DataError
from homeostat.generation.loading import TextModel, open_engine
from homeostat.generation.prompting import SamplingOptions, require_template, text_tokens
from homeostat.generation.sampling_run import SamplingRun
from homeostat.models.decoder import Decoder
from homeostat.ops.attention import PackedLayout
from homeostat.ops.linear import linear
from homeostat.ops.logprobs import token_logprobs

# Tokens of one forward pass, and places whose whole distributions are in memory at a time.
_PASS_TOKENS = {"cpu": 4096, "cuda": 32_768}
_ROWS = 256
_MAX_GEN_TOKENS = 256
_KNOWN_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-prob of a continuation, and whether greedy decoding would give it."""

    logprob: float
    is_greedy: bool


class Harness:
    """A model that is asked by a harness. `context` bounds a text and its answer together."""

    def __init__(
        self,
        model: TextModel,
        *,
        context: int | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._engine = open_engine(model, context=context)
        module = model.loaded.module
        assert isinstance(module, Decoder), "open_engine refuses any other"
        self._model, self._module = model, module
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._on_progress = on_progress
        self.tokenizer = model.tokenizer
        self.max_length = self._engine.max_tokens

    @property
    def prefix_id(self) -> int:
        """Return the token that stands before an empty context."""
        opening = self.tokenizer.prefix_ids
        return opening[0] if opening else self.tokenizer.eos_id

    def encode(self, text: str, *, opened: bool = True) -> list[int]:
        """Return the tokens of a text, opened as in training unless `opened` is false."""
        tokens_T = text_tokens(text, self.tokenizer) if opened else self.tokenizer.encode(text)[0]
        return tokens_T.tolist()

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """Return how likely each continuation is after its context.

        A text beyond the context loses tokens from its start, never from the continuation.
        """
        texts = [self._cut(context, continuation) for context, continuation in pairs]
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        found: dict[int, Scored] = {}
        for batch in self._batches(order, texts):
            sizes = [len(pairs[number][1]) for number in batch]
            scored = self._score_batch([texts[number] for number in batch], sizes)
            found |= dict(zip(batch, scored, strict=True))
            self._on_progress(len(found), len(texts))
        return [found[number] for number in range(len(texts))]

    def score_whole(self, text: str) -> float:
        """Return the log-prob of a whole text; a long one is read in windows without overlap."""
        tokens = self.encode(text)
        if not tokens:
            return 0.0
        starts = range(0, len(tokens), self.max_length)
        pairs = [([self.prefix_id], tokens[: self.max_length])]
        for start in starts[1:]:
            # The last window reaches back, so that its tokens see as much context as others do.
            part = tokens[start : start + self.max_length]
            before = max(0, start + len(part) - self.max_length - 1)
            pairs.append((tokens[before:start], part))
        return sum(one.logprob for one in self.score(pairs))

    def generate(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the answer to each (text, options of the harness), without its stop text."""
        answers: dict[int, str] = {}
        groups: dict[SamplingOptions, list[int]] = {}
        for number, (_, options) in enumerate(asked):
            groups.setdefault(self._sampling(options), []).append(number)
        for sampling, numbers in groups.items():
            room = self.max_length - sampling.max_new_tokens
            prompts = [text_tokens(asked[number][0], self.tokenizer)[-room:] for number in numbers]
            run = SamplingRun(
                self._engine, self.tokenizer, prompts, sampling, samples=1, seed=self._seed
            )
            for place, (answer,) in run.answers():
                answers[numbers[place]] = answer.text
                self._on_progress(len(answers), len(asked))
        return [answers[number] for number in range(len(asked))]

    def chat(self, messages: list[dict[str, str]], *, opens_answer: bool) -> str:
        """Return a chat as one text by the model's template."""
        require_template(self.tokenizer, wanted_by="--chat")
        return self.tokenizer.render(list(messages), add_generation_prompt=opens_answer)

    def _sampling(self, options: Mapping[str, Any]) -> SamplingOptions:
        unknown = sorted(options.keys() - _KNOWN_OPTIONS)
        if unknown:
            raise DataError(
                f"the task asks for generation with {', '.join(unknown)}, which the engine does "
                f"not have. It has {', '.join(sorted(_KNOWN_OPTIONS))}."
            )
        wanted = self._max_new_tokens or int(options.get("max_gen_toks") or _MAX_GEN_TOKENS)
        if wanted >= self.max_length:
            raise DataError(
                f"answers of up to {wanted} tokens leave no room for a prompt: the context is "
                f"{self.max_length}. Lower --max-new-tokens, or raise --context."
            )
        until = options.get("until") or ()
        temperature = float(options.get("temperature") or 0.0)
        samples = options.get("do_sample", temperature > 0)
        return SamplingOptions(
            wanted,
            temperature=(temperature or 1.0) if samples else 0.0,
            top_p=float(options.get("top_p") or 1.0) if samples else 1.0,
            top_k=(options.get("top_k") or None) if samples else None,
            stop=(until,) if isinstance(until, str) else tuple(until),
        )

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> IntArray:
        if not context or not continuation:
            raise DataError("a context and a continuation of at least one token each are needed.")
        if len(continuation) > self.max_length:
            raise DataError(
                f"a continuation has {len(continuation)} tokens, and the context is "
                f"{self.max_length}. Raise --context, or leave out the task."
            )
        # The last token is only predicted, so it needs no room.
        whole = [*context, *continuation][-(self.max_length + 1) :]
        return np.array(whole, dtype=np.int64)

    def _batches(self, order: list[int], texts: list[IntArray]) -> Iterator[list[int]]:
        """Yield numbers of texts that fit into one forward pass; at least one each time."""
        limit, batch, num_tokens = _PASS_TOKENS[self._model.device.type], [], 0
        for number in order:
            size = len(texts[number])
            if batch and num_tokens + size > limit:
                yield batch
                batch, num_tokens = [], 0
            batch.append(number)
            num_tokens += size
        if batch:
            yield batch

    @torch.no_grad()
    def _score_batch(self, texts: list[IntArray], sizes: list[int]) -> list[Scored]:
        """Score the last `sizes` tokens of each text, all in one packed forward pass."""
        device, model = self._model.device, self._module
        lengths = [len(tokens_T) - 1 for tokens_T in texts]
        tokens = torch.from_numpy(np.concatenate([tokens_T[:-1] for tokens_T in texts])).to(device)
        places = torch.cat([torch.arange(length, device=device) for length in lengths])
        hidden_ND = model.hidden(tokens, places, PackedLayout.of(lengths, device))
        ends = np.cumsum(lengths)
        spans = zip(ends, sizes, strict=True)
        rows_M = torch.cat([torch.arange(end - size, end, device=device) for end, size in spans])
        hidden_MD = hidden_ND[rows_M]
        targets = [tokens_T[-size:] for tokens_T, size in zip(texts, sizes, strict=True)]
        target_M = torch.from_numpy(np.concatenate(targets)).to(device)
        weight_VD = model.output_weight()
        chunk = self._engine.chunk_bytes
        logp_M = token_logprobs(
            hidden_MD, weight_VD, target_M, chunk_bytes=chunk, numerics=model.numerics
        )
        best_M = [
            linear(part_MD, weight_VD, numerics=model.numerics).argmax(dim=-1)
            for part_MD in hidden_MD.split(_ROWS)
        ]
        is_best_M = torch.cat(best_M) == target_M
        cuts = np.cumsum([0, *sizes]).tolist()
        return [
            Scored(float(logp_M[a:b].double().sum()), bool(is_best_M[a:b].all()))
            for a, b in pairwise(cuts)
        ]
