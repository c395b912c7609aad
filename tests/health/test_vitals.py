"""Vital signs: nothing dead, frozen or hardly understood is called healthy."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.failures.end_lines import End
from homeostat.health.formats.as_json import as_json
from homeostat.health.formats.as_text import as_text
from homeostat.health.readers import open_run, read_text
from homeostat.health.registry import RULES
from homeostat.health.view import Kind, RunView, SampleText, Series
from homeostat.health.vital_signs.ending import ending_of
from homeostat.health.vital_signs.metrics import frozen
from homeostat.health.vital_signs.vitals import vital_signs
from homeostat.observe.progress import Progress
from homeostat.observe.transcript import record_line


def rows(count: int, **columns: str) -> str:
    """Rows as TRL prints them; a column is a Python expression over n."""
    cells = {name: [eval(text, {"n": n}) for n in range(count)] for name, text in columns.items()}
    return "".join(
        "{" + ", ".join(f"'{name}': {values[n]}" for name, values in cells.items()) + "}\n"
        for n in range(count)
    )


RL = {"loss": "0.0", "grad_norm": "0.2 + 0.01 * (n % 7)", "learning_rate": "1e-6",
      "reward": "0.3 + 0.01 * n", "reward_std": "0.4", "kl": "0.001 * n"}  # fmt: skip
SFT = {"loss": "round(2 - 0.03 * n + 0.01 * (n % 3), 4)", "grad_norm": "0.5 + 0.01 * (n % 5)",
       "learning_rate": "1e-5"}  # fmt: skip


def answer(text: str) -> tuple[dict, RunView]:
    view = read_text(text)
    return as_json(diagnose(view, RULES), view), view


def test_an_infinite_reward_with_loss_and_gradient_0_is_ill() -> None:
    found, _ = answer(
        rows(12, **RL | {"reward": "'inf'", "grad_norm": "0.0"}).replace("'inf'", "inf")
    )
    first = found["findings"][0]
    assert (first["name"], first["level"]) == ("vital-sign-not-finite", "error")
    assert first["causes"][0]["name"] == "reward-not-finite"
    assert found["vital_signs"]["not_finite"] == ["reward"]


@pytest.mark.parametrize("rate", ["1e-5", "1e-2"])
def test_sft_that_is_0_from_the_first_step_is_ill_whatever_its_rate(rate: str) -> None:
    zero = {"loss": "0.0", "grad_norm": "0.0", "mean_token_accuracy": "0.0", "learning_rate": rate}
    found, _ = answer(rows(20, **zero))
    first = found["findings"][0]
    assert first["level"] == "error"
    assert "all-labels-masked" in [first["name"], *(c["name"] for c in first["causes"][:2])]


def test_a_log_of_which_little_is_understood_is_not_called_healthy() -> None:
    odd = {"blorp": "1", "zing/zang": "n", "loss": SFT["loss"], "learning_rate": "1e-5"}
    found, view = answer(rows(20, **odd))
    assert (found["verdict"], found["healthy"]) == ("not_known", False)
    text = as_text(diagnose(view, RULES), view)
    assert "NO ILLNESS FOUND" not in text
    assert "Not understood: blorp, zing/zang" in text


@pytest.mark.parametrize("columns", [RL, SFT], ids=["rl", "sft"])
def test_a_healthy_log_is_called_so_with_what_it_was_judged_by(columns: dict[str, str]) -> None:
    found, view = answer(rows(30, **columns))
    assert found["verdict"] == "no_illness", found["findings"]
    assert found["vital_signs"]["understood"] == len(vital_signs(view).understood) >= 3
    assert "Vital signs: " in as_text(diagnose(view, RULES), view)


@pytest.mark.parametrize(
    ("tail", "how"),
    [
        ("", End.OPEN),
        ("Killed\n", End.KILLED),
        ("slurmstepd: error: JOB 9 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***\n", End.KILLED),
        ("{'train_runtime': 12.0, 'train_loss': 1.2, 'epoch': 1.0}\n", End.FINISHED),
    ],
)  # fmt: skip
def test_how_a_run_ended(tail: str, how: End) -> None:
    bar = " 20%|##        | 30/150 [00:30<02:00, 1.0it/s]\n"
    view = read_text(rows(30, **SFT) + bar + tail)
    assert vital_signs(view).ending.how is how
    levels = {f.level.value for f in diagnose(view, RULES).findings}
    assert (levels & {"warn", "error"} != set()) == (how is End.KILLED)


BAR = " 20%|##        | 30/150 [00:30<02:00, 1.0it/s]\r"


@pytest.mark.parametrize(
    ("age_s", "verdict", "words"),
    [
        (30.0, "unfinished", "seconds ago, so the run may still be going on"),
        (9_000.0, "unfinished", "nothing was written for 2 hours"),
    ],
)
def test_a_log_that_ends_in_mid_run_is_never_called_healthy(
    tmp_path: Path, age_s: float, verdict: str, words: str
) -> None:
    file = tmp_path / "train.log"
    file.write_text(rows(30, **SFT) + BAR)
    moment = time.time() - age_s
    os.utime(file, (moment, moment))
    view = open_run(file)
    diagnosis = diagnose(view, RULES)
    found = as_json(diagnosis, view)
    assert (found["verdict"], found["healthy"]) == (verdict, False)
    assert words in found["vital_signs"]["words"]
    assert "did not reach its end" in as_text(diagnosis, view, width=200)
    assert [one["code"] for one in found["findings"]] == ["VIT003"]


def test_metrics_without_any_text_do_not_tell_why_they_end(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(rows(30, **SFT) + BAR)
    view = open_run(file)
    reading = replace(view.facts["reading"], num_lines=0)
    binary = replace(view, facts={**view.facts, "reading": reading, "quiet_s": 9_000.0})
    ending = vital_signs(binary).ending
    assert (ending.how, ending.is_stale) == (End.OPEN, False)
    assert "it holds metrics only" in ending.words


def test_a_pasted_log_that_ends_in_mid_run_may_still_go_on() -> None:
    found, view = answer(rows(30, **SFT) + BAR)
    assert (found["verdict"], found["healthy"]) == ("unfinished", False)
    assert "may still be going on" in found["vital_signs"]["words"]
    assert "quiet_s" not in view.facts


def test_our_own_console_that_ends_in_mid_run_is_unfinished() -> None:
    progress = Progress("tiny", total_steps=32)
    metrics = {"learning_rate": 1e-3, "grad_norm": 0.5}
    lines = [
        record_line(step, {"train/loss": 3.0 - step / 10, **metrics}, progress, now=1.0)
        for step in range(1, 17)
    ]
    found, _ = answer("\n".join(lines) + "\n")
    assert found["verdict"] == "unfinished"
    assert "step 16 of 32" in found["vital_signs"]["words"]


def test_our_own_chat_model_is_not_told_that_its_prompts_lack_a_template() -> None:
    """Rows are logged raw, and the model's path says chat: the template is applied all the same."""
    cut = Series(np.arange(1, 13), np.full(12, 0.9))
    rows_of = [{"type": "prompts", "path": "rows.jsonl"}]
    samples = [SampleText(step, "and so on", prompt=f"What is {step}?") for step in (11, 12, 12)]
    view = RunView(
        metrics={"completions/clipped_ratio": cut, "reward": Series(cut.steps, cut.values * 0.2)},
        kind=Kind.RL,
        settings={"model.path": "acme/Base-7B-Instruct", "data.train": rows_of},
        samples=tuple(samples),
    )
    plain = dataclasses.replace(
        view, settings={**view.settings, "data.train": [{**rows_of[0], "chat": False}]}
    )
    assert "prompt-not-chat-formatted" not in _words(view)
    assert "prompt-not-chat-formatted" in _words(plain)


