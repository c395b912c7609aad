"""Remedies for low precision reach the layers of a running trainer, and can be taken back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import tiny, tiny_rl

from homeostat.config import RunConfig
from homeostat.config.loading.live import LiveConfig, editable_keys
from homeostat.health.finding import Confidence, Family, Finding, Grade, Level
from homeostat.health.remedies import Action, Signs, remedies_for
from homeostat.run.learning.precision import PrecisionSchedule, is_measured, shadow_metrics
from homeostat.run.wiring.remedies import SftActions
from homeostat.train.build import local_trainer
from homeostat.train.runtime import resolve_runtime

LAYERS = 14


class Told:
    """Records events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def __call__(self, kind: str, step: int, **fields: Any) -> None:
        self.events.append((kind, step, fields))


def schedule_of(config: RunConfig) -> tuple[PrecisionSchedule, LiveConfig, Told]:
    live, told = LiveConfig(config), Told()
    trainer = local_trainer(config, resolve_runtime(config))
    return PrecisionSchedule(live, trainer=trainer, emit=told), live, told


def layers_at(schedule: PrecisionSchedule, step: int) -> int:
    return schedule._begin(step).get("layers", 0)


def finding(name: str, *, last_step: int = 20) -> Finding:
    about = (Family.PRECISION, Level.ERROR, Confidence.MEASURED)
    return Finding("QNT007", name, *about, message="", last_step=last_step)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("fp8={recipe: rowwise, start_step: 3}", "fp8"),
        ("int4={group_size: 32, start_step: 3}", "int4"),
    ],
)
def test_a_later_switch_is_in_force_at_once(tmp_path: Path, section: str, key: str) -> None:
    schedule, live, told = schedule_of(tiny.config(tmp_path, f"trainer.{section}"))
    for step in (1, 2, 3, 4):
        schedule.begin(step)
    assert [(kind, step) for kind, step, _ in told.events] == [("precision_switched", 3)]
    assert layers_at(schedule, 4) == LAYERS
    live.edit(f"trainer.{key}.start_step", 6, step=5)
    assert (layers_at(schedule, 5), layers_at(schedule, 6)) == (0, LAYERS)
    live.revert(f"trainer.{key}.start_step")
    assert layers_at(schedule, 5) == LAYERS


def test_more_layers_stay_in_bf16(tmp_path: Path) -> None:
    schedule, live, _ = schedule_of(tiny.config(tmp_path, "trainer.fp8={recipe: rowwise}"))
    assert layers_at(schedule, 1) == LAYERS
    live.edit("trainer.fp8.skip_last", 1, step=2)
    assert layers_at(schedule, 2) == LAYERS // 2
    live.revert("trainer.fp8.skip_last")
    assert layers_at(schedule, 3) == LAYERS


def test_the_last_layers_are_those_of_the_model_not_of_what_the_recipe_left_in_fp8(
    tmp_path: Path,
) -> None:
    skips = "skip_layers: [lm_head, embed, layers.1]"
    schedule, live, _ = schedule_of(tiny.config(tmp_path, f"trainer.fp8={{{skips}}}"))
    assert layers_at(schedule, 1) == LAYERS // 2
    live.edit("trainer.fp8.skip_last", 1, step=2)
    assert layers_at(schedule, 2) == LAYERS // 2


def test_back_to_bf16_and_back_again(tmp_path: Path) -> None:
    # Without FP8 the interval has no effect, which a recipe may not have and an edit may cause.
    settings = ("trainer.fp8={recipe: rowwise}", "observe.precision_interval=2")
    schedule, live, _ = schedule_of(tiny.config(tmp_path, *settings))
    parts = SimpleNamespace(live=live, state=SimpleNamespace(step=4))
    actions = SftActions(parts, None)  # type: ignore[arg-type]
    assert actions.act(Action.BACK_TO_BF16) is not None
    assert layers_at(schedule, 5) == 0
    assert not schedule.is_on(5)
    assert actions.act(Action.BACK_TO_BF16) is None
    assert actions.undo(Action.BACK_TO_BF16, None)
    assert layers_at(schedule, 5) == LAYERS


def test_remedies_change_arithmetic_only_if_all_are_allowed(tmp_path: Path) -> None:
    names = ("collapse-after-switch", "quantised-gradient-off", "fp8-saturation", "fp8-zero-scale")
    found = [remedy for name in names for remedy in remedies_for(finding(name))]
    assert {remedy.grade for remedy in found} == {Grade.UNSAFE}
    first = next(remedies_for(finding("collapse-after-switch")))
    assert first.action is Action.ROLL_BACK
    assert first.edit is not None
    signs = Signs(finding("collapse-after-switch", last_step=20), {})
    assert first.edit.new_value(3, signs) == 30
    assert first.edit.new_value(40, signs) == 80


def test_what_an_engine_would_not_follow_is_not_edited_in_rl(tmp_path: Path) -> None:
    rows = editable_keys(tiny.config(tmp_path, "trainer.fp8={recipe: rowwise}"))
    assert {"trainer.fp8.start_step", "trainer.fp8.skip_last"} <= rows
    assert "trainer.int4.start_step" not in rows
    sampled = tiny_rl.config(tmp_path / "rl", "trainer.fp8={recipe: rowwise}")
    assert not {key for key in editable_keys(sampled) if "fp8" in key}


def test_steps_are_measured_after_the_switch_and_then_regularly(tmp_path: Path) -> None:
    trainer = tiny.config(tmp_path, "trainer.fp8={start_step: 2}").trainer
    steps = [step for step in range(1, 13) if is_measured(trainer, step, interval=5)]
    assert steps == [2, 3, 4, 5, 10]
    assert not is_measured(trainer, 5, interval=None)


def test_the_gap_is_what_the_quantised_rows_cost_more() -> None:
    found = shadow_metrics({"eval/loss": 2.5}, {"eval/loss": 2.0})
    assert found == {"eval/bf16_shadow_loss": 2.0, "eval/quantised_gap": 0.5}
