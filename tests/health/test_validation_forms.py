"""Sentences in which frameworks refuse settings and inputs are read whichever framework it was."""
# ruff: noqa: E501 (a table)

from __future__ import annotations

import re
import time

import pytest

from homeostat.health.last_exception import last_exception
from homeostat.health.readers import read_text
from homeostat.health.validation_forms import FORMS

READ = {
    "settings-exclusive": (
        "ValueError: FSDP1 does not support disabling cpu_offload_pin_memory",
        "ValueError: `activation_offload=True` requires `fsdp_version=2`.",
        "AssertionError: Token-drop MoE is temporarily not supported with activation offloading.",
        "ValueError: Sequence packing only supports micro_batch_size=1",
        "ValueError: `interleave_probs` is only valid for interleaved mixing.",
        "AssertionError: config cannot have both bf16=True and fp16=True",
        "NotImplementedError: MPT does not support training with left padding.",
    ),
    "unknown-setting": (
        "ValueError: Unknown pref_loss: foo",
        "ValueError: bnb_4bit_quant_type must be in ['fp4','nf4'] but found foo",
        "AssertionError: Invalid cuda graph implementation: foo",
        "ValueError: clipping_type must be 'adaptive', 'norm', or 'value' not foo",
    ),
    "setting-missing": (
        "ValueError: DeepSpeed config_file is required in dist_config",
        "ValueError: You need to manually pass in `--num_processes` using this config yaml.",
        "ValueError: Please specify `export_dir` to save model.",
        "RuntimeError: Using sequence parallelism requires setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1",
    ),
    "setting-wrong-type": (
        "ValueError: buffer_size must be a positive integer",
        "AssertionError: param `checkpointable_layers` must be type of list.",
        "ValueError: num_shards must be > 0, got 0",
    ),
    "length-limit-inconsistent": (
        "AssertionError: max_position_embeddings (2048) must be greater than or equal to seq_length (4096).",
    ),
    "dataset-empty": ("ValueError: No records found in JSONL file: train.jsonl",),
    "column-missing": (
        "ValueError: Packed Parquet file 'a.parquet' is missing required columns: ['labels']",
        "ValueError: Expected a key of 'chosen' in column_map but found {'text': 'text'}.",
    ),
    "resume-checkpoint-missing": ("ValueError: Could not find any valid checkpoint in out/run1",),
    "adapter-not-loaded": ("ValueError: Adapter weights not found. Please ensure a valid adapter checkpoint is provided.",),
    "launcher-variables-missing": (
        "RuntimeError: Distributed finetune recipe should be run via a distributed launcher.",
        "ValueError: Please use `FORCE_TORCHRUN=1` to launch DeepSpeed training.",
    ),
    "gpu-count-mismatch": ("ValueError: You selected more devices (8) than available in your system (2).",),
    "path-missing": ("FileNotFoundError: Missing the index file in out/data",),
    "model-path-wrong": ("FileNotFoundError: No safetensors weights found in out/model",),
}  # fmt: skip
# Sentences with the same words that say something else.
OTHER = {
    "settings-exclusive": ("KeyError: 'requires_grad'", "ValueError: supported"),
    "column-missing": ("RuntimeError: the tensor is missing column-scaled FP8 data",),
    "unknown-setting": ("OSError: Invalid image file: a.png",),
}


def _likely(text: str) -> str:
    trace = 'Traceback (most recent call last):\n  File "/opt/venv/lib/python3.11/site-packages/megatron/core/run.py", line 3, in run\n    check()\n'
    reading = last_exception(read_text(trace + text, config=None))
    return reading.likely[0] if reading is not None and reading.likely is not None else ""


@pytest.mark.parametrize("name", READ)
def test_a_refusal_is_read(name: str) -> None:
    for text in READ[name]:
        assert _likely(text) == name, text


@pytest.mark.parametrize("name", OTHER)
def test_similar_words_are_not_taken_for_it(name: str) -> None:
    for text in OTHER[name]:
        assert _likely(text) != name, text


def test_forms_take_no_long_time_on_any_text() -> None:
    texts = ("a_" * 2000, "x" * 4000, "`a` " * 1000, "requires a_b " * 300, "is not " * 600)
    start = time.perf_counter()
    for _, pattern, _ in FORMS:
        form = re.compile(pattern)
        for text in texts:
            form.search(text)
    # A form that backtracks takes minutes.
    assert time.perf_counter() - start < 30
