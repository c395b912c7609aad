"""Cases of the keys that say what a run measures, saves and shows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.support.every_key.workshop import (
    EXPORTED,
    Case,
    Run,
    See,
    Workshop,
    all_of,
    alters,
    assert_same,
    base_recipe,
    eval_losses,
    has_file,
    kept_steps,
    refuses,
    shows,
    steps,
)
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.observe.jsonl import iter_jsonl
from homeostat.observe.logs import tail

HELD_OUT = ("data.validation_share=0.25",)
EVERY_STEP = (*HELD_OUT, "eval.interval_steps=1")
# Nothing is learnt, so that the first evaluation stays the best.
STILL = (*EVERY_STEP, "trainer.lr=0.0")
SAVING = ("checkpoint.interval_steps=1", "checkpoint.keep_last=3")
TRACED = ("observe.profiler={steps: [2]}",)
# All keys of the profiler changed at once: each shows in another part of what is written.
TRACED_ELSEWHERE = "observe.profiler={steps: [1,3], folder: profiles, memory: false}"


def eval_steps(run: Run) -> list[int]:
    return run.steps_with("eval/loss")


def best_steps(run: Run) -> list[int]:
    return [event["step"] for event in run.events("new_best")]


def saved_steps(run: Run) -> list[int]:
    return [event["step"] for event in run.events("checkpoint_saved")]


def exported_steps(run: Run) -> list[int]:
    return [step for step in kept_steps(run) if (run.checkpoints.path(step) / "hf").is_dir()]


def num_shards(run: Run) -> int:
    return len(list(run.dir.glob("checkpoints/step_*/hf/model*.safetensors")))


def traced_files(run: Run) -> list[Path]:
    return sorted(run.dir.glob("*/step_*.json"))


def traced_steps(run: Run) -> list[str]:
    return [file.name for file in traced_files(run)]


def traced_folders(run: Run) -> list[str]:
    return sorted({file.parent.name for file in traced_files(run)})


def traces_memory(run: Run) -> bool:
    return any('"[memory]"' in file.read_text() for file in traced_files(run))


def console_style(run: Run) -> str:
    if not run.output:
        return "quiet"
    return "live" if "\u256d" in run.output else "plain"


def row_loss_steps(run: Run) -> list[int]:
    return [record["step"] for record in iter_jsonl(run.dir / "row_losses.jsonl")]


def measured_steps(run: Run) -> list[int]:
    """Return the steps at which quantised layers were measured."""
    records = iter_jsonl(run.dir / "metrics.jsonl")
    return [record["step"] for record in records if "fp8/grad_cosine" in record]


def num_boards(folder: str) -> See:
    return lambda run: len(list((run.dir / folder).glob("events.out.tfevents.*")))


def a_used_folder_is_continued_or_refused(workshop: Workshop) -> None:
    first = workshop.again("name=used")
    longer = workshop.again("name=used", "trainer.max_steps=4")
    assert [event["step"] for event in longer.events("run_resumed")] == [3]
    error = workshop.attempt("name=used", "checkpoint.resume=never").error
    assert error is not None
    assert "checkpoint.resume=never" in str(error)
    assert first.dir == longer.dir


def a_chosen_checkpoint_is_loaded(workshop: Workshop) -> None:
    first = workshop.again("name=stepped", *SAVING)
    before = first.weights()
    again = workshop.again("name=stepped", *SAVING, "checkpoint.load_step=1")
    assert [event["step"] for event in again.events("run_resumed")] == [1]
    assert saved_steps(again) == [1, 2, 3, 2, 3]
    assert all((before[name] == tensor).all() for name, tensor in again.weights().items())


def logged_levels(workshop: Workshop, level: str) -> set[str]:
    """Levels in console.log of a run by the command line, as a user starts it."""
    file = workshop.folder / f"{level}.yaml"
    raw = base_recipe(workshop.folder, name=f"log_{level}")
    raw["runs_dir"] = str(workshop.folder / "runs")
    raw["data"]["train"][0]["path"] = str(workshop.folder / "rows.jsonl")
    raw["observe"]["log_level"] = level
    file.write_text(json.dumps(raw))
    result = CliRunner().invoke(app, ["train", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    lines = tail(Path(raw["runs_dir"]) / raw["name"] / "console.log", 1000)
    return {line.split()[2] for line in lines if "homeostat.progress" not in line}


def the_log_shows_what_its_level_says(workshop: Workshop) -> None:
    assert "INFO" in logged_levels(workshop, "info")
    assert not logged_levels(workshop, "error") & {"INFO", "DEBUG"}


WANDB = "observe.sinks=[{type: wandb, mode: offline}]"


def wandb_holds(run: Run, word: str) -> bool:
    """W&B's service writes its file a moment after the run was closed."""
    deadline = time.monotonic() + 20
    while True:
        data = b"".join(file.read_bytes() for file in run.dir.glob("wandb/offline-run-*/*.wandb"))
        if b"train/loss" in data:
            return word.encode() in data
        assert time.monotonic() < deadline, f"nothing was written in {run.dir}/wandb"
        time.sleep(0.05)


