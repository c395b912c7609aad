"""What an exception's words are about is read in the words of several libraries and versions."""
# ruff: noqa: E501 (a table)

from __future__ import annotations

import pytest

from homeostat.health.failures.reading import ExceptionReading
from homeostat.health.readers import read_text
from homeostat.health.vital_signs.last_exception import last_exception

READ = {
    "shape-mismatch": (
        "ValueError: [matmul] Last dimension of first input with shape (1,8,64) must match second to last dimension of second input with shape (32,128).",
        "ValueError: [broadcast_shapes] Shapes (1,8,311,64) and (1,8,128,64) cannot be broadcast",
        "ValueError: Incompatible shapes for broadcasting: shapes=[(2, 3), (4, 5)]",
        "RuntimeError: einsum(): subscript k has size 64 for operand 1 which does not broadcast with previously seen size 128",
        "RuntimeError: output with shape [1, 1, 5, 5] doesn't match the broadcast shape [1, 3, 5, 5]",
        "ValueError: Attention mask should be of size (1, 1, 5, 9), but is torch.Size([1, 1, 5, 5])",
        "RuntimeError: Expected attn_mask shape [8, 1, 5, 5] but got [8, 1, 5, 9]",
        "IndexError: The shape of the mask [2, 5] at index 1 does not match the shape of the indexed tensor [2, 4, 9] at index 1",
        "IndexError: Dimension out of range (expected to be in range of [-1, 0], but got 1)",
        "RuntimeError: ProcessGroupGloo::allgather: invalid output tensor list at index 0 (expected length 2, got 8)",
        "RuntimeError: [rank0]:[F1118 17:45:30.403048076 ProcessGroupGloo.cpp:1537] Check failed: outputShape[0] * worldSize == inputShape[0] (8 vs. 7). ",
        "RuntimeError: Index tensor must have the same number of dimensions as self tensor",
        "RuntimeError: Size does not match at dimension 1 expected index [2, 9, 1] to be no larger than self [2, 8, 50] apart from dimension 2",
    ),
    "disk-full-or-quota": (
        "OSError: 1000000 requested and 24984 written",
        "OSError: [Errno 27] File too large",
        "RuntimeError: write(): fd 29 failed with Input/output error",
    ),
    "path-missing": (
        "ValueError: directory /data/projects/rl must be an existing directory or a supported archive (.zip, .tar.gz, .tgz, .tar.xz)",
    ),
    "placement-group-unschedulable": (
        "RuntimeError: placement group with bundles [{'CPU': 8.0}] not ready after 6 s",
    ),
    "dtype-mismatch": (
        "RuntimeError: scatter(): Expected self.dtype to be equal to src.dtype",
        "RuntimeError: result type Float can't be cast to the desired output type Long",
        "ValueError: Both operands must be same dtype. Got fp32 and bf16",
        "AssertionError: Expected hidden_states to be bf16, got torch.float32",
    ),
    "device-mismatch": (
        "RuntimeError: indices should be either on cpu or on the same device as the indexed tensor (cpu)",
        "RuntimeError: Tensor for argument weight is on cpu but expected on mps",
        "RuntimeError: Placeholder storage has not been allocated on MPS device!",
        "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
        "AssertionError: query must be on CUDA",
    ),
    "checkpoint-keys-mismatch": (
        "KeyError: 'model.layers.0.mlp.gate_up_proj.weight'",
        "ValueError: Received 140 parameters not in model: ",
        "ValueError: There is no module or parameter named 'model.visual' in Qwen2ForCausalLM",
        "ValueError: Unrecognized weight name: model.layers.0.foo",
    ),
    "unknown-setting": (
        "ValueError: Unknown setting 'foo' for section trainer",
        "ValueError: 'foo' is not a valid IntervalStrategy, please select one of ['no', 'steps']",
        "ValueError: Unsupported optimizer: foo",
        "ValueError: Unknown attention implementation: foo. Must be one of eager, sdpa",
        "AssertionError: Invalid loss type: foo",
        "ValueError: vllm_mode must be either 'server' or 'colocate', got 'remote'.",
        "ValueError: Unknown importance sampling level: word. Possible values are 'token' and 'sequence'.",
        "ValueError: Unknown f_divergence_type: foo",
        "ValueError: Unsupported truncation mode: keep, expected 'keep_start' or 'keep_end'",
    ),
    "setting-missing": (
        "ValueError: You must specify `reward_model_path`",
        "ValueError: `eval_dataset` must be provided when eval_strategy is not 'no'",
        "AssertionError: --save-interval must be specified",
        "RuntimeError: OPENAI_API_KEY is not set",
        "ValueError: `train_dataset` is required unless an `environment_factory` is provided.",
        "ValueError: Trainer must have an evaluation dataset to use the LogCompletionsCallback.",
        "ValueError: Logging with `tensorboard` requires a `logging_dir` to be passed in.",
        "ValueError: No input_dir provided and automatic checkpoint naming is disabled.",
        "ValueError: `reward_model` is necessary for PPO training.",
        "ValueError: Please make sure eval_dataset be provided or val_size >1e-6",
        "ValueError: Please enable `predict_with_generate` to save model predictions.",
        "ValueError: self.dataset: [], self.cached_dataset: []. Please input the training dataset.",
    ),
    "settings-exclusive": (
        "ValueError: Cannot use both `packing` and `completion_only_loss`",
        "ValueError: `fsdp` and `deepspeed` are mutually exclusive",
        "AssertionError: sequence parallelism can only be enabled when tensor parallel size > 1",
        "ValueError: You passed `sync_ref_model=True` while `beta=0.0`, which means the reference model is not used",
        "ValueError: Liger kernel does not support off-policy sequence masking yet.",
        "ValueError: Padding-free training is yet not supported for image rows.",
        "ValueError: `activation_checkpointing_offload=True` requires `activation_checkpointing=True`.",
        "ValueError: When packing is enabled, `max_length` can't be `None`.",
        "ValueError: log_completions_hub_repo is set, but log_completions is False.",
        "ValueError: You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`.",
        "ValueError: Cannot use LoRA with GaLore, APOLLO or BAdam together.",
        "ValueError: You can't use 8 bit and 4 bit precision at the same time",
        "ValueError: Cannot specify `val_size` if `eval_dataset` is not None.",
        "ValueError: Packing and lazy_tokenize are incompatible.",
        "ValueError: Provide exactly one of: name, base_url.",
        "ValueError: Provide num_tasks or indices, not both.",
        "RuntimeError: Unsloth: Can only load in 4bit or 8bit or 16bit, not a combination!",
        "ValueError: Turn off `streaming` when saving dataset to disk.",
        "ValueError: `image_max_pixels` cannot be smaller than `image_min_pixels`.",
        "ValueError: `model` and `ref_model` cannot be the same object.",
    ),
    "setting-wrong-type": (
        "ValueError: Invalid learning rate: -0.0001",
        "ValueError: Invalid momentum value: -0.9",
        "ValueError: Invalid epsilon value: -1e-08",
        "TypeError: runtime_env['env_vars'] must be of type Dict[str, str], but the value 1 is of type <class 'int'>",
        "ValueError: invalid strategy name. It must be either a string or an instance of `lightning.pytorch.strategies.Strategy`.",
    ),
}  # fmt: skip


