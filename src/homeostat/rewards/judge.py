"""A language model as a judge, asked over an OpenAI-compatible endpoint. Runs in a worker.

    prompt, completion -> messages -> cache | endpoint (retries) -> answer -> score -> [0, 1]

An answer from which no score can be read is a failed reward, never a 0: nobody knows what the
completion deserves. The same holds for a call that fails after all retries. The score is read from
the answer each time, so the cache stays valid when the reading changes.

What is counted goes to log_metric: calls (requests sent), cached, retries, failed, seconds (summed
over concurrent calls). Stdlib only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from homeostat.errors import RewardError
from homeostat.rewards.judge_cache import JudgeCache, key_of
from homeostat.rewards.judge_endpoint import Counts, Endpoint
from homeostat.rewards.judge_reading import read_score

PLACEHOLDER = re.compile(r"\{(prompt|completion|reference|rubric)\}")
COUNTED = ("calls", "cached", "retries", "failed", "seconds")
Question = dict[str, Any]


class Judge:
    """The reward: asks about each completion, `concurrency` at a time."""

    def __init__(
        self, settings: Mapping[str, Any], *, endpoint: Endpoint, cache: JudgeCache
    ) -> None:
        self.settings = settings
        self.endpoint = endpoint
        self.cache = cache
        self._threads = ThreadPoolExecutor(settings["concurrency"], thread_name_prefix="judge")

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, list[Any]], None],
        **columns: Any,
    ) -> list[float | Exception]:
        none = [None] * len(completions)
        references = columns.get(self.settings["reference_column"], none)
        shown = zip(prompts, completions, references, strict=True)
        counts = Counts()
        answers = self._answers([self._question(*one) for one in shown], counts)
        values = [self._grade(answer) for answer in answers]
        counts.failed = sum(isinstance(value, Exception) for value in values)
        for name in COUNTED:
            log_metric(name, getattr(counts, name))
        log_extra("answer", [None if isinstance(one, Exception) else one for one in answers])
        return values

    def _question(self, prompt: Any, completion: Any, reference: Any) -> Question | RewardError:
        """Return what the endpoint is sent; an error if the row lacks what the texts refer to."""
        given = self.settings
        texts = {
            "prompt": _text(prompt),
            "completion": _text(completion),
            "rubric": given["rubric"],
            "reference": None if reference is None else str(reference),
        }
        try:
            messages = [
                {"role": role, "content": _filled(given[name], texts)}
                for role, name in (("system", "system"), ("user", "prompt"))
                if given[name] is not None
            ]
        except RewardError as error:
            return RewardError(f"{error} (reference_column: {given['reference_column']!r})")
        sampling = {name: given[name] for name in ("model", "temperature", "max_tokens")}
        return {**sampling, "messages": messages}

    def _answers(
        self, questions: Sequence[Question | RewardError], counts: Counts
    ) -> list[str | Exception]:
        """Ask each question once that is not in the cache."""
        keys = [
            None if isinstance(one, RewardError) else key_of(self.endpoint.url, one)
            for one in questions
        ]
        new: dict[str, Question] = {}
        for key, one in zip(keys, questions, strict=True):
            if key is not None and not isinstance(one, RewardError) and key not in self.cache:
                new[key] = one
        counts.cached = sum(key is not None for key in keys) - len(new)
        asked = self._threads.map(lambda item: self._ask(*item, counts), new.items())
        found: dict[str, str | Exception] = dict(zip(new, asked, strict=True))
        self.cache.sync()
        return [
            one if isinstance(one, RewardError) else found.get(key) or self.cache[key]
            for key, one in zip(keys, questions, strict=True)
        ]

    def _ask(self, key: str, question: Question, counts: Counts) -> str | Exception:
        try:
            answer = self.endpoint.ask(question, counts)
            self.cache.add(key, answer)
            return answer
        except (RewardError, TimeoutError) as error:
            return error

    def _grade(self, answer: str | Exception) -> float | Exception:
        if isinstance(answer, Exception):
            return answer
        lowest, highest = self.settings["lowest"], self.settings["highest"]
        try:
            score = read_score(answer, self.settings["read"])
        except RewardError as error:
            return error
        if not lowest <= score <= highest:
            return RewardError(f"the score {score:g} is not between {lowest:g} and {highest:g}")
        return (score - lowest) / (highest - lowest)


def judge(*, cache_file: str | None, **settings: Any) -> Judge:
    """Return the reward, from the keys of its config class."""
    endpoint = Endpoint(
        url=f"{settings['url'].rstrip('/')}/chat/completions",
        api_key=_key_from(settings["api_key_env"]),
        call_timeout_s=settings["call_timeout_s"],
        total_timeout_s=settings["total_timeout_s"],
        max_retries=settings["max_retries"],
        backoff_s=settings["backoff_s"],
    )
    cache = JudgeCache(None if cache_file is None else Path(cache_file))
    return Judge(settings, endpoint=endpoint, cache=cache)


def _filled(template: str, values: Mapping[str, str | None]) -> str:
    """Replace the placeholders in one pass, so that no braces of a completion count as one."""

    def value(match: re.Match[str]) -> str:
        found = values[match.group(1)]
        if found is None:
            raise RewardError("the row has no reference answer, which the judge's prompt shows")
        return found

    return PLACEHOLDER.sub(value, template)


def _text(value: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a text, or the turns of a chat; one turn alone is its content."""
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return str(value[0].get("content"))
    return "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)


def _key_from(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable, "").strip()
    if not found:
        raise RewardError(
            f"api_key_env: the environment variable {variable} is not set. Set it to the API key "
            "of the judge's endpoint, or remove api_key_env if it needs none."
        )
    if not (found.isascii() and found.isprintable()):
        # http.client would refuse it with a message that shows it.
        raise RewardError(f"api_key_env: {variable} holds characters that no HTTP header can have")
    return found
