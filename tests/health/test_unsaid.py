"""A text that denies an error is not taken for the error."""

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Level
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def named(text: str) -> list[str]:
    findings = diagnose(read_text(text, config=None), RULES).findings
    return [one.name for one in findings if one.level is not Level.INFO]


@pytest.mark.parametrize(
    "denied",
    [
        "GPU 0 was at 1.5 of 97 GiB; no `dmesg` OOM kill; no `CUDA out of memory` in the logs.",
        "It just stops, without a CUDA out of memory error.",
        "This is not a CUDA out of memory: 60 GB are free.",
    ],
)
def test_what_a_text_denies_did_not_happen(denied: str) -> None:
    assert "cuda-oom-training" not in named(denied)
    assert "cuda-oom-training" in named(f"{denied}\n{OOM}\n")


def test_an_error_that_begins_with_no_is_still_one() -> None:
    assert named("RuntimeError: No CUDA GPUs are available\n")[0] == "no-gpu-visible"
    assert named("RuntimeError: CUDA error: no kernel image is available for execution\n")
