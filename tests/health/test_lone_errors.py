"""An error without frames at the end of a log is read, whole lines and those named within one."""

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.failures.end_lines import End
from homeostat.health.failures.lone_errors import pasted_errors
from homeostat.health.finding import Level
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.vital_signs.ending import ending_of
from homeostat.health.vital_signs.last_exception import last_exception

ROWS, LATER = (
    "\n".join(str({"loss": 2.0 - n / 10, "epoch": n / 10}) for n in range(first, first + 8))
    for first in (1, 9)
)
# What ends a log -> the error's class and words.
NAMED = {
    "LayerNorm error: TypeError: missing a required argument: 'num_warps'": (
        "TypeError",
        "missing a required argument: 'num_warps'",
    ),
    "collator = Collator(TypeError: __init__() got an unexpected keyword argument 'max_length'": (
        "TypeError",
        "__init__() got an unexpected keyword argument 'max_length'",
    ),
    "[eval] scoring failed on row 127: KeyError('question')": ("KeyError", "'question'"),
    "compute_score() crashes with NotImplementedError": ("NotImplementedError", ""),
    "ERROR 10:00:00 core.py:1] abort() got an unexpected keyword argument 'pooling_output'": (
        "Error",
        "abort() got an unexpected keyword argument 'pooling_output'",
    ),
}
SURVIVED = (
    "request 7 failed (TimeoutError: no answer), retrying in 2 s",
    "WARNING: could not import flash_attn: ImportError: no such module",
    "row 3 skipped: ValueError: bad label",
    "falling back to eager after RuntimeError: no kernel",
)


@pytest.mark.parametrize("line", NAMED)
def test_an_error_in_the_last_line_ends_the_run(line: str) -> None:
    found = last_exception(read_text(f"{ROWS}\n{line}"))
    assert found is not None
    assert (found.failure.name, found.failure.message) == NAMED[line]


@pytest.mark.parametrize("line", SURVIVED)
def test_an_error_that_a_run_reports_and_survives_does_not_end_it(line: str) -> None:
    assert ending_of(read_text(f"{ROWS}\n{line}")).how is not End.EXCEPTION


@pytest.mark.parametrize("line", [*NAMED, *SURVIVED])
def test_an_error_with_steps_after_it_does_not_end_the_run(line: str) -> None:
    assert ending_of(read_text(f"{ROWS}\n{line}\n{LATER}")).how is not End.EXCEPTION


def test_an_error_within_a_line_counts_in_the_very_last_lines_alone() -> None:
    line = next(iter(NAMED))
    text = f"{ROWS}\n{line}\n" + "saving the model\n" * 4
    assert ending_of(read_text(text)).how is not End.EXCEPTION


def test_the_notice_of_a_newer_version_is_no_error() -> None:
    notice = "wandb: wandb version 0.19.1 is available!  To upgrade, please run:"
    view = read_text("\n".join(["wandb: Tracking run with wandb version 0.13.4", notice]))
    assert list(pasted_errors(view.log.lines)) == []


def test_a_table_of_torchrun_alone_is_its_report_and_no_error_of_unknown_words() -> None:
    text = (
        "train.py FAILED\nFailures:\n  <NO_OTHER_FAILURES>\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2025-06-01_10:00:00\n"
        "  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 1211)\n  error_file: <N/A>\n"
    )
    found = diagnose(read_text(text), RULES).findings
    assert [one.code for one in found] == ["ERR140"]


def test_a_process_that_is_started_while_its_parent_is_imported_is_recognised() -> None:
    text = (
        "RuntimeError: \n        An attempt has been made to start a new process before the\n"
        "        current process has finished its bootstrapping phase.\n\n"
        "        This probably means that you are not using fork to start your\n"
    )
    codes = [one.code for one in diagnose(read_text(text), RULES).findings]
    assert codes[0].startswith("ERR")


def test_a_warning_of_python_and_what_it_quotes_are_no_error() -> None:
    text = (
        "(pid=88) /env/lib/python3.10/site-packages/vllm/connections.py:8: RuntimeWarning: "
        "Failed to read commit hash:\n"
        "(pid=88) No module named 'vllm._version'\n"
        "(pid=88)   from vllm.version import __version__ as VLLM_VERSION\n"
    )
    found = diagnose(read_text(text), RULES).findings
    assert {one.level for one in found} <= {Level.INFO}
    (raised,) = diagnose(read_text("No module named 'vllm._version'\n"), RULES).findings
    assert raised.code == "ERR320"


QUANTITIES = (
    "Loss error: 0.4703\nLoss error: 0.1962",
    "Mean Squared Error: 0.0123\nMean Absolute Error: 0.0871",
    "epoch 7 train error: 0.1429 val error: 0.1714",
    "Word Error Rate: 4.3 %\nCharacter Error Rate: 0.0532",
    "10:00:00 | compress | METRIC - error 0.10",
    "max abs error = 1.2e-05, mismatch: 0.03%",
)


@pytest.mark.parametrize("text", QUANTITIES)
def test_a_quantity_that_is_called_an_error_is_none(text: str) -> None:
    assert not list(pasted_errors(read_text(text).log.lines))


@pytest.mark.parametrize(
    "line", ["Error: 12.1 is not supported", "CUDA error: 2", "error: 404", "Error 1.0.0 required"]
)
def test_an_error_whose_words_begin_with_a_number_is_one(line: str) -> None:
    assert list(pasted_errors(read_text(line).log.lines))


def test_a_mere_guess_about_a_logged_warning_is_no_warning() -> None:
    text = "trainer_interface.cc(114) LOG(WARNING) Too many sentences are loaded! (10000000)"
    found = diagnose(read_text(text), RULES)
    assert all(one.level is Level.INFO for one in found.findings)


def test_a_guess_about_what_nccl_logs_as_a_warning_is_a_warning() -> None:
    text = "include/socket.h:344 WARN Socket creation failed : Address family not supported"
    found = diagnose(read_text(text), RULES)
    assert any(one.level is Level.WARN for one in found.findings)
