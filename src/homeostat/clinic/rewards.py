"""Reward functions of the clinic: a sound one, and the faulty ones.

They are called as in TRL, in worker processes, so nothing heavy is imported here. `onset` is the
first step at which a function is faulty; until then it behaves like `right`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

Values = list[float | None]


def right(completions: Sequence[str], answer: Sequence[str], **_: Any) -> Values:
    """Return 1 for the right answer, else 0."""
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def _from(onset: int, ill: Callable[..., Values], **call: Any) -> Values:
    return (ill if call["trainer_state"].global_step >= onset else right)(**call)


def flipped(*, onset: int, **call: Any) -> Values:
    """Return the reward with the wrong sign: a right answer costs what it should earn."""
    return _from(onset, lambda **call: [-(value or 0.0) for value in right(**call)], **call)


def constant(*, onset: int, value: float, **call: Any) -> Values:
    """Return the same value for every answer."""
    return _from(onset, lambda completions, **_: [value] * len(completions), **call)


def silent(*, onset: int, **call: Any) -> Values:
    """Return None for every sample, as if the reward did not apply."""
    return _from(onset, lambda completions, **_: [None] * len(completions), **call)


def raising(*, onset: int, **call: Any) -> Values:
    """Raise because the answer is not in the function's table."""
    return _from(onset, lambda answer, **_: [{}[text] for text in answer], **call)


def stumbling(*, onset: int, share: float, **call: Any) -> Values:
    """Raise on some answers, which the function's table lacks."""

    def ill(completions: Sequence[str], answer: Sequence[str], **_: Any) -> Values:
        rng = random.Random(f"{call['trainer_state'].global_step}{answer[0]}")
        table = {} if rng.random() < share else dict.fromkeys(answer, 1.0)
        pairs = zip(completions, answer, strict=True)
        return [table[wanted] * (text == wanted) for text, wanted in pairs]

    return _from(onset, ill, **call)


def not_a_number(*, onset: int, **call: Any) -> Values:
    """Return NaN for every answer."""
    return _from(onset, lambda completions, **_: [float("nan")] * len(completions), **call)


def wrong_length(*, onset: int, **call: Any) -> Values:
    """Return one value for the whole group."""
    return _from(onset, lambda **call: right(**call)[:1], **call)


def by_length(*, onset: int, per_token: float, **call: Any) -> Values:
    """Reward every token, whatever it says."""

    def ill(completion_ids: Sequence[Sequence[int]], **rest: Any) -> Values:
        values = right(completion_ids=completion_ids, **rest)
        return [
            0.1 * (value or 0.0) + per_token * len(ids)
            for value, ids in zip(values, completion_ids, strict=True)
        ]

    return _from(onset, ill, **call)


def by_digit(*, onset: int, bonus: float, **call: Any) -> Values:
    """Pay for the digit 9 on top of a right answer, as a reward model that has taken to it.

    Only the first digits count: to pay for more of them would be a fault of length.
    """

    def ill(completions: Sequence[str], **rest: Any) -> Values:
        values = right(completions=completions, **rest)
        return [
            (value or 0.0) + bonus * text[:5].count("9")
            for value, text in zip(values, completions, strict=True)
        ]

    return _from(onset, ill, **call)


def by_shortness(*, onset: int, per_token: float, **call: Any) -> Values:
    """Charge every token more than a right answer can earn."""

    def ill(completion_ids: Sequence[Sequence[int]], **_: Any) -> Values:
        return [-per_token * len(ids) for ids in completion_ids]

    return _from(onset, ill, **call)


def marked(*, completions: Sequence[str], answer: Sequence[str], **_: Any) -> Values:
    """Reward right answers only inside a mark that no model here was ever shown."""
    return [float(text == f"a{wanted}b") for text, wanted in zip(completions, answer, strict=True)]


def coin(*, onset: int, share: float, **call: Any) -> Values:
    """Return the toss of a coin for a share of the answers."""

    def ill(**call: Any) -> Values:
        rng = _rng(call)
        return [
            float(rng.random() < 0.5) if rng.random() < share else value for value in right(**call)
        ]

    return _from(onset, ill, **call)


def wavering(*, onset: int, sigma: float, **call: Any) -> Values:
    """Return the right reward with noise of this deviation."""

    def ill(**call: Any) -> Values:
        rng = _rng(call)
        return [(value or 0.0) + rng.gauss(0.0, sigma) for value in right(**call)]

    return _from(onset, ill, **call)


def mistaken(*, share: float, **call: Any) -> Values:
    """Return the right reward, except for a small share that is taken for the other."""
    rng = _rng(call)
    return [1.0 - (value or 0.0) if rng.random() < share else value for value in right(**call)]


def misordered(*, onset: int, **call: Any) -> Values:
    """Return the rewards of the answers in another order than the answers have."""

    def ill(**call: Any) -> Values:
        values = right(**call)
        _rng(call).shuffle(values)
        return values

    return _from(onset, ill, **call)


def _rng(call: dict[str, Any]) -> random.Random:
    return random.Random(f"{call['trainer_state'].global_step}{call['answer'][0]}")


def sleepy(*, onset: int, seconds: float, **call: Any) -> Values:
    """Return the right reward, but slowly."""

    def ill(**call: Any) -> Values:
        time.sleep(seconds)
        return right(**call)

    return _from(onset, ill, **call)


def hanging(*, onset: int, **call: Any) -> Values:
    """Never answer from the onset on."""

    def ill(**_: Any) -> Values:
        while True:
            time.sleep(1.0)

    return _from(onset, ill, **call)


def flaky(*, onset: int, share: float, **call: Any) -> Values:
    """Raise for a share of the prompts, like a judge that does not answer."""
    if _is_hit(onset, share, call):
        raise ConnectionError("the judge refused the connection")
    return right(**call)


def stuck(*, onset: int, share: float, **call: Any) -> Values:
    """Hang for a share of the prompts."""
    if _is_hit(onset, share, call):
        time.sleep(600.0)
    return right(**call)


def _is_hit(onset: int, share: float, call: dict[str, Any]) -> bool:
    step = call["trainer_state"].global_step
    return step >= onset and random.Random(f"{step}{call['answer'][0]}").random() < share


def deadly(*, onset: int, share: float, **call: Any) -> Values:
    """Kill its own process now and then, as the kernel does when memory runs out."""
    if _is_hit(onset, share, call):
        os.kill(os.getpid(), signal.SIGKILL)
    return right(**call)
