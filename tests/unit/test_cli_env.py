"""`homeostat env` on this machine, and the bug-report sheet of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from homeostat.cli.env import env, read_torch
from homeostat.errors import RunDirError
from homeostat.observe.run_dir import RunDir

app = typer.Typer()
app.command()(env)


def invoke(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env=variables, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_text_names_versions_and_gives_a_verdict() -> None:
    text = invoke()
    for part in ("Machine", "Versions", "torch", "transformers", "usable cores", "Verdict"):
        assert part in text


def test_json_is_for_programs() -> None:
    facts = json.loads(invoke("--format", "json"))
    assert facts["versions"]["torch"] == read_torch().version
    assert isinstance(facts["verdicts"], list)
    assert facts["cuda"]["torch"]["cuda_available"] in (True, False)


def test_torch_facts_are_those_of_torch() -> None:
    import torch

    facts = read_torch()
    assert facts.version == torch.__version__
    assert facts.cuda_available == torch.cuda.is_available()
    assert facts.error is None


@pytest.fixture
def failed_run(tmp_path: Path) -> Path:
    with RunDir(tmp_path / "run") as run_dir:
        run_dir.config_json.write_text(
            json.dumps({"name": "sick", "model": {"path": "m"}, "trainer": {"lr": 1e-5}})
        )
        run_dir.append_event(
            "run_started",
            0,
            command="homeostat train a.yaml --api-key geheim123",
            environment={"GPU 0": "NVIDIA H200"},
        )
        run_dir.append_metrics(1, {"train/loss": 2.5})
        run_dir.append_event("oom_retry", 1, tokens_before=8192, tokens_after=4096)
        run_dir.append_event("step_skipped", 2, reason="loss is not finite")
        run_dir.append_event("run_failed", 2, error="TrainingHaltedError", message="halted")
        run_dir.write_traceback("Traceback:\n  hf_abcdefghijklmnop1234\n```\nValueError: it")
        run_dir.console_log.write_text("one\ntwo\nlast console line\n")
    return tmp_path / "run"


def test_the_sheet_has_everything_and_no_secret(failed_run: Path) -> None:
    sheet = invoke("--run", str(failed_run), HF_TOKEN="hf_verysecret99", OMP_NUM_THREADS="3")
    for part in ("`sick`: failed", "## Command", "--api-key <removed>", "## Machine", "NVIDIA H200",
                 "## Versions", "| OMP_NUM_THREADS | 3 |", "| HF_TOKEN | <removed> |",
                 "oom retry tokens_before=8192", "step skipped reason=loss is not finite",
                 "ValueError: it", "last console line", '"lr": 1e-05', "steps | 1 |"):  # fmt: skip
        assert part in sheet, part
    for leak in ("geheim123", "verysecret99", "abcdefghijklmnop1234"):
        assert leak not in sheet
    # The traceback holds a fence of its own: ours is longer.
    assert "````\nTraceback" in sheet
    assert json.loads(invoke("--run", str(failed_run), "--format", "json"))["sheet"].startswith("#")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirError, match="not a run directory"):
            invoke("--run", str(path))
