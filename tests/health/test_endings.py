"""How runs end: a part of bench/doctor_ends.py, and ends that need a folder or a clock."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.failures.end_lines import End
from homeostat.health.finding import Level
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import open_run, read_text
from homeostat.health.registry import RULES
from homeostat.health.vital_signs.ending import ending_of

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    import doctor_ends
    from ends_bodies import BODIES, body
finally:
    sys.path.pop(0)

# Every end once, each with another framework.
COMPOSED = [
    one
    for place, one in enumerate(sorted(doctor_ends.composed(7), key=lambda one: one.end))
    if place % len(BODIES) == 0
]


@pytest.mark.parametrize("one", COMPOSED, ids=lambda one: f"{one.framework}-{one.end}")
def test_an_end_is_named_and_no_illness_is_never_said_over_a_death(
    one: doctor_ends.Composed,
) -> None:
    said = doctor_ends.judged(one)
    assert not said["missed"], said
    assert not said["false_alarm"], said
    assert said["ending_right"], said


def test_there_are_at_least_500_ends_to_judge() -> None:
    every = list(doctor_ends.composed(0))
    assert sum(one.is_ill for one in every) >= 500
    assert len({one.end for one in COMPOSED}) > 40


def test_an_error_file_beside_the_metrics_says_how_the_run_ended(tmp_path: Path) -> None:
    """A batch job writes metrics to one file and its traceback, without any step, to another."""
    made = body("hf", seed=1, steps=30, total=100)
    rows = [line for line in made.lines if "%|" not in line]
    (tmp_path / "slurm-7.out").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "slurm-7.err").write_text(
        "Traceback (most recent call last):\n"
        '  File "/v/site-packages/trl/trainer/a.py", line 3, in step\n'
        "FlurbError: out of flurb\n",
        encoding="utf-8",
    )
    view = open_run(tmp_path)
    assert ending_of(view).how is End.EXCEPTION
    found = as_json(diagnose(view, RULES), view)
    assert found["verdict"] == "not_known"
    assert found["vital_signs"]["exception"]["library"] == "trl"


def _stamped(hours: list[float], *, step: int | None = None) -> list[str]:
    lines = []
    for place, hour in enumerate(hours):
        at = f"{int(hour):02d}:{int(hour * 60) % 60:02d}:00"
        name = step if step is not None else place + 1
        row = (
            f"{{'loss': {2 - place / 50:.4f}, 'grad_norm': 0.4{place % 7}, 'learning_rate': 1e-5}}"
        )
        lines += [f"2026-03-01 {at} INFO step {name} begins", row] if step is None else [
            f"2026-03-01 {at} INFO waiting for the engine"
        ]  # fmt: skip
    return lines


def test_a_log_that_goes_on_for_hours_without_a_step_hangs() -> None:
    steps = _stamped([n / 60 for n in range(20)])
    waits = _stamped([1 + n / 10 for n in range(40)], step=20)
    assert ending_of(read_text("\n".join((*steps, *waits)) + "\n")).how is End.HUNG
    assert ending_of(read_text("\n".join(steps) + "\n")).how is End.UNKNOWN


def test_how_much_could_be_judged_is_said_with_the_settings_that_show_more() -> None:
    made = body("verl", seed=1, steps=40, total=40)
    view = read_text("\n".join((*made.lines, *made.finish)) + "\n")
    signs = as_json(diagnose(view, RULES), view)["vital_signs"]
    assert {"reward", "gradient norm", "entropy"} <= set(signs["logged"])
    assert "engine against trainer" in signs["not_logged"]
    flags = {one["setting"]: one["value"] for one in signs["flags"]}
    assert flags["actor_rollout_ref.rollout.calculate_log_probs"] == "true"
    assert "trainer.test_freq" in flags


def test_a_saved_state_does_not_say_how_its_run_ended(tmp_path: Path) -> None:
    """The state in a checkpoint ends before the last step by its nature, however old it is."""
    file = tmp_path / "trainer_state.json"
    rows = [{"step": step, "loss": 2.0 - step / 100, "epoch": step / 50} for step in range(1, 31)]
    state = {"global_step": 30, "max_steps": 300, "log_history": rows}
    file.write_text(json.dumps(state))
    os.utime(file, (1.7e9, 1.7e9))
    view = open_run(file)
    ending = ending_of(view)
    assert (ending.how, ending.is_stale) == (End.OPEN, False)
    assert "the state that was saved" in ending.words
    assert all(finding.level is Level.INFO for finding in diagnose(view, RULES).findings)


def test_advice_in_case_of_an_error_is_not_how_a_run_ended() -> None:
    advice = (
        "If you get `CUDA error: invalid device function` errors, the above might be the cause.\n"
    )
    assert ending_of(read_text(advice)).how is not End.EXCEPTION
    raised = "RuntimeError: CUDA error: invalid device function. If you get this, rebuild it.\n"
    assert ending_of(read_text(raised)).how is End.EXCEPTION
