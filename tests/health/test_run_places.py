"""Which runs a path stands for: in the doctor, in a watch and in the dashboard alike."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from tests.support.run_folders import write_run

from homeostat.cli.doctor import doctor
from homeostat.cli.health_options import ReportFormat
from homeostat.dashboard.shelf import Shelf
from homeostat.errors import DataError
from homeostat.health.readers import open_run, runs_at
from homeostat.health.view import Kind
from homeostat.integrations.watching import followed_path

LOSSES = [3.0 - n / 30 for n in range(60)]
SFT = {"algorithm": {"type": "sft"}}
ROWS = "".join(f"{{'loss': {2 - n / 100}, 'grad_norm': 1.0}}\n" for n in range(60))


def write_examples(file: Path, count: int = 64) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_sft(folder: Path, *, age_s: float = 0.0) -> Path:
    write_run(folder, {"train/loss": LOSSES}, settings=SFT)
    os.utime(folder, (1.7e9 - age_s, 1.7e9 - age_s))
    return folder


def write_foreign(folder: Path, name: str = "train.log") -> Path:
    folder.mkdir(parents=True)
    (folder / name).write_text(ROWS)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project's folder: training data, a recipe, and one run of ours further down."""
    write_examples(tmp_path / "eval.jsonl")
    write_examples(tmp_path / "data" / "more.jsonl")
    (tmp_path / "recipe.yaml").write_text("name: run\n")
    write_sft(tmp_path / "runs" / "run")
    return tmp_path


def places(path: Path) -> list[Path]:
    return [run.path for run in runs_at(path)]


def test_the_one_run_of_a_project_is_its_run_everywhere(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project / "runs" / "run"
    for path in (project, project / "runs", run):
        assert places(path) == [run]
        view = open_run(path)
        assert (view.kind, view.last_step, view.total_steps) == (Kind.SFT, 60, 60)
        assert followed_path(path, config=None)[0].path == run
        assert [one.place.path for one in Shelf([path]).runs()] == [run]
    with pytest.raises(typer.Exit) as end:
        doctor([str(project)], format=ReportFormat.JSON)
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert f"the run that it holds is {run}." in said.err
    assert end.value.exit_code == 0
    assert [Path(file).parent for file in answer["files"]] == [run] * 3


def test_several_runs_of_a_project_are_told_apart_newest_first(project: Path) -> None:
    older = write_sft(project / "runs" / "older", age_s=500)
    deeper = write_sft(project / "runs" / "sweep" / "lr" / "deep", age_s=900)
    assert places(project) == [project / "runs" / "run", older, deeper]
    assert [one.place.path for one in Shelf([project]).runs()] == places(project)
    assert followed_path(project, config=None)[0].path == project / "runs" / "run"


def test_a_run_is_listed_once_whatever_links_to_it(project: Path) -> None:
    (project / "latest").symlink_to(project / "runs" / "run")
    (project / "runs" / "all").symlink_to(project)
    (project / "loop").symlink_to(project / "loop")
    assert places(project) == [project / "runs" / "run"]


def test_runs_behind_a_link_are_found(tmp_path: Path) -> None:
    write_sft(tmp_path / "disk" / "run")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "runs").symlink_to(tmp_path / "disk")
    assert places(tmp_path / "project") == [tmp_path / "project" / "runs" / "run"]


def test_the_search_is_bounded_and_enters_no_checkpoints_or_hidden_folders(tmp_path: Path) -> None:
    write_foreign(tmp_path / "theirs")
    for folder in ("a/b/c/d/run", ".cache/run", "theirs/checkpoint-10/run", "x/node_modules/run"):
        write_sft(tmp_path / folder)
    assert places(tmp_path) == [tmp_path]


def test_logs_and_tables_of_a_project_are_passed_over_beside_its_run(project: Path) -> None:
    (project / "slurm-7.out").write_text(ROWS)
    (project / "results").mkdir()
    (project / "results" / "scores.csv").write_text("name,accuracy\na,0.5\nb,0.25\n")
    assert places(project) == [project / "runs" / "run"]
    (note,) = open_run(project).facts["reading"].notes
    assert "results/, slurm-7.out: skipped" in note


def test_a_trainers_folder_beside_our_run_is_a_run_of_its_own(project: Path) -> None:
    state = {"log_history": [{"step": n, "loss": 2.0 - n / 40} for n in range(1, 41)]}
    write_foreign(project / "trl_out")
    (project / "trl_out" / "trainer_state.json").write_text(json.dumps(state))
    assert sorted(places(project)) == [project / "runs" / "run", project / "trl_out"]


def test_runs_of_others_in_a_folder_of_runs_stay_runs(tmp_path: Path) -> None:
    ours = write_sft(tmp_path / "ours")
    theirs = write_foreign(tmp_path / "theirs")
    assert sorted(places(tmp_path)) == [ours, theirs]


def test_a_trainers_folder_is_never_joined_with_a_run_of_ours_in_it(tmp_path: Path) -> None:
    state = {"log_history": [{"step": n, "loss": 2.0 - n / 40} for n in range(1, 41)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    run = write_sft(tmp_path / "runs" / "run")
    assert sorted(places(tmp_path)) == [tmp_path, run]
    joined = open_run(next(place for place in runs_at(tmp_path) if place.path == tmp_path))
    assert joined.last_step == 40
    assert joined.facts["joined"] == ("trainer_state.json",)


def test_a_watch_that_begins_before_the_run_finds_it(tmp_path: Path) -> None:
    write_examples(tmp_path / "eval.jsonl")
    _, followed = followed_path(tmp_path, config=None)
    with pytest.raises(DataError):
        followed.view()
    write_sft(tmp_path / "runs" / "run")
    assert followed.view().last_step == 60


def test_training_data_beside_a_log_of_another_framework_is_passed_over(tmp_path: Path) -> None:
    write_foreign(tmp_path / "theirs")
    for name in ("eval.jsonl", "train.jsonl", "sub/set.csv"):
        write_examples(tmp_path / "theirs" / name)
    (tmp_path / "theirs" / "sub" / "set.csv").write_text("question,answer\nwhat is 1 + 1?,2\n")
    view = open_run(tmp_path / "theirs")
    assert view.facts["joined"] == ("train.log",)
    assert (view.kind, view.last_step) == (Kind.SFT, 60)
    (note,) = view.facts["reading"].notes
    assert "training data: eval.jsonl (prompt, completion), sub/set.csv (question, answer)" in note
    assert "train.jsonl (prompt, completion)" in note


def test_training_data_makes_no_folder_a_run(tmp_path: Path) -> None:
    write_examples(tmp_path / "eval.jsonl")
    first, second = (write_foreign(tmp_path / name) for name in ("a", "b"))
    write_examples(tmp_path / "sets" / "x.jsonl")
    assert sorted(places(tmp_path)) == [first, second]


def test_a_folder_of_training_data_alone_says_so(tmp_path: Path) -> None:
    write_examples(tmp_path / "eval.jsonl")
    with pytest.raises(DataError, match=r"no metrics or logs(.|\n)*training data: eval\.jsonl"):
        open_run(tmp_path)


def test_training_data_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="columns prompt, completion"):
        followed_path(write_examples(tmp_path / "eval.jsonl"), config=None)
