"""Sentences about packages, versions, compilers, GPUs and models are read in any library's words."""
# ruff: noqa: E501 (a table)

from __future__ import annotations

import pytest
from tests.support.first_causes import first_cause

from homeostat.health.diagnose import diagnose
from homeostat.health.failures.details import details_of
from homeostat.health.failures.forms.installation import CAUSES, optional_package
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.vital_signs.last_exception import last_exception

READ = {
    "package-missing": (
        "ImportError: Please install tensorboardX to use TensorBoard",
        "RuntimeError: WandbCallback requires wandb to be installed. Run `pip install wandb`.",
        "ImportError: DeepSpeedCPUAdam requires the deepspeed library, which could not be found.",
        "ImportError: Loading a GPTQ quantized model requires optimum (`pip install optimum`)",
        "ValueError: You need to pip install mpi4py to use the MPI launcher",
        "ImportError: timm is required for this model but could not be imported",
        "RuntimeError: pynvml is not installed, please install nvidia-ml-py",
        "ModuleNotFoundError: Neither `tensorboard` nor `tensorboardX` is available. Try `pip install`ing either.",
        "OSError: libsndfile.so: cannot open shared object file: No such file or directory",
        "ImportError: libnuma.so.1: cannot open shared object file",
        "NameError: name 'LoraConfig' is not defined. Did you mean: 'ModelConfig'?",
        "bash: deepspeed: command not found",
        "No module named 'flash_attn_3'",
        "ImportError: You must have `peft` installed to use LoRA",
        "RuntimeError: The package `zstandard` is required to read .zst files",
        "ImportError: Install `ray[default]` to use the Ray launcher",
        "Error: ffmpeg not found in PATH",
    ),
    "library-version-mismatch": (
        "ImportError: peft>=0.6.0 is required, but found peft 0.4.0",
        "ValueError: transformers version must be >= 4.43.0, but found 4.41.2",
        "RuntimeError: This version of Unsloth requires transformers>=4.51.3. Please upgrade",
        "ImportError: FlexAttention requires torch >= 2.5.0",
        "RuntimeError: torch version 2.4.0 is too old; upgrade to at least 2.6",
        "RuntimeError: flashinfer-cubin version (0.6.8) does not match flashinfer version (0.6.10).",
        "RuntimeError: xformers 0.0.28 requires torch==2.4.1, but you have torch 2.5.0",
        "RuntimeError: apex version is not compatible with this PyTorch version",
        "pydantic.errors.PydanticImportError: `BaseSettings` has been moved to the `pydantic-settings` package.",
        "AttributeError: FusedMoeRunner does not exist",
        "module 'mlx.core.metal' has no attribute 'get_peak_memory'",
        "f.get_batch_logps() got an unexpected keyword argument 'average_log_prob'",
        "_flash_attn_forward() takes 10 positional arguments but 14 were given",
        "RuntimeError: Cannot use FSDP2 with torch<2.6.0",
        "NotImplementedError: fsdp_version 2 requires PyTorch 2.6",
        "AttributeError: property 'eos_token_id' of 'X' object has no setter",
        "ValueError: use_liger_kernel=True requires liger-kernel>=0.5.5",
    ),
    "gpu-architecture-unsupported": (
        "RuntimeError: FlashMLA requires SM90 or above",
        "NotImplementedError: Unsupported compute capability 12.1",
        "ValueError: The method marlin is not supported for the current GPU. Minimum capability: 80.",
        "RuntimeError: cutlass_moe_mm requires CUDA compute capability >= 9.0",
        "ValueError: NVFP4 requires Blackwell (sm100) GPUs",
        "RuntimeError: TMA is only available on Hopper or newer GPUs",
        "RuntimeError: Only Hopper and Blackwell GPUs are supported",
        "ImportError: MoRI requires gfx942 or gfx950",
        "RuntimeError: Arch mismatch: kernel compiled for sm_90 but running on sm_86",
    ),
    "cuda-toolkit-mismatch": (
        "RuntimeError: DeepGEMM requires CUDA 12.3 or higher",
        "RuntimeError: NVCC version 11.8 is lower than 12.0",
        "RuntimeError: CUDA 12.4 or later is required to build this extension",
    ),
    "cuda-toolkit-missing": ("RuntimeError: Unable to locate the CUDA compiler",),
    "cuda-library-mismatch": ("OSError: Failed to load libcublas.so.13",),
    "extension-abi-mismatch": (
        "RuntimeError: FlashAttention: ABI mismatch with the installed torch",
        "RuntimeError: No such operator mylib::fused_norm",
        "NotImplementedError: Could not run 'vllm::rms_norm' with arguments from the 'CUDA' backend.",
    ),
    "python-version-unsupported": (
        "RuntimeError: Python version >= 3.10 required.",
        "RuntimeError: fastgen needs python >= 3.11",
        "AttributeError: module 'ast' has no attribute 'Str'",
    ),
    "known-bad-version": (
        "ImportError: cannot import name 'SIGKILL' from 'signal' (C:\\lib\\signal.py)",
        "AttributeError: module 'os' has no attribute 'getuid'",
    ),
    "environment-unfit": (
        "pynvml.NVMLError_NotSupported: Not Supported",
        "RuntimeError: Failed to load the default metallib.\nThis library is using language version 4.0 which is not supported on this OS",
        "NotImplementedError: NCCL is only supported on Linux",
    ),
    "architecture-unsupported": (
        "RuntimeError: Currently, calibration of TinyVLTextModel is not supported.",
        "NotImplementedError: Model type qwen3_vl is not supported yet",
        "NotImplementedError: Architecture 'LlavaForConditionalGeneration' not supported!",
        "NotImplementedError: PhimoeForCausalLM is not supported",
        "AssertionError: Model Qwen3OmniMoe is not in the supported model list",
    ),
}  # fmt: skip
# Sentences with words like those above that are about something else.
OTHERS = (
    "ValueError: GRPO requires num_generations >= 2",
    "ValueError: this loss requires beta > 0.5",
    "ValueError: at least one adapter is required",
    "ValueError: training requires an adapter of rank 8 or above",
    "AssertionError: weight version mismatch: the engine has 3, the trainer 4",
    "ValueError: Unsupported checkpoint version 3",
    "RuntimeError: Failed to build the dataset",
    "NotImplementedError: Model parallelism is not supported",
    "RuntimeError: error in operator vllm::unified_attention",
    "AssertionError: answer not found",
    "ValueError: Missing modules in the adapter: q_proj",
    "RuntimeError: one of the variables is at version 2; expected version 1 instead",
    "KeyError: 'install'",
)