def _words(view: RunView) -> set[str]:
    found = diagnose(view, RULES).findings
    return {f.name for f in found} | {cause.name for f in found for cause in f.causes}


def test_what_a_tracker_logged_once_more_counts_as_understood() -> None:
    row = '{"step": %d, "loss": 1.%d, "grad_norm": 0.5, "train/grad_norm": 0.5, "train/own": 1.0}'
    view = read_text("\n".join(row % (step, step) for step in range(1, 9)))
    assert vital_signs(view).not_understood == ("train/own",)


def test_a_bar_that_shows_the_newest_evaluation_is_no_frozen_loss() -> None:
    text = ""
    for epoch in range(5):
        for at in range(0, 101, 10):
            loss, val = 2.0 - epoch * 0.3 - at * 0.002, 1.9 - epoch * 0.25
            text += f"\rEpoch {epoch}: {at:3d}%|###  | {at}/100 [00:08<00:00, 12.1it/s, v_num=3, "
            text += f"train_loss={loss:.3f}, val_loss={val:.3f}]"
        text += "\n"
    text += "`Trainer.fit` stopped: `max_epochs=5` reached.\n"
    view = read_text(text)
    assert list(frozen(view)) == []
    losses = view.series("eval/loss")
    assert losses is not None
    assert len(losses) == 5
    assert ending_of(view).how is End.FINISHED
