"""Sentences of engines, kernels and quantisers are read in any of their words."""

from __future__ import annotations

import time

import pytest
from tests.support.first_causes import first_cause

from homeostat.health.failures.details import details_of
from homeostat.health.failures.forms.engines import CAUSES, FORMS, LATE

READ = {
    "attention-unsupported": (
        "ValueError: the tiny attention backend only supports bf16 caches",
        "NotImplementedError: head_dim 80 is not supported by this kernel",
        "AssertionError: sliding window is not supported with paged prefill",
        "NotImplementedError: FlashAttention with an int8 cache is not yet supported",
    ),
    "quantisation-method-mismatch": (
        "ValueError: Unknown quantization strategy rowwise",
        "NotImplementedError: Quantization for IQ1_X is not yet implemented",
        "ValueError: num_bits must be 4 or 8, got 3",
    ),
    "speculation-unsupported": (
        "NotImplementedError: The prefix cache does not support draft model states yet.",
    ),
    "draft-settings-wrong": (
        "ValueError: num_speculative_tokens must equal the number of draft layers",
    ),
    "parallel-sizes-inconsistent": (
        "AssertionError: world_size (6) should equal the product of all parallel degrees",
    ),
    "image-token-count-mismatch": (
        "ValueError: number of video placeholders in the text does not match the videos",
    ),
    "guided-decoding-failed": ("RuntimeError: Failed to compile the grammar of the request",),
    "tool-call-parse-failed": ("ValueError: Could not parse tool call from the answer",),
    "engine-step-timeout": ("TimeoutError: RPC call to sample_tokens timed out.",),
    "checkpoint-file-damaged": (
        "ValueError: Unexpected file magic b'abcd'! This doesn't look like a GGML format file.",
    ),
    "model-path-wrong": ("ValueError: No safetensors files were found in the directory",),
    "weight-group-state": (
        "RuntimeError: weight_update was called while one is already active",
    ),
    "environment-unfit": ("ValueError: dual streams are only supported on CUDA platforms",),
    "settings-exclusive": (
        "ValueError: --page-cache requires --prefix-cache to be on",
        "ValueError: Choose either quantize or dequantize, not both.",
        "ValueError: max_cpu_adapters (2) must be >= max_adapters (4).",
        "ValueError: Context parallelism does not support chunked prefill.",
        "ValueError: num_redundant is set to 3 but balancing is not enabled",
    ),
    "setting-missing": (
        "ValueError: --dataset-path is required when the data is local",
        "ValueError: Must provide at least one of --train or --test",
    ),
    "setting-wrong-type": (
        "ValueError: repetition_penalty must be greater than zero, got -1.",
        "ValueError: num_frames must be a positive integer",
    ),
}  # fmt: skip
# Sentences with words like those above that say nothing of the kind.
OTHERS = (
    "ValueError: the answer must be a number",
    "RuntimeError: the reward is too large",
    "ValueError: images must not be empty",
    "RuntimeError: weights were updated",
)


@pytest.mark.parametrize("name", READ)
def test_what_an_engine_refuses_is_read_from_its_words(name: str) -> None:
    assert {text: first_cause(text) for text in READ[name]} == dict.fromkeys(READ[name], name)


@pytest.mark.parametrize("text", OTHERS)
def test_other_sentences_are_not_about_engines(text: str) -> None:
    kind, _, words = text.partition(": ")
    kinds = {*CAUSES, *(form[0] for form in LATE)}
    assert [one.words for one in details_of(kind, words) if one.kind in kinds] == []


def test_every_form_has_a_cause() -> None:
    assert {kind for kind, *_ in FORMS} == set(CAUSES)


@pytest.mark.parametrize(
    "word", ["a_b ", "max_len ", "head_size ", "draft_x=1 ", "image tokens ", "(" * 9]
)
def test_a_long_line_is_read_in_a_moment(word: str) -> None:
    details_of("ValueError", "warm up")
    started = time.process_time()
    details_of("ValueError", word * 2_000)
    assert time.process_time() - started < 2.0
