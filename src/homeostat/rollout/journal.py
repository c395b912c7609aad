"""Scored rollouts on disk before they are trained on, so that a resumed run samples nothing twice.

    journal/step_00000012_round_00.safetensors    one file per step and round of sampling

A file is flat arrays laid end to end, with lengths beside them, and a JSON header:

    group/*    prompt ids, the prompts' tokens, samples of each
    sample/*   request id, text, stop reason, reward, every function's reward (a number, None, or
               failed), segments of each
    segment/*  tokens (int32), engine_logp and sampled_logp (float32), version, policy, author

Invariants: a file with its final name is whole (written under another name, synced, renamed). What
is read is what was written, to the bit; a file whose checksum is wrong counts as not there. Prompts
are the data set's: only their tokens are kept, and those must agree with what `prompt_of` gives.
`facts` is the caller's: what the sampling depended on, for it to judge whether a file still holds.

Format 1 did not tell a failed reward from None. It counted failures per round, and a round in which
a reward failed has all its None values of that reward read as failures: better a sample that is not
trained than one that is trained on a wrong reward.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from homeostat.errors import DataError, RunDirWriteError
from homeostat.observe.durable import sync_folder, write_atomically
from homeostat.types import (
    Author,
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
)

FORMAT_VERSION = 2
_FORMATS_READ = (1, 2)
_NAME = re.compile(r"step_(\d{8})_round_(\d{2,})\.safetensors")
_STOPS, _AUTHORS = list(StopReason), list(Author)
# What a cell of a table of optional numbers holds.
_ABSENT, _NONE, _NUMBER, _FAILED = 0, 1, 2, 3
_NOT_THERE, _HAS_FAILED = object(), object()
# What reading damaged bytes has been seen to raise.
_DAMAGE = (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError)

Arrays = dict[str, np.ndarray]
log = logging.getLogger(__name__)


class Journal:
    """The journal of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int, round: int) -> Path:
        return self.folder / f"step_{step:08d}_round_{round:02d}.safetensors"

    def write(
        self, step: int, round: int, groups: Sequence[RolloutGroup], facts: Mapping[str, Any]
    ) -> Path:
        """Keep a round. On return it survives a power cut. Raises RunDirWriteError."""
        path = self.path(step, round)
        content = _encode(groups, facts)
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                sync_folder(self.folder.parent)
            write_atomically(path, content)
            sync_folder(self.folder)
        except OSError as error:
            raise RunDirWriteError(
                f"{path}: the rollouts of step {step} cannot be written: {error.strerror}. Free "
                "some space, or set runs_dir to another disk. Nothing saved is lost."
            ) from error
        return path

    def read(
        self, step: int, round: int, prompt_of: Callable[[int], Prompt]
    ) -> tuple[list[RolloutGroup], dict[str, Any]] | None:
        """The groups and facts of a round, or None where there is none that is whole.

        Raises DataError where `prompt_of` gives other prompts than the round was sampled for.
        """
        path = self.path(step, round)
        if not path.exists():
            return None
        try:
            header, arrays = _load(path)
        except _DAMAGE as error:
            log.warning("%s is damaged and counts as not there: %s", path, error)
            return None
        prompts = list(_prompts(arrays, prompt_of, path))
        return _decode(header, arrays, prompts), header["facts"]

    def steps(self) -> list[int]:
        return sorted({step for step, _ in self._entries()})

    def rounds(self, step: int) -> list[int]:
        return sorted(round for found, round in self._entries() if found == step)

    def drop_after(self, step: int) -> int:
        """Remove the rounds of later steps. Returns how many there were."""
        return self._remove(entry for entry in self._entries() if entry[0] > step)

    def prune_before(self, step: int) -> int:
        """Remove the rounds of earlier steps. Returns how many there were."""
        return self._remove(entry for entry in self._entries() if entry[0] < step)

    def _entries(self) -> list[tuple[int, int]]:
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return [(int(match.group(1)), int(match.group(2))) for match in found if match]

    def _remove(self, entries: Iterator[tuple[int, int]]) -> int:
        count = 0
        for step, round in entries:
            try:
                self.path(step, round).unlink(missing_ok=True)
                count += 1
            except OSError as error:
                # It costs room, not the run: `facts` keep it from being used in error.
                log.warning("%s cannot be removed: %s", self.path(step, round), error.strerror)
        return count