def reading(text: str) -> ExceptionReading:
    found = last_exception(read_text(text))
    assert found is not None
    return found


@pytest.mark.parametrize("name", READ)
def test_the_words_of_several_libraries_are_read_alike(name: str) -> None:
    names = {text: (reading(text).likely or ("",))[0] for text in READ[name]}
    assert names == dict.fromkeys(READ[name], name)


def test_a_package_that_fails_at_its_import_does_not_fit_what_is_beside_it() -> None:
    text = """
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/unsloth/models/rl_replacements.py", line 236, in {place}
    loss = RL_REPLACEMENTS["grpo_compute_loss_slow"]
KeyError: 'grpo_compute_loss_slow'
"""
    found = reading(text.replace("{place}", "<module>")).likely
    assert found == ("library-version-mismatch", "unsloth cannot be imported")
    assert reading(text.replace("{place}", "train")).likely is None


def test_a_sentence_is_no_key_and_what_a_message_lacks_is_left_out() -> None:
    sentence = last_exception(read_text("KeyError: \"filename 'rows' not found\""))
    assert sentence is not None
    assert sentence.wrong == ""
    key = last_exception(read_text("KeyError: 'my rows'"))
    assert key is not None
    assert key.wrong == "there is no key my rows"
    lacking = last_exception(read_text("RuntimeError: Gizmo is not available"))
    assert lacking is not None
    assert lacking.wrong == "Gizmo is not supported here"
