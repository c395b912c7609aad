"""What frameworks print in runs that are well: no text of level error is found in it.

benign/lines.txt holds lines that were composed after real ones: start-up notes, warnings about the
future, lists of settings, caches, retries, of some twenty programs. Each is also read alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from homeostat.health.diagnose import diagnose, judge
from homeostat.health.finding import Finding, Level
from homeostat.health.readers import read_text
from homeostat.health.registry import BY_CODE, RULES, SIGNATURES
from homeostat.health.signatures.signature import rule_of

LINES = (Path(__file__).parent / "benign" / "lines.txt").read_text(encoding="utf-8").splitlines()
ERRORS = [rule_of(one) for one in SIGNATURES if one.level is Level.ERROR]


def errors_in(text: str) -> list[Finding]:
    view = read_text(text)
    found = [judge(rule, view) for rule in ERRORS]
    each = [one for findings in found if isinstance(findings, list) for one in findings]
    return [one for one in each if one.level is Level.ERROR]


# All signatures look at each line. Together, as below, they take a tenth of the time.
@pytest.mark.slow
def test_no_error_is_seen_in_any_of_the_lines_alone() -> None:
    assert len(LINES) > 170
    wrong = {line: [one.code for one in errors_in(line + "\n")] for line in LINES}
    assert {line: codes for line, codes in wrong.items() if codes} == {}


def test_no_error_is_seen_in_all_of_the_lines_together() -> None:
    assert errors_in("\n".join(LINES) + "\n") == []


REWARD_DIED = """
Traceback (most recent call last):
  File "/opt/train.py", line 80, in <module>
    trainer.train()
  File "/env/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 1210, in _calculate
    output = reward_func(prompts=prompts, completions=completions, **reward_kwargs)
  File "/opt/train.py", line 33, in accuracy_reward
    return [float(answer[0]) for answer in found]
