"""Rollouts of any shape, drawn at random, for what has to keep or show them."""

from __future__ import annotations

import numpy as np

from homeostat.types import (
    Author,
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
)

TEXTS = ["", "cba", "ö 🙂\n\x00", "half a pair \ud800", "[1, 2]"]


def random_prompt(rng: np.random.Generator, prompt_id: int) -> Prompt:
    tokens_T = rng.integers(0, 2**31 - 1, rng.integers(1, 9))
    text = str(rng.choice(TEXTS))
    messages = [{"role": "user", "content": text}]
    prompt = text if rng.random() < 0.5 else messages
    return Prompt(prompt_id, tokens_T, prompt, {"answer": text, "number": prompt_id})


def random_segment(rng: np.random.Generator) -> Segment:
    length = int(rng.integers(0, 6))
    logp_T = -rng.exponential(2.0, (2, length)).astype(np.float32)
    author = Author(str(rng.choice(list(Author))))
    if author is not Author.ENGINE:
        # A NaN with unusual bits, which must survive, too.
        logp_T[0] = np.array([0x7FC01234], dtype=np.uint32).view(np.float32)
    return Segment(
        tokens_T=rng.integers(0, 2**31 - 1, length),
        engine_logp_T=logp_T[0],
        policy_version=int(rng.integers(0, 2**40)),
        policy_id=str(rng.choice(["policy", "draft ö"])),
        author=author,
        sampled_logp_T=logp_T[1] if rng.random() < 0.5 else None,
    )


def random_number(rng: np.random.Generator) -> float | None:
    odd = [None, float("nan"), float("-inf"), 0.1, -0.0]
    return odd[rng.integers(len(odd))] if rng.random() < 0.5 else float(rng.normal())


def random_sample(rng: np.random.Generator, request_id: str) -> Sample:
    segments = tuple(random_segment(rng) for _ in range(rng.integers(0, 4)))
    stop = StopReason(str(rng.choice(list(StopReason))))
    names = ["exact_match", "length", "mine.é"][: rng.integers(0, 4)]
    rewards = {name: random_number(rng) for name in names}
    completion = Completion(request_id, segments, stop)
    failed = frozenset(n for n, value in rewards.items() if value is None and rng.random() < 0.5)
    text = str(rng.choice(TEXTS))
    return Sample(completion, text, rewards, random_number(rng), failed=failed)


def random_groups(rng: np.random.Generator, num_groups: int) -> list[RolloutGroup]:
    groups = []
    for number in range(num_groups):
        size = int(rng.integers(0, 4))
        samples = tuple(random_sample(rng, f"s3/g{number}/ß{place}") for place in range(size))
        groups.append(RolloutGroup(random_prompt(rng, int(rng.integers(0, 99))), samples))
    return groups
