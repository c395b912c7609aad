"""Converts groups of rollouts to flat arrays, concatenated with lengths beside them, and back.

    group/*    prompt ids, the prompts' tokens, samples of each
    sample/*   request id, text, stop reason, reward, every function's reward (a number, None, or
               failed), segments of each
    segment/*  tokens (int32), engine_logp and sampled_logp (float32), version, policy, author,
               and the columns that engines recorded, of prompts in sample/prompt_columns

The legend explains the numbers in the arrays. It is stored with them as JSON. Decoding restores the
groups bitwise. Prompts belong to the dataset: only their tokens are stored, and they must agree
with the prompts that `prompt_of` returns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.columns import from_arrays, to_arrays
from homeostat.errors import DataError
from homeostat.types import (
    Author,
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
)

Arrays = dict[str, np.ndarray]
Legend = Mapping[str, Any]
PromptOf = Callable[[int], Prompt]

_STOPS, _AUTHORS = list(StopReason), list(Author)
# The states of a cell in a table of optional numbers.
ABSENT, NONE, NUMBER, FAILED = 0, 1, 2, 3
_NOT_THERE, _HAS_FAILED = object(), object()


def encode(groups: Sequence[RolloutGroup]) -> tuple[dict[str, Any], Arrays]:
    """Return the legend and the arrays of some groups."""
    samples = [sample for group in groups for sample in group.samples]
    segments = [segment for sample in samples for segment in sample.completion.segments]
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    policies = list(dict.fromkeys(segment.policy_id for segment in segments))
    legend = {
        "rewards": names,
        "policies": policies,
        "stop_reasons": _STOPS,
        "authors": _AUTHORS,
    }
    arrays = {
        **_group_arrays(groups),
        **_sample_arrays(samples, names),
        **_segment_arrays(segments, policies),
    }
    return legend, arrays


def decode(
    legend: Legend, arrays: Arrays, prompt_of: PromptOf, *, place: Path
) -> list[RolloutGroup]:
    """Return the groups. Raises DataError, which names the `place`, if `prompt_of` gives other
    prompts than they were sampled for."""
    samples = iter(_samples(legend, arrays))
    sizes = arrays["group/samples"].tolist()
    return [
        RolloutGroup(prompt, tuple(itertools.islice(samples, size)))
        for prompt, size in zip(_prompts(arrays, prompt_of, place), sizes, strict=True)
    ]


def _group_arrays(groups: Sequence[RolloutGroup]) -> Arrays:
    return {
        "group/prompt_ids": _ints([group.prompt.prompt_id for group in groups]),
        "group/prompt_tokens": _flat([group.prompt.tokens_T for group in groups], np.int32),
        "group/prompt_lengths": _ints([len(group.prompt.tokens_T) for group in groups]),
        "group/samples": _ints([len(group.samples) for group in groups]),
    }


def _sample_arrays(samples: Sequence[Sample], names: Sequence[str]) -> Arrays:
    completions = [sample.completion for sample in samples]
    table = [[_reward_cell(sample, name) for name in names] for sample in samples]
    return {
        "sample/segments": _ints([len(completion.segments) for completion in completions]),
        "sample/stop_reasons": _ints([_STOPS.index(c.stop_reason) for c in completions]),
        **_text_arrays("sample/texts", [sample.text for sample in samples]),
        **_text_arrays("sample/extras", [json.dumps(dict(sample.extras)) for sample in samples]),
        **_text_arrays("sample/request_ids", [c.request_id for c in completions]),
        **to_arrays("sample/prompt_columns", [c.prompt_columns for c in completions]),
        **_number_arrays("sample/reward", [[sample.reward] for sample in samples], width=1),
        **_number_arrays("sample/rewards", table, width=len(names)),
    }


def _reward_cell(sample: Sample, name: str) -> Any:
    return _HAS_FAILED if name in sample.failed else sample.rewards.get(name, _NOT_THERE)


def _segment_arrays(segments: Sequence[Segment], policies: Sequence[str]) -> Arrays:
    cut = [segment.sampled_logp_T for segment in segments if segment.sampled_logp_T is not None]
    return {
        "segment/lengths": _ints([len(segment.tokens_T) for segment in segments]),
        "segment/tokens": _flat([segment.tokens_T for segment in segments], np.int32),
        "segment/engine_logp": _flat([segment.engine_logp_T for segment in segments], np.float32),
        "segment/sampled_logp": _flat(cut, np.float32),
        "segment/is_cut": _ints([segment.sampled_logp_T is not None for segment in segments]),
        "segment/versions": _ints([segment.policy_version for segment in segments]),
        "segment/policies": _ints([policies.index(segment.policy_id) for segment in segments]),
        "segment/authors": _ints([_AUTHORS.index(segment.author) for segment in segments]),
        **to_arrays("segment/columns", [segment.columns for segment in segments]),
    }


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _flat(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _text_arrays(name: str, texts: Sequence[str]) -> Arrays:
    # A text may hold half a surrogate pair, which strict UTF-8 would refuse.
    parts = [text.encode("utf-8", errors="surrogatepass") for text in texts]
    flat = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return {name: flat, f"{name}/lengths": _ints([len(part) for part in parts])}


def _number_arrays(name: str, table: Sequence[Sequence[Any]], *, width: int) -> Arrays:
    """Encode a table of numbers, some of them None, failed or not there at all."""
    values = np.zeros((len(table), width), dtype=np.float64)
    kinds = np.zeros((len(table), width), dtype=np.uint8)
    for row, cells in enumerate(table):
        for column, cell in enumerate(cells):
            if cell is _NOT_THERE:
                continue
            if cell is None or cell is _HAS_FAILED:
                kinds[row, column] = NONE if cell is None else FAILED
            else:
                kinds[row, column], values[row, column] = NUMBER, cell
    return {name: values, f"{name}/kinds": kinds}


def _prompts(arrays: Arrays, prompt_of: PromptOf, place: Path) -> Iterator[Prompt]:
    tokens = _cut(arrays["group/prompt_tokens"], arrays["group/prompt_lengths"])
    for prompt_id, tokens_T in zip(arrays["group/prompt_ids"].tolist(), tokens, strict=True):
        try:
            prompt = prompt_of(prompt_id)
        except LookupError:
            prompt = None
        if prompt is None or not np.array_equal(prompt.tokens_T, tokens_T):
            raise DataError(
                f"{place}: sampled for a prompt {prompt_id} that the data does not have (or not "
                "with these tokens), so its rollouts cannot be trained on. Restore the data and "
                "tokenizer settings that it was written with."
            )
        yield prompt


def _samples(legend: Legend, arrays: Arrays) -> Iterator[Sample]:
    segments = iter(_segments(legend, arrays))
    stops = [StopReason(legend["stop_reasons"][n]) for n in arrays["sample/stop_reasons"].tolist()]
    rewards = _numbers(arrays, "sample/rewards", legend["rewards"])
    failed = _failed(arrays, legend["rewards"])
    totals = _numbers(arrays, "sample/reward", ["reward"])
    texts, ids = _texts(arrays, "sample/texts"), _texts(arrays, "sample/request_ids")
    # Journals of earlier versions have none.
    has_extras = "sample/extras" in arrays
    extras = _texts(arrays, "sample/extras") if has_extras else ["{}"] * len(texts)
    counts = arrays["sample/segments"].tolist()
    prompt_lengths = np.repeat(arrays["group/prompt_lengths"], arrays["group/samples"])
    prompt_columns = from_arrays("sample/prompt_columns", arrays, prompt_lengths)
    for place, (count, stop) in enumerate(zip(counts, stops, strict=True)):
        own = tuple(itertools.islice(segments, count))
        completion = Completion(ids[place], own, stop, prompt_columns[place])
        reward = totals[place]["reward"]
        yield Sample(
            completion,
            texts[place],
            rewards[place],
            reward,
            json.loads(extras[place]),
            failed[place],
        )


def _segments(legend: Legend, arrays: Arrays) -> Iterator[Segment]:
    lengths = arrays["segment/lengths"]
    is_cut = arrays["segment/is_cut"].astype(bool)
    sampled = iter(_cut(arrays["segment/sampled_logp"], lengths[is_cut]))
    fields = zip(
        _cut(arrays["segment/tokens"].astype(np.int64), lengths),
        _cut(arrays["segment/engine_logp"], lengths),
        arrays["segment/versions"].tolist(),
        arrays["segment/policies"].tolist(),
        arrays["segment/authors"].tolist(),
        is_cut.tolist(),
        from_arrays("segment/columns", arrays, lengths),
        strict=True,
    )
    for tokens_T, engine_logp_T, version, policy, author, has_sampled, columns in fields:
        yield Segment(
            tokens_T=tokens_T,
            engine_logp_T=engine_logp_T,
            policy_version=version,
            policy_id=legend["policies"][policy],
            author=Author(legend["authors"][author]),
            sampled_logp_T=next(sampled) if has_sampled else None,
            columns=columns,
        )


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Split an array into the parts that it was concatenated from."""
    return np.split(flat, np.cumsum(lengths))[:-1]


def _texts(arrays: Arrays, name: str) -> list[str]:
    parts = _cut(arrays[name], arrays[f"{name}/lengths"])
    return [part.tobytes().decode("utf-8", errors="surrogatepass") for part in parts]


def _numbers(arrays: Arrays, name: str, names: Sequence[str]) -> list[dict[str, float | None]]:
    values, kinds = arrays[name].tolist(), arrays[f"{name}/kinds"].tolist()
    return [
        {
            column: value if kind == NUMBER else None
            for column, value, kind in zip(names, row, row_kinds, strict=True)
            if kind != ABSENT
        }
        for row, row_kinds in zip(values, kinds, strict=True)
    ]


def _failed(arrays: Arrays, names: Sequence[str]) -> list[frozenset[str]]:
    return [
        frozenset(name for name, kind in zip(names, kinds, strict=True) if kind == FAILED)
        for kinds in arrays["sample/rewards/kinds"].tolist()
    ]
