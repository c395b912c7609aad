"""Folders: a log among very many files, several runs side by side, and what is no log at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from homeostat.cli.doctor import doctor
from homeostat.cli.health_options import ReportFormat
from homeostat.errors import DataError
from homeostat.health.readers import open_run, read_text, runs_in
from homeostat.observe.progress import Progress
from homeostat.observe.transcript import record_line

ROWS = [str({"loss": 2.0 - n / 10, "grad_norm": 1.0, "epoch": n / 10}) for n in range(1, 9)]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.42 GiB."


def write_run(folder: Path, *extra: str, age_s: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.log").write_text("\n".join([*ROWS, *extra]) + "\n")
    moment = 1.7e9 - age_s
    os.utime(folder, (moment, moment))
    return folder


def test_a_log_among_many_files_is_found(tmp_path: Path) -> None:
    shards = tmp_path / "a_shards"
    shards.mkdir()
    for number in range(6_000):
        (shards / f"{number:05d}.bin").touch()
    (tmp_path / "zz").mkdir()
    (tmp_path / "zz" / "slurm-12.out").write_text("\n".join(ROWS) + "\n")
    assert len(open_run(tmp_path).metrics["train/loss"]) == 8


def test_files_beyond_the_most_that_are_read_are_named(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"rank_{number:02d}.log").write_text("hello\n")
    notes = " ".join(open_run(tmp_path).facts["reading"].notes)
    assert "60 files look like logs" in notes


def test_runs_side_by_side_are_never_joined(tmp_path: Path) -> None:
    old = write_run(tmp_path / "runs" / "old", OOM, age_s=1_000)
    new = write_run(tmp_path / "runs" / "new")
    assert [run.path for run in runs_in(tmp_path / "runs")] == [new, old]
    assert not open_run(tmp_path / "runs").log.has("CUDA out of memory")
    assert runs_in(new) == []


def write_log(file: Path, *extra: str, age_s: float = 0.0) -> Path:
    file.write_text("\n".join([*ROWS, *extra]) + "\n")
    moment = 1.7e9 - age_s
    os.utime(file, (moment, moment))
    return file


def names_of(folder: Path) -> list[list[str]]:
    return [[file.name for file in run.files] or [run.path.name] for run in runs_in(folder)]


@pytest.mark.parametrize(
    "names",
    [
        ["rank0.log", "rank1.log"],
        ["run_rank_0.log", "run_rank_1.log"],
        ["train.log", "train.log.1", "train.log.2"],
        ["train.log", "train.log.2026-11-15"],
        ["slurm-7.err", "slurm-7.out"],
        ["stdout.log", "stderr.log"],
        ["stdout", "stderr"],
        ["inference.log", "orchestrator.log", "trainer.log"],
        ["sft.log", "sft_vllm.log"],
        ["raylet.out", "worker-0a1b-01000000-12.out", "worker-ff12-01000000-13.out"],
        ["run1.log", "run2.log", "metrics.jsonl"],
    ],
)
def test_logs_of_one_run_are_taken_as_one(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write_log(tmp_path / name)
    assert runs_in(tmp_path) == []
    assert sorted(open_run(tmp_path).facts["joined"]) == sorted(names)


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["run1.log", "run2.log"], [["run1.log"], ["run2.log"]]),
        (["sft.log", "dpo.log"], [["sft.log"], ["dpo.log"]]),
        (["train_1.log", "train_2.log"], [["train_1.log"], ["train_2.log"]]),
        (
            ["slurm-7.out", "slurm-7.err", "slurm-8.out"],
            [["slurm-7.err", "slurm-7.out"], ["slurm-8.out"]],
        ),
        (
            ["a_rank0.log", "a_rank1.log", "b.log", "b.log.1"],
            [["a_rank0.log", "a_rank1.log"], ["b.log", "b.log.1"]],
        ),
    ],
)
def test_loose_logs_of_several_runs_are_never_joined(
    tmp_path: Path, names: list[str], runs: list[list[str]]
) -> None:
    for age, name in enumerate(names):
        write_log(tmp_path / name, age_s=age * 100.0)
    assert names_of(tmp_path) == runs


def test_run_folders_beside_loose_logs_are_runs_of_their_own(tmp_path: Path) -> None:
    write_log(tmp_path / "run1.log", age_s=10)
    write_log(tmp_path / "run2.log", age_s=20)
    write_run(tmp_path / "run3", age_s=30)
    assert names_of(tmp_path) == [["run1.log"], ["run2.log"], ["run3"]]


def test_loose_logs_are_reported_one_by_one_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "run1.log")
    write_log(tmp_path / "run2.out", age_s=100)
    write_log(tmp_path / "run2.err", OOM, age_s=100)
    with pytest.raises(typer.Exit) as end:
        doctor([str(tmp_path)], format=ReportFormat.JSON)
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert end.value.exit_code == 1
    assert (first["verdict"], second["verdict"]) != ("ill", "ill")
    assert second["findings"][0]["family"] == "memory"
    assert [Path(file).name for file in second["files"]] == ["run2.err", "run2.out"]
    with pytest.raises(typer.Exit):
        doctor([str(tmp_path)])
    text = capsys.readouterr().out
    assert f"=== {tmp_path / 'run1.log'} ===" in text
    assert f"=== {tmp_path / 'run2.err'}, run2.out ===" in text
    assert f"{tmp_path / 'run1.log'}: " in text.partition("2 runs, newest first")[2]
    assert "2 files, taken as one run: run2.err, run2.out." in text


def test_a_rotated_log_is_one_text_with_the_oldest_part_first(tmp_path: Path) -> None:
    lines = [str({"step": n, "loss": 3.0 - n / 10, "grad_norm": 1.0}) for n in range(1, 25)]
    for name, part in (("x.log.2", lines[:8]), ("x.log.1", lines[8:16]), ("x.log", lines[16:])):
        (tmp_path / name).write_text("\n".join(part) + "\n")
    view = open_run(tmp_path)
    assert view.metrics["train/loss"].steps.tolist() == list(range(1, 25))
    assert view.facts["joined"] == ("x.log.2", "x.log.1", "x.log")


def test_what_was_passed_over_in_a_folder_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "train.log")
    os.mkfifo(tmp_path / "rank1.log")
    with pytest.raises(typer.Exit):
        doctor([str(tmp_path)])
    assert "rank1.log: is not a regular file and was skipped." in capsys.readouterr().err


def test_checkpoints_of_one_run_are_not_runs(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(
            json.dumps({"log_history": [{"step": step, "loss": 1.0}], "max_steps": 30})
        )
    assert runs_in(tmp_path) == []


def test_a_folder_of_runs_is_reported_run_by_run_with_the_worst_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "ill", OOM, age_s=1_000)
    write_run(tmp_path / "well")
    with pytest.raises(typer.Exit) as end:
        doctor([str(tmp_path)], format=ReportFormat.JSON)
    answers = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(one["path"]).name for one in answers] == ["well", "ill"]
    assert end.value.exit_code == 1
    with pytest.raises(typer.Exit):
        doctor([str(tmp_path)])
    text = capsys.readouterr().out
    assert text.index(f"=== {tmp_path / 'well'} ===") < text.index(f"=== {tmp_path / 'ill'} ===")


def test_a_recipe_is_no_log_and_says_what_to_use(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\nmodel:\n  path: m\ndata:\n  train: []\ntrainer:\n  lr: 1e-6\n")
    with pytest.raises(DataError, match="homeostat check"):
        open_run(recipe)
    recipe.write_text("learning_rate: 1.0e-6\nnum_train_epochs: 3\n")
    with pytest.raises(DataError, match="--config"):
        open_run(recipe)


@pytest.mark.parametrize("before", ["", "2026-11-16 06:20:51,051 INFO    homeostat.progress: "])
def test_our_own_console_is_read(before: str) -> None:
    progress = Progress("tiny", total_steps=32)
    lines = ["tiny: 2 layers, 32 steps"]
    for step in range(1, 17):
        metrics = {
            "train/loss": 3.0 - step / 10, "learning_rate": 1e-3, "grad_norm": 0.5 + step,
            "throughput/tokens_per_s": 1440.0, "memory/max_alloc": 5e8,
        }  # fmt: skip
        lines.append(before + record_line(step, metrics, progress, now=1.0))
    view = read_text("\n".join(lines) + "\n")
    assert view.framework.name == "homeostat"
    assert view.total_steps == 32
    assert view.metrics["train/loss"].steps.tolist() == list(range(1, 17))
    assert view.metrics["train/loss"].values[-1] == pytest.approx(1.4)
    assert view.metrics["grad_norm"].values[2] == pytest.approx(3.5)


def test_our_own_console_of_rl_is_read() -> None:
    metrics = {
        "reward": 0.375, "reward_std": 0.33, "completions/mean_length": 6.469, "entropy": 0.432,
        "completions/clipped_ratio": 0.12, "clip_ratio/region_mean": 0.0, "kl": 1.5e-3,
        "time/generate": 0.1, "time/train": 0.4, "eval/reward": 0.5,
    }  # fmt: skip
    lines = [
        record_line(n, metrics, Progress("tiny", total_steps=24), now=1.0) for n in range(1, 9)
    ]
    view = read_text("\n".join(lines) + "\n")
    for name in ("reward", "reward_std", "completions/clipped_ratio", "entropy", "kl"):
        assert view.metrics[name].values[0] == pytest.approx(metrics[name]), name
    assert view.metrics["eval/reward"].values[0] == 0.5


def test_prefixes_of_trackers_are_stripped_and_evaluation_stays_apart() -> None:
    names = (
        "loss", "completions/clipped_ratio", "completions/mean_length", "reward", "reward_std",
        "kl", "rewards/accuracy/mean", "frac_reward_zero_std", "clip_ratio/region_mean",
        "num_tokens",
    )  # fmt: skip
    rows = [
        json.dumps({"step": n} | {f"train/{name}": 0.1 for name in names} | {"eval/loss": 0.9})
        for n in range(1, 20)
    ]
    view = read_text("\n".join(rows) + "\n")
    for name in ("completions/clipped_ratio", "reward", "kl", "rewards/accuracy/mean"):
        assert view.metrics[name].values[0] == 0.1, name
    assert view.metrics["eval/loss"].values[0] == 0.9
    assert view.facts["reading"].unknown_metrics == ()
    assert view.framework.name == "trl"


def test_rows_that_come_in_blocks_after_the_bar_are_not_beyond_the_last_step() -> None:
    bars = "".join(f"\r {n * 100 // 150}%|#| {n}/150 [00:21<04:28]" for n in range(1, 151))
    rows = [str({"loss": 2.0, "grad_norm": 1.0, "epoch": n / 15}) for n in range(1, 16)]
    view = read_text(bars + "\n" + "\n".join(rows) + "\n")
    assert view.metrics["train/loss"].steps.tolist() == list(range(10, 151, 10))
    assert view.last_step == view.total_steps == 150
