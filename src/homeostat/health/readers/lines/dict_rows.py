"""Parse rows of metrics that are Python dicts or JSON objects, with the text before them.

{'loss': 0.5, 'grad_norm': '0.31', 'epoch': 0.01}          HF Trainer and all that build on it
rollout 3: {...}   perf 3: {...}   step 3: {...}           slime, miles
Global step 12: {...}                                      OpenRLHF
{"loss": 0.5, "global_step/max_steps": "1/420"}            ms-swift
{"current_steps": 10, "total_steps": 100, "loss": 0.5}     LLaMA-Factory
{"step": 3, "data": {...}}                                 verl's file logger
metrics_tag: {"step": 3, "metrics": {...}}                 ROLL
Epoch 3: {'loss': 0.5}                                     loops of one's own
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from homeostat.health.readers.lines.held_out import as_held_out, is_marked, says_held_out
from homeostat.health.readers.rows.row import Row, RowKind
from homeostat.health.readers.values.common_names import (
    is_only_setting,
    metric_of,
    sounds_like_metric,
)
from homeostat.health.readers.values.literals import mapping_at
from homeostat.health.readers.values.numbers import number_of

STEP_KEYS = (
    "step",
    "global_step",
    "current_steps",
    "train/global_step",
    "training/global_step",
    "trainer/global_step",
    "trainer/step",
    "train/step",
    "rollout/step",
    "training_step",
    "train_step",
    "iteration",
    "iter",
    "Step",
    "_step",
)
TOTAL_KEYS = ("total_steps", "max_steps", "total_training_steps")
_OF_TOTAL = "global_step/max_steps"
# Values that are not metrics: clocks, counters of the logger, and progress texts.
NOT_METRICS = frozenset(
    {
        "elapsed_time",
        "remaining_time",
        "percentage",
        "eta",
        "_timestamp",
        "_runtime",
        "_wandb",
        "timestamp",
        "date",
        "train_speed(iter/s)",
        "type",
        "level",
        "rank",
        *TOTAL_KEYS,
    }
)
_TAG_OF_ROLL = "metrics_tag: "
_EVAL = re.compile(r"(?:eval|val|validation|test)(?:[_/-].*|$)")
# Flags that an environment returns with every step, and the names of what is logged with them.
_ENDS = ("done", "terminal", "terminated", "truncated")
_SEEN_OR_DONE = ("action", "observation", "obs", "state", "next_state")
# Names under which a logger puts all metrics of a step: verl's and ROLL's.
_ENVELOPES = ("data", "metrics")
_MAX_DEPTH = 6
_MAX_VALUES = 5_000
_MAX_PREFIX = 400
_MAX_NAME = 300
_PREFIX = re.compile(
    r"\b(?P<word>rollout|perf|step|iteration|iter|eval(?:uation)?|passrate|train|episode)"
    r"(?:[ _]step)?\s*+(?:[:#=]\s*+)?(?P<step>\d{1,15})(?:\s*+/\s*+(?P<total>\d{1,15}))?"
    r"(?:\s++metrics)?\s*+[:,|>-]*+\s*+$",
    re.IGNORECASE,
)

_EPOCH_PREFIX = re.compile(
    r"\bepoch\s*+(?:[:#=]\s*+)?(?P<epoch>\d{1,9})(?:\s*+/\s*+\d{1,9})?\s*+[:,|>-]*+\s*+$",
    re.IGNORECASE,
)


def mapping_in(body: str) -> tuple[str, dict[str, Any], str] | None:
    """Return the first mapping of a line as (text before it, mapping, text after it)."""
    start = body.find("{")
    # A sentence may have a brace before the mapping, so try the first three braces.
    for _ in range(3):
        if start < 0:
            return None
        found = mapping_at(body, start)
        if found is not None and found[0]:
            return body[:start], found[0], body[found[1] :]
        start = body.find("{", start + 1)
    return None


def row_of(
    mapping: Mapping[str, Any], *, before: str = "", source: str = "", is_named: bool = True
) -> Row | None:
    """Return a mapping as a row of metrics; None if it is something else.

    With `is_named=False`, none of its names needs to be known as a metric's.
    """
    mapping = _opened(mapping)
    if is_transition(mapping):
        return None
    values = {name: value for name, value in numbers_in(mapping) if name not in NOT_METRICS}
    values.update(_lost(mapping, values))
    # The prefix ends where the mapping begins; text further away does not belong to it.
    before = before[-_MAX_PREFIX:]
    named = _PREFIX.search(before) if before else None
    if named is not None and _is_place(before, named):
        named = None
    step = int(named["step"]) if named else _step_in(mapping)
    if not _is_row(mapping, values, has_step=named is not None):
        if is_named or not _may_be_row(mapping, values, has_step=step is not None):
            return None
    for key in STEP_KEYS:
        values.pop(key, None)
    values.pop(_OF_TOTAL, None)
    word = named["word"].lower() if named else "train"
    head = before[: named.start()].lower() if named else ""
    is_tagged = before.endswith(_TAG_OF_ROLL)
    form = _form(mapping, word, is_named=named is not None, is_tagged=is_tagged, head=head)
    epoch = _EPOCH_PREFIX.search(before) if step is None else None
    if epoch is not None:
        # An epoch that goes back tells that another run began in the same log.
        values.setdefault("epoch", float(epoch["epoch"]))
    row = Row(values, step, channel=f"{source}:{word}", form=form)
    row.total_steps = int(named["total"]) if named and named["total"] else total_in(mapping)
    row.kind = _kind(values, word)
    if row.kind is RowKind.TRAIN and (is_marked(mapping) or says_held_out(before)):
        row = as_held_out(row)
    if row.kind is RowKind.EVAL:
        row.values.pop("epoch", None)
    return row


def _opened(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of a step together with the step, if a logger wrote them apart."""
    for name in _ENVELOPES:
        inside = mapping.get(name)
        if isinstance(inside, Mapping) and mapping.keys() == {"step", name}:
            return {**inside, "step": mapping["step"]}
    return mapping