@pytest.mark.parametrize("name", READ)
def test_what_does_not_fit_is_read_from_the_words(name: str) -> None:
    assert {text: first_cause(text) for text in READ[name]} == dict.fromkeys(READ[name], name)


@pytest.mark.parametrize("text", OTHERS)
def test_other_sentences_with_such_words_are_not_about_an_installation(text: str) -> None:
    kind, _, words = text.partition(": ")
    assert [one.words for one in details_of(kind, words) if one.kind in CAUSES] == []


@pytest.mark.parametrize("name", ["learn", "let_it_be", "avoid", "rays", "tls", "text"])
def test_a_name_that_only_begins_like_a_package_is_none(name: str) -> None:
    assert optional_package(name) == ""


def test_a_key_that_is_missed_where_models_are_chosen_is_a_model() -> None:
    file = "/v/lib/python3.11/site-packages/transformers/models/auto/configuration_auto.py"
    text = f"Traceback (most recent call last):\n  File \"{file}\", line 9, in __getitem__\n    raise KeyError(key)\nKeyError: 'exaone4'"
    found = last_exception(read_text(text))
    assert found is not None
    assert found.likely is not None
    assert found.likely[0] == "architecture-unsupported"


def test_a_missing_package_is_not_the_scripts_fault() -> None:
    text = 'Traceback (most recent call last):\n  File "/data/a/train.py", line 9, in <module>\n    main()\nRuntimeError: The logger requires tensorboard to be installed'
    assert first_cause(text) == "package-missing"


def test_a_script_that_gives_a_class_an_unknown_argument_was_written_for_another_version() -> None:
    text = "Traceback (most recent call last):\n  File \"/data/a/train.py\", line 9, in <module>\n    main()\nTypeError: {} got an unexpected keyword argument 'device'"
    assert first_cause(text.format("GeminiPlugin.__init__()")) == "library-version-mismatch"
    assert first_cause(text.format("my_helper()")) == "script-failed"


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ("WARNING: tensorboard is not installed, please install it", False),
        ("tensorboard is not installed, please install it", True),
    ],
)
def test_a_warning_in_a_pasted_text_is_not_what_was_wrong(line: str, is_read: bool) -> None:
    view = read_text(line)
    found = as_json(diagnose(view, RULES), view)["findings"]
    whys = [cause["why"] for one in found for cause in one["causes"]]
    assert any("read, not recognised" in why for why in whys) is is_read