# Key -> what it is set to: all in one run, since each value is found by itself.
WANDB_NAMES = {
    "project": "some-project",
    "entity": "some-team",
    "name": "shown-name",
    "run_id": "chosen42",
}
NAMED = ", ".join(f"{key}: {value}" for key, value in WANDB_NAMES.items())
WANDB_NAMED = f"observe.sinks=[{{type: wandb, mode: offline, {NAMED}}}]"


def wandb_takes(key: str) -> Case:
    def case(workshop: Workshop) -> None:
        plain, named = workshop.run(WANDB), workshop.run(WANDB_NAMED)
        assert [wandb_holds(run, WANDB_NAMES[key]) for run in (plain, named)] == [False, True]
        assert_same(plain, named)

    return case


def wandb_run_id_names_the_files(workshop: Workshop) -> None:
    wandb_takes("run_id")(workshop)
    run = workshop.run(WANDB_NAMED)
    assert list(run.dir.glob("wandb/offline-run-*-chosen42/run-chosen42.wandb"))


def wandb_online_needs_an_account(workshop: Workshop) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "")
        patch.setenv("NETRC", str(workshop.folder / "none"))
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        patch.setenv("WANDB_INIT_TIMEOUT", "5")
        refuses("observe.sinks.0.mode=online", "W&B did not start", base=(WANDB,))(workshop)


def trackio_runs(project: str) -> list[str]:
    from trackio import Api

    return [run.name for run in Api().runs(project)]


def trackio_project_and_name(workshop: Workshop) -> None:
    sink = "observe.sinks=[{{type: trackio, project: {}}}]"
    project = workshop.fresh_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(workshop.folder / "trackio"))
        first = workshop.run(sink.format(project))
        workshop.run(sink.format(project), "observe.sinks.0.name=shown")
        other = workshop.run(sink.format(project + "-2"))
        assert sorted(trackio_runs(project)) == sorted([first.config.name, "shown"])
        assert trackio_runs(project + "-2") == [other.config.name]
    for run in (first, other):
        assert_same(workshop.run(), run)


