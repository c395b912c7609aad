"""Sentences of RL trainers are read in any of their words, and slips by whose code they are in."""

from __future__ import annotations

import re
import time

import pytest
from tests.support.first_causes import first_cause

from homeostat.health.failures.forms.trainers import CAUSES, FORMS

READ = {
    "prompt-too-long": (
        "ValueError: Multimodal prompt produced 9000 tokens, exceeding rollout.prompt_length=4096.",
    ),
    "token-budget-below-sequence": (
        "AssertionError: got an input of 5210 tokens, but max microbatch size is 4096 tokens",
    ),
    "group-size-one": ("ValueError: This estimate requires at least 2 samples per group. Got 1.",),
    "gpu-count-mismatch": (
        "AssertionError: Not enough GPUs to run the judge. world_size (2) < 4.",
        "AssertionError: requesting 8 processes, bundle count cannot satisfy",
        "AssertionError: num_gpus 16 > available_gpu 8",
    ),
    "rocm-visible-devices": (
        "ValueError: Please don't set ROCR_VISIBLE_DEVICES when HIP/CUDA_VISIBLE_DEVICES is set.",
    ),
    "inference-server-unresponsive": (
        "RuntimeError: Router health check failed after 300 seconds.",
        "TimeoutError: Inference server is not ready after 1800 (>1800) seconds. Aborting...",
        "RuntimeError: Failed to complete async request to 10.0.0.3:8000 after 3 attempts",
    ),
    "ray-cluster-unreachable": (
        "RuntimeError: Ray head node at 10.0.0.1:6379 did not become available within 600s.",
    ),
    "unknown-setting": (
        "AssertionError: Agent loop my_loop not registered, registered agent loops: dict_keys([])",
        "ValueError: Unknown reward manager: naiv",
        "ValueError: Unsupported rollout_mode: fast",
    ),
    "setting-missing": (
        "AssertionError: this overlap requires setting the environment variable SOME_QUEUES to 1",
        "omegaconf.errors.InterpolationKeyError: Interpolation key 'model.path' not found",
    ),
    "environment-unfit": ("ValueError: CPU number 3 is not eligible; choose between [0, 1]",),
    "triton-version-mismatch": ("RuntimeError: the kernel needs space, but no allocator was set.",),
    "compile-cache-corrupt": ("FileNotFoundError: softmax_kernel.ttgir",),
    "python-version-unsupported": (
        "TypeError: unsupported operand type(s) for |: 'ABCMeta' and 'NoneType'",
    ),
    "rows-without-training": (
        "ValueError: response_mask must contain at least one valid token (1).",
    ),
}
IN_A_LIBRARY = """
Traceback (most recent call last):
  File "/opt/verl/verl/trainer/main_ppo.py", line 42, in run
    trainer.fit()
  File "/opt/verl/verl/trainer/ppo/ray_trainer.py", line 900, in fit
    scores, extra = reduce(batch)
{error}
"""
IN_A_REWARD = """
Traceback (most recent call last):
  File "/opt/verl/verl/trainer/main_ppo.py", line 42, in run
    trainer.fit()
  File "/opt/my_reward.py", line 9, in compute_score
    score, why = judge(answer)
{error}
"""
SLIPS = (
    "ValueError: too many values to unpack (expected 2)",
    "TypeError: cannot unpack non-iterable NoneType object",
    "TypeError: 'NoneType' object is not subscriptable",
    "AttributeError: 'NoneType' object has no attribute 'sleep'",
    "AssertionError: key raw_prompt length 128 is not equal to batch size 640",
)


@pytest.mark.parametrize(("name", "said"), [(n, s) for n, all_ in READ.items() for s in all_])
def test_sentences_of_trainers_are_read(name: str, said: str) -> None:
    assert first_cause(said) == name


@pytest.mark.parametrize("said", SLIPS)
def test_a_slip_in_a_library_is_its_bug(said: str) -> None:
    bugs = ("known-bad-version", "library-version-mismatch")
    assert first_cause(IN_A_LIBRARY.format(error=said)) in bugs


@pytest.mark.parametrize("said", SLIPS)
def test_a_slip_in_the_users_code_is_no_bug_of_a_library(said: str) -> None:
    assert first_cause(IN_A_REWARD.format(error=said)) != "known-bad-version"


def test_every_kind_has_a_form() -> None:
    assert CAUSES.keys() - {kind for kind, _, _ in FORMS} == set()


@pytest.mark.parametrize("word", ["a_", "Unknown e ", "set the storage of a tensor ", "/x"])
def test_a_long_line_is_read_in_a_moment(word: str) -> None:
    patterns = [re.compile(pattern) for _, pattern, _ in FORMS]
    started = time.process_time()
    assert not any(pattern.search(word * 2_000) for pattern in patterns)
    assert time.process_time() - started < 1.0