def _encode(groups: Sequence[RolloutGroup], facts: Mapping[str, Any]) -> bytes:
    samples = [sample for group in groups for sample in group.samples]
    segments = [segment for sample in samples for segment in sample.completion.segments]
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    policies = list(dict.fromkeys(segment.policy_id for segment in segments))
    header = {
        "version": FORMAT_VERSION,
        "facts": dict(facts),
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
    text = json.dumps(header)
    # One entry: safetensors would write several in any order.
    return save(arrays, metadata={"journal": f"{_digest(text, arrays)} {text}"})


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
    """A table of numbers, some of them None, failed or not there at all."""
    values = np.zeros((len(table), width), dtype=np.float64)
    kinds = np.zeros((len(table), width), dtype=np.uint8)
    for row, cells in enumerate(table):
        for column, cell in enumerate(cells):
            if cell is _NOT_THERE:
                continue
            if cell is None or cell is _HAS_FAILED:
                kinds[row, column] = _NONE if cell is None else _FAILED
            else:
                kinds[row, column], values[row, column] = _NUMBER, cell
    return {name: values, f"{name}/kinds": kinds}


def _digest(header: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(header.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _load(path: Path) -> tuple[dict[str, Any], Arrays]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        names = file.keys()
        arrays = {name: file.get_tensor(name) for name in names}
    digest, _, text = metadata["journal"].partition(" ")
    if _digest(text, arrays) != digest:
        raise ValueError("its checksum is wrong")
    header = json.loads(text)
    if header["version"] not in _FORMATS_READ:
        raise ValueError(f"its format is {header['version']}, this is {FORMAT_VERSION}")
    if header["version"] == 1:
        _mark_failures(header, arrays)
    return header, arrays


def _mark_failures(header: dict[str, Any], arrays: Arrays) -> None:
    """Format 1: None of a reward that failed in the round counts as failed."""
    counts = header["facts"].get("missing", {})
    kinds = arrays["sample/rewards/kinds"]
    for column, name in enumerate(header["rewards"]):
        if counts.get(f"rewards/{name}/failed", 0):
            kinds[kinds[:, column] == _NONE, column] = _FAILED


def _prompts(arrays: Arrays, prompt_of: Callable[[int], Prompt], path: Path) -> Iterator[Prompt]:
    tokens = _cut(arrays["group/prompt_tokens"], arrays["group/prompt_lengths"])
    for prompt_id, tokens_T in zip(arrays["group/prompt_ids"].tolist(), tokens, strict=True):
        try:
            prompt = prompt_of(prompt_id)
        except LookupError:
            prompt = None
        if prompt is None or not np.array_equal(prompt.tokens_T, tokens_T):
            raise DataError(
                f"{path}: sampled for a prompt {prompt_id} that the data does not have (or not "
                "with these tokens), so its rollouts cannot be trained on. Restore the data and "
                "tokenizer settings that it was written with."
            )
        yield prompt


def _decode(
    header: dict[str, Any], arrays: Arrays, prompts: Sequence[Prompt]
) -> list[RolloutGroup]:
    samples = iter(_samples(header, arrays))
    sizes = arrays["group/samples"].tolist()
    return [
        RolloutGroup(prompt, tuple(itertools.islice(samples, size)))
        for prompt, size in zip(prompts, sizes, strict=True)
    ]


def _samples(header: dict[str, Any], arrays: Arrays) -> Iterator[Sample]:
    segments = iter(_segments(header, arrays))
    stops = [StopReason(header["stop_reasons"][n]) for n in arrays["sample/stop_reasons"].tolist()]
    rewards = _numbers(arrays, "sample/rewards", header["rewards"])
    failed = _failed(arrays, header["rewards"])
    totals = _numbers(arrays, "sample/reward", ["reward"])
    texts, ids = _texts(arrays, "sample/texts"), _texts(arrays, "sample/request_ids")
    # Journals of earlier versions have none.
    has_extras = "sample/extras" in arrays
    extras = _texts(arrays, "sample/extras") if has_extras else ["{}"] * len(texts)
    counts = arrays["sample/segments"].tolist()
    for place, (count, stop) in enumerate(zip(counts, stops, strict=True)):
        own = tuple(itertools.islice(segments, count))
        completion = Completion(ids[place], own, stop)
        reward = totals[place]["reward"]
        yield Sample(
            completion,
            texts[place],
            rewards[place],
            reward,
            json.loads(extras[place]),
            failed[place],
        )


def _segments(header: dict[str, Any], arrays: Arrays) -> Iterator[Segment]:
    lengths = arrays["segment/lengths"]
    is_cut = arrays["segment/is_cut"].astype(bool)
    sampled = iter(_cut(arrays["segment/sampled_logp"], lengths[is_cut]))
    columns = zip(
        _cut(arrays["segment/tokens"].astype(np.int64), lengths),
        _cut(arrays["segment/engine_logp"], lengths),
        arrays["segment/versions"].tolist(),
        arrays["segment/policies"].tolist(),
        arrays["segment/authors"].tolist(),
        is_cut.tolist(),
        strict=True,
    )
    for tokens_T, engine_logp_T, version, policy, author, has_sampled in columns:
        yield Segment(
            tokens_T=tokens_T,
            engine_logp_T=engine_logp_T,
            policy_version=version,
            policy_id=header["policies"][policy],
            author=Author(header["authors"][author]),
            sampled_logp_T=next(sampled) if has_sampled else None,
        )


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The parts that were laid end to end."""
    return np.split(flat, np.cumsum(lengths))[:-1]


def _texts(arrays: Arrays, name: str) -> list[str]:
    parts = _cut(arrays[name], arrays[f"{name}/lengths"])
    return [part.tobytes().decode("utf-8", errors="surrogatepass") for part in parts]


def _numbers(arrays: Arrays, name: str, names: Sequence[str]) -> list[dict[str, float | None]]:
    values, kinds = arrays[name].tolist(), arrays[f"{name}/kinds"].tolist()
    return [
        {
            column: value if kind == _NUMBER else None
            for column, value, kind in zip(names, row, row_kinds, strict=True)
            if kind != _ABSENT
        }
        for row, row_kinds in zip(values, kinds, strict=True)
    ]


def _failed(arrays: Arrays, names: Sequence[str]) -> list[frozenset[str]]:
    return [
        frozenset(name for name, kind in zip(names, kinds, strict=True) if kind == _FAILED)
        for kinds in arrays["sample/rewards/kinds"].tolist()
    ]