IndexError: list index out of range
"""


@pytest.mark.parametrize(
    "notice",
    [
        "Using the latest cached version of the dataset since openai/gsm8k couldn't be found on "
        "the Hugging Face Hub (offline mode is enabled).",
        "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
        "exceeded\"))' thrown while requesting HEAD https://huggingface.co/x/y/config.json",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443)",
    ],
)
def test_what_was_survived_does_not_stand_before_the_real_error(notice: str) -> None:
    view = read_text(notice + "\n" + REWARD_DIED)
    first = diagnose(view, RULES).findings[0]
    assert (first.code, first.level) == ("VIT001", Level.ERROR)


def test_pip_s_warning_is_a_note_where_the_run_then_trained() -> None:
    pip = (
        "ERROR: pip's dependency resolver does not currently take into account all the packages "
        "that are installed. This behaviour is the source of the following dependency conflicts.\n"
        "gcsfs 2025.3.2 requires fsspec==2025.3.2, but you have fsspec 2025.3.0.\n"
    )
    rows = "".join(f"{{'loss': {2.0 - 0.1 * n:.4f}, 'epoch': {n / 10}}}\n" for n in range(1, 9))
    levels = [
        {one.code: one.level for one in diagnose(read_text(text), RULES).findings}["ERR331"]
        for text in (pip, pip + rows)
    ]
    assert levels == [Level.WARN, Level.INFO]


@pytest.mark.parametrize(
    "warning",
    [
        "The fast path is not available because one of the required library is not installed.",
        "torch._dynamo hit config.recompile_limit (8)",
        "Using KV cache scaling factor 1.0 for fp8_e4m3.",
        "A decoder-only architecture is being used, but right-padding was detected!",
        "WARNING: tokenization mismatch: 57 vs. 59. (ignored)",
        "Could not find response key `### Answer:` in the following instance",
        "Padding-free training may cause cross-contamination between batches.",
        "Some weights of LlamaForCausalLM were not initialized from the model checkpoint at x",
        "Found missing adapter keys while loading the checkpoint: ['a.b']",
    ],
)
def test_a_warning_is_a_note_where_an_exception_ends_the_run(warning: str) -> None:
    alone = diagnose(read_text(warning), RULES).findings[0]
    found = diagnose(read_text(warning + "\n" + REWARD_DIED), RULES).findings
    levels = {one.code: one.level for one in found}
    assert (alone.level, levels[alone.code]) == (Level.WARN, Level.INFO)


def test_an_exception_that_python_ignores_is_no_error() -> None:
    words = "AttributeError: 'LLMEngine' object has no attribute 'model_executor'"
    ignored = (
        "Exception ignored in: <function LLMEngine.__del__ at 0x7f10>\n"
        "Traceback (most recent call last):\n"
        '  File "/env/lib/python3.11/site-packages/vllm/engine.py", line 550, in __del__\n'
        "    if model_executor := getattr(self, 'model_executor', None):\n"
    )
    assert "ERR320" in [one.code for one in errors_in(words)]
    assert "ERR320" not in [one.code for one in errors_in(ignored + words)]


def test_a_hub_that_is_out_of_reach_is_still_the_error_that_a_run_ends_in() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "hub.py", line 9, in get\n'
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co')\n"
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files\n"
    )
    found = {one.code: one.level for one in errors_in(log)}
    assert found["ERR352"] is Level.ERROR


SIZES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.15 GiB of which 1.02 GiB is free. {who} Of the allocated memory 74.90 GiB is "
    "allocated by PyTorch, and 1.80 GiB is reserved by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize(
    ("who", "is_other"),
    [
        # In a container torch does not find its own number, and names itself.
        ("Process 12345 has 78.10 GiB memory in use.", False),
        ("Including non-PyTorch memory, this process has 78.10 GiB memory in use.", False),
        ("Process 7 has 0.50 GiB memory in use. Process 12345 has 77.60 GiB memory in use.", False),
    ],
)
def test_memory_of_this_very_process_is_not_blamed_on_another(who: str, is_other: bool) -> None:
    view = read_text("Traceback (most recent call last):\n" + SIZES.format(who=who))
    assert bool(judge(BY_CODE["ERR031"], view)) is is_other


@pytest.mark.parametrize(
    "who",
    [
        "Process 900 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has "
        "38.10 GiB memory in use.",
        "Process 900 has 40.00 GiB memory in use. Process 12345 has 38.10 GiB memory in use.",
        "Process 900 has 40.00 GiB memory in use.",
    ],
)
def test_memory_of_another_process_is_seen(who: str) -> None:
    line = SIZES.format(who=who).replace("74.90", "36.00")
    assert judge(BY_CODE["ERR031"], read_text(line))


def test_a_first_try_to_connect_is_a_note_in_a_run_that_went_on() -> None:
    text = "".join(
        f"[rank{rank}]:[W socket.cpp:663] [c10d] The client socket has failed to connect to "
        "[node-0]:6000 (errno: 22 - Invalid argument).\n"
        for rank in range(8)
    )
    rows = (f"{{'loss': {2 - i / 100}, 'grad_norm': 0.9, 'epoch': {i / 40}}}\n" for i in range(40))
    found = diagnose(read_text(text + "".join(rows)), RULES).findings
    assert [one.level for one in found if one.code == "ERR116"] == [Level.INFO]


def test_a_note_about_a_line_stands_for_the_guess_that_it_is_an_error() -> None:
    text = (
        "Running generate_until requests: 100%|######| 1319/1319 [12:01<00:00,  1.83it/s]\n"
        "Token indices sequence length is longer than the specified maximum sequence length for "
        "this model (2312 > 2048). Running this sequence through the model will result in indexing "
        "errors\n"
    )
    found = diagnose(read_text(text), RULES).findings
    assert [(one.code, one.level) for one in found] == [("ERR468", Level.INFO)]


def test_megatron_leaves_nan_to_the_loss_scaler_by_itself() -> None:
    line = (
        "WARNING: Setting args.check_for_nan_in_loss_and_grad to False since dynamic loss scaling "
        "is being used\n"
    )
    codes = [one.code for one in diagnose(read_text(line), RULES).findings]
    assert "ERR658" not in codes
