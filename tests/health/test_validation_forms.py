"""Sentences in which frameworks refuse settings and inputs are read whichever framework it was."""
# ruff: noqa: E501 (a table)

from __future__ import annotations

import re
import time

import pytest

from homeostat.health.failures.forms.validation import FORMS
from homeostat.health.readers import read_text
from homeostat.health.vital_signs.last_exception import last_exception

READ = {
    "settings-exclusive": (
        "ValueError: FSDP1 does not support disabling cpu_offload_pin_memory",
        "ValueError: `activation_offload=True` requires `fsdp_version=2`.",
        "AssertionError: Token-drop MoE is temporarily not supported with activation offloading.",
        "ValueError: Sequence packing only supports micro_batch_size=1",
        "ValueError: `interleave_probs` is only valid for interleaved mixing.",
        "AssertionError: config cannot have both bf16=True and fp16=True",
        "NotImplementedError: MPT does not support training with left padding.",
        "AssertionError: --overlap-param-gather only supported with distributed optimizer",
        "AssertionError: Must use --overlap-param-gather with --overlap-grad-reduce",
        "AssertionError: Do not use --external-cuda-graph with --cuda-graph-impl.",
        "ValueError: When bias_activation_fusion is True, gated_linear_unit must be True.",
        "AssertionError: --cuda-graph-modules must be empty when --cuda-graph-impl=full_iteration.",
        "ValueError: CPU offloading does not work when activation recomputation is enabled",
        "ValueError: moe_dispatch_fwd_dtype requires the flex dispatcher backend.",
        "AssertionError: You should use NatureCNN only with images not with Box(4)",
        "lightning.fabric.utilities.exceptions.MisconfigurationException: the hooks are not for this loop",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for AxolotlConfig\n  Value error, please see the guide [type=value_error, input_value={'a': 1}, input_type=dict]",
    ),
    "unknown-setting": (
        "ValueError: Unknown pref_loss: foo",
        "ValueError: Unknown task: stf.",
        "AssertionError: AdmW is not a supported DeepSpeed Optimizer",
        "AssertionError: DeepSpeed does not recognize LR scheduler WarmUpLr",
        "ValueError: Config function 'llama3_debug' not found in torchtitan.models.llama3. Available config functions: ['cast']",
        "ValueError: model_type: 'qwen-2' not in ['qwen2', 'qwen3']",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for Config\nrl\n  Input should be 'dpo' or 'grpo' [type=literal_error, input_value='ppo', input_type=str]",
        "ValueError: bnb_4bit_quant_type must be in ['fp4','nf4'] but found foo",
        "AssertionError: Invalid cuda graph implementation: foo",
        "ValueError: clipping_type must be 'adaptive', 'norm', or 'value' not foo",
        "AssertionError: --model-parallel-size is no longer valid, use --tensor-model-parallel-size instead",
        "AssertionError: Invalid choices for recompute_modules: foo",
    ),
    "user-code-failed": (
        "MisconfigurationException: No `training_step()` method defined. The trainer expects one.",
    ),
    "process-group-state": ("RuntimeError: ProcessGroupGloo::broadcast: invalid root rank: 4",),
    "setting-missing": (
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for Config\nmicro_batch_size\n  Field required [type=missing, input_value={}, input_type=dict]",
        "ValueError: DeepSpeed config_file is required in dist_config",
        "ValueError: You need to manually pass in `--num_processes` using this config yaml.",
        "ValueError: Please specify `export_dir` to save model.",
        "RuntimeError: Using sequence parallelism requires setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1",
    ),
    "setting-wrong-type": (
        "MisconfigurationException: You have passed invalid value 1.5 for limit_train_batches, it has to be in [0.0, 1.0] or an int.",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for Config\nlearning_rate\n  Input should be a valid number, unable to parse string as a number [type=float_parsing, input_value='fast', input_type=str]",
        "ValueError: buffer_size must be a positive integer",
        "AssertionError: param `checkpointable_layers` must be type of list.",
        "ValueError: num_shards must be > 0, got 0",
        "AssertionError: over_sampling_batch_size 4 should be greater than or equal to rollout_batch_size 8",
        "AssertionError: Length of cp_comm_type (2) should equal to the number of layers (4)!",
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
    "path-missing": (
        "FileNotFoundError: Missing the index file in out/data",
        "FileNotFoundError: path: '/data/run/out/v0/checkpoint-100'",
        "FileNotFoundError: Checkpoint file not found: lightning_logs/version_3/last.ckpt",
        "FileNotFoundError: Prompt template not found at /data/prompts/a.txt on rank=8.",
    ),
    "parallel-degrees-mismatch": ("AssertionError: (global_num_gpus / pp_size) / mp_size [(4 / 4) / 2] must be a whole number",),
    "parallel-sizes-inconsistent": ("AssertionError: number of middle layers: 5 must be divisible by middle pipeline stages 4",),
    "model-path-wrong": ("FileNotFoundError: No safetensors weights found in out/model",),
}  # fmt: skip
# Sentences with the same words that say something else.
OTHER = {
    "settings-exclusive": ("KeyError: 'requires_grad'", "ValueError: supported"),
    "column-missing": ("RuntimeError: the tensor is missing column-scaled FP8 data",),
    "unknown-setting": ("OSError: Invalid image file: a.png",),
}
# Rows of which attention cannot take whole heads, and those of which it could.
HEADS = {
    "shape '[1, 8192, -1, 128]' is invalid for input of size 524288": "heads-not-dividing-tp",
    "shape '[4, 178, -1, 128]' is invalid for input of size 45568": "heads-not-dividing-tp",
    "shape '[2, 16, -1, 128]' is invalid for input of size 5000": "shape-mismatch",
    "shape '[64, -1]' is invalid for input of size 32": "shape-mismatch",
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


@pytest.mark.parametrize("text", HEADS)
def test_a_part_of_a_head_is_told_from_other_shapes(text: str) -> None:
    assert _likely(f"RuntimeError: {text}") == HEADS[text]


@pytest.mark.parametrize(
    ("file", "name"), [("training/arguments", "settings-exclusive"), ("core/run", "")]
)
def test_a_check_of_arguments_refuses_settings(file: str, name: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "/opt/venv/lib/python3.11/site-packages/megatron/{file}.py", line 3, in check\n    check()\n'
    found = last_exception(
        read_text(trace + "AssertionError: expected glorp-based training", config=None)
    )
    assert found is not None
    assert (found.likely or ("", ""))[0] == name


def test_forms_take_no_long_time_on_any_text() -> None:
    texts = ("a_" * 2000, "x" * 4000, "`a` " * 1000, "requires a_b " * 300, "is not " * 600)
    start = time.perf_counter()
    for _, pattern, _ in FORMS:
        form = re.compile(pattern)
        for text in texts:
            form.search(text)
    # A form that backtracks takes minutes.
    assert time.perf_counter() - start < 30