def is_transition(mapping: Mapping[str, Any]) -> bool:
    """Return whether a mapping is one step of an episode: an agent's action or observation."""
    is_flagged = any(isinstance(mapping.get(name), bool) for name in _ENDS)
    return is_flagged and any(str(name).startswith(_SEEN_OR_DONE) for name in mapping)


def _lost(mapping: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, float]:
    """Return the training results that are null, as NaN: JSON has no NaN, so writers put null.

    If anything else is null, or if another result has a value, null means that the row has no
    result.
    """
    nulls = [str(name) for name, value in mapping.items() if value is None]
    if not nulls or not all(map(is_trained, nulls)) or any(map(is_trained, values)):
        return {}
    return dict.fromkeys(nulls, float("nan"))


def is_trained(name: str) -> bool:
    """Return whether a metric is a result of training that every step has."""
    return metric_of(name) in {"train/loss", "reward", "grad_norm"}


def _is_place(before: str, named: re.Match[str]) -> bool:
    """Return whether a number is a line of code, as loguru prints it: trainer:train:301."""
    is_joined = before[named.end("word") : named.start("step")] == ":"
    return is_joined and before[: named.start()].endswith(":")


def numbers_in(mapping: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and numbers; nested names are joined by "/". [x] counts as x."""
    waiting = [("", mapping, 0)]
    num_seen = 0
    while waiting:
        prefix, inner, depth = waiting.pop()
        for name, value in inner.items():
            num_seen += 1
            if num_seen > _MAX_VALUES:
                return
            if isinstance(value, Mapping) and depth < _MAX_DEPTH:
                waiting.append((f"{prefix}{name}/", value, depth + 1))
                continue
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            found = number_of(value)
            if found is not None and len(name) + len(prefix) <= _MAX_NAME:
                yield f"{prefix}{name}", found


def _is_row(mapping: Mapping[str, Any], values: dict[str, float], *, has_step: bool) -> bool:
    names = {name.rpartition("/")[2] for name in values}.union(map(str, mapping))
    if not values or any(map(is_only_setting, names)):
        return False
    if has_step:
        return True
    texts = sum(1 for value in mapping.values() if isinstance(value, str | bool | list))
    texts -= sum(1 for name in mapping if isinstance(mapping[name], str) and name in values)
    return texts <= len(values) + 2 and any(map(_is_result, values))


def _may_be_row(mapping: Mapping[str, Any], values: Mapping[str, float], *, has_step: bool) -> bool:
    """Return whether unknown names may be metrics: there is a step, or a number with decimals."""
    if not values or any(map(is_only_setting, map(str, mapping))):
        return False
    if len(values) < len(mapping) / 2 or any(isinstance(v, Mapping) for v in mapping.values()):
        return False
    return has_step or not all(map(float.is_integer, values.values()))


def _is_result(name: str) -> bool:
    """Return whether a name is a result. A learning rate alone may as well be a setting."""
    return sounds_like_metric(name) and metric_of(name) not in {"learning_rate", "epoch"}


def _form(
    mapping: Mapping[str, Any], word: str, *, is_named: bool, is_tagged: bool, head: str
) -> str:
    if head.rstrip().endswith("global"):
        # Only OpenRLHF prints the star; many trainers print the words.
        return "openrlhf" if "\u2728" in head else "named"
    if is_named:
        return "slime" if word in {"rollout", "perf", "step"} else "named"
    if _OF_TOTAL in mapping:
        return "swift"
    if is_tagged:
        return "roll"
    return "llamafactory" if "current_steps" in mapping else "dict"


def _kind(values: Mapping[str, float], word: str) -> RowKind:
    if "train_runtime" in values:
        return RowKind.SUMMARY
    names = [name for name in values if name != "epoch"]
    if word.startswith(("eval", "passrate")) or (names and all(map(_EVAL.match, names))):
        return RowKind.EVAL
    return RowKind.TRAIN


def _step_in(mapping: Mapping[str, Any]) -> int | None:
    both = mapping.get(_OF_TOTAL)
    if isinstance(both, str) and both.partition("/")[0].strip().isdecimal():
        return int(both.partition("/")[0][:15])
    for key in STEP_KEYS:
        value = mapping.get(key)
        if isinstance(value, bool):
            continue
        found = number_of(value)
        if found is not None and 0 <= found < 1e15 and found == int(found):
            return int(found)
    return None


def total_in(mapping: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a record says the run will have."""
    both = mapping.get(_OF_TOTAL)
    if isinstance(both, str) and both.partition("/")[2].strip().isdecimal():
        return int(both.partition("/")[2].strip()[:15])
    for key in TOTAL_KEYS:
        found = number_of(mapping.get(key))
        if found is not None and 0 < found < 1e15:
            return int(found)
    return None