CASES: dict[str, Case] = {
    "eval.interval_steps": shows(
        "eval.interval_steps=1", eval_steps, was=[3], now=[1, 2, 3], base=HELD_OUT, same="bits"
    ),
    "eval.at_start": shows(
        "eval.at_start=true", eval_steps, was=[3], now=[0, 3], base=HELD_OUT, same="bits"
    ),
    "eval.max_rows": alters("eval.max_rows=2", eval_losses, base=HELD_OUT, same="bits"),
    "eval.patience": shows("eval.patience=1", steps, was=[1, 2, 3], now=[1, 2], base=STILL),
    "eval.min_delta": shows(
        "eval.min_delta=100.0", best_steps, was=[1, 2, 3], now=[1], base=EVERY_STEP, same="bits"
    ),
    "eval.keep_best": shows(
        "eval.keep_best=false", kept_steps, was=[1, 3], now=[3], same="bits",
        base=(*STILL, "checkpoint.keep_last=1"),
    ),
    "checkpoint.interval_steps": shows(
        "checkpoint.interval_steps=2", saved_steps, was=[3], now=[2, 3], same="bits"
    ),
    "checkpoint.keep_last": shows(
        "checkpoint.keep_last=1", kept_steps, was=[2, 3], now=[3], same="bits",
        base=("checkpoint.interval_steps=1",),
    ),
    "checkpoint.max_bytes": shows(
        "checkpoint.max_bytes=1KB", kept_steps, was=[1, 2, 3], now=[3], base=SAVING, same="bits"
    ),
    "checkpoint.resume": a_used_folder_is_continued_or_refused,
    "checkpoint.load_step": a_chosen_checkpoint_is_loaded,
    "checkpoint.export": all_of(
        shows("checkpoint.export=final", exported_steps, was=[], now=[3], base=SAVING, same="bits"),
        shows("checkpoint.export=every", exported_steps, was=[], now=[1, 2, 3], base=SAVING),
    ),
    "checkpoint.max_shard_bytes": shows(
        "checkpoint.max_shard_bytes=60KB", lambda run: num_shards(run) > 1,
        was=False, now=True, base=EXPORTED, same="bits",
    ),
    "observe.log_interval": shows(
        "observe.log_interval=2", steps, was=[1, 2, 3], now=[2, 3], same="bits"
    ),
    "observe.log_level": the_log_shows_what_its_level_says,
    "observe.console": all_of(
        shows("observe.console=plain", console_style, was="quiet", now="plain", same="bits"),
        shows("observe.console=live", console_style, was="quiet", now="live", same="bits"),
        # Not a terminal.
        shows("observe.console=auto", console_style, was="quiet", now="plain"),
    ),
    "observe.sinks[].type (tensorboard)": shows(
        "observe.sinks=[{type: tensorboard}]", num_boards("tensorboard"), was=0, now=1, same="bits"
    ),
    "observe.sinks[].folder (tensorboard)": shows(
        "observe.sinks.0.folder=boards", num_boards("boards"), was=0, now=1,
        base=("observe.sinks=[{type: tensorboard}]",),
    ),
    "observe.sinks[].type (wandb)": shows(
        WANDB, lambda run: (run.dir / "wandb").is_dir(), was=False, now=True, same="bits"
    ),
    "observe.sinks[].project (wandb)": wandb_takes("project"),
    "observe.sinks[].entity (wandb)": wandb_takes("entity"),
    "observe.sinks[].name (wandb)": wandb_takes("name"),
    "observe.sinks[].run_id (wandb)": wandb_run_id_names_the_files,
    "observe.sinks[].mode (wandb)": wandb_online_needs_an_account,
    "observe.sinks[].type (trackio)": trackio_project_and_name,
    "observe.sinks[].project (trackio)": trackio_project_and_name,
    "observe.sinks[].name (trackio)": trackio_project_and_name,
    "observe.profiler.steps": shows(
        TRACED_ELSEWHERE, traced_steps, was=["step_00000002.json"],
        now=["step_00000001.json", "step_00000003.json"], base=TRACED, same="bits",
    ),
    "observe.profiler.folder": all_of(
        shows(TRACED_ELSEWHERE, traced_folders, was=["trace"], now=["profiles"], base=TRACED),
        refuses("observe.profiler.folder=../away", "outside the run directory", base=TRACED),
    ),
    "observe.profiler.memory": shows(
        TRACED_ELSEWHERE, traces_memory, was=True, now=False, base=TRACED
    ),
    "observe.timeline": shows(
        "observe.timeline=false", has_file("trace/timeline.json"), was=True, now=False, same="bits"
    ),
    "observe.row_losses": shows(
        "observe.row_losses=false", row_loss_steps, was=[1, 2, 3], now=[], same="bits"
    ),
    "observe.precision_interval": shows(
        "observe.precision_interval=null", measured_steps, was=[1, 2, 3], now=[], same="bits",
        base=("trainer.fp8={recipe: rowwise}",),
    ),
    "observe.report": shows(
        "observe.report=true", has_file("report.html"), was=False, now=True, same="bits"
    ),
}  # fmt: skip
