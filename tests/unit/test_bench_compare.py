"""The performance baseline: what got worse is named, what cannot be compared is never passed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
MACHINE = {"processor": "Some(R) CPU", "cores": 2, "commit": "abc"}
STEP = {
    "ratio": 5.0,
    "homeostat": {"step_s": 2.0, "max_alloc_gb": 20.0, "stages_s": {"generate": 1.0, "train": 0.9}},
}


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import compare

    return compare


class Place:
    """Results and baselines in a folder, and the command over them."""

    def __init__(self, folder: Path, compare: ModuleType) -> None:
        self.results, self.baselines = folder / "results", folder / "baselines"
        self.results.mkdir()
        self.baselines.mkdir()
        self.compare = compare

    def result(self, name: str = "grpo_step_gpu", **changes: Any) -> None:
        text = json.dumps({**MACHINE, "gpu": "Fast GPU 9", **STEP, **changes})
        (self.results / f"{name}.json").write_text(text)

    def run(self, *arguments: str) -> int:
        places = ["--results", str(self.results), "--baselines", str(self.baselines)]
        return self.compare.main([*arguments, *places])


@pytest.fixture
def place(tmp_path: Path, compare: ModuleType) -> Place:
    found = Place(tmp_path, compare)
    found.result()
    assert found.run("--update") == 0
    return found


def test_what_did_not_change_holds(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run() == 0
    assert "WORSE" not in capsys.readouterr().out


def test_a_slower_step_is_named_with_how_much(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.result(homeostat={**STEP["homeostat"], "step_s": 2.5})
    assert place.run() == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "WORSE" in line]
    assert line.startswith("grpo_step_gpu/homeostat/step_s")
    assert "WORSE by 25.0%" in line


def test_a_lower_ratio_is_worse_and_a_higher_one_is_not(place: Place) -> None:
    place.result(ratio=4.0)
    assert place.run() == 1
    place.result(ratio=6.0)
    assert place.run() == 0


def test_the_tolerance_decides(place: Place) -> None:
    place.result(ratio=4.7)
    assert place.run() == 0
    assert place.run("--tolerance", "0.05") == 1
    place.result(ratio=4.0)
    assert place.run("--tolerance", "0.3") == 0


def test_a_missing_number_fails(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.result(ratio=None)
    assert place.run() == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "MISSING" in line]
    assert line.startswith("grpo_step_gpu/ratio")


def test_a_missing_result_fails(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (place.results / "grpo_step_gpu.json").unlink()
    assert place.run() == 1
    assert capsys.readouterr().out.count("MISSING") == 5


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_fails(place: Place, number: float) -> None:
    place.result(ratio=number)
    assert place.run() == 1


def test_hardware_without_a_baseline_is_said(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.result(gpu="Other GPU")
    assert place.run() == 1
    shown = capsys.readouterr().out
    assert "other-gpu\nNO BASELINE for this hardware (known: fast-gpu-9)" in shown
    assert place.run("--hardware", "nothing") == 1


def test_another_hardware_is_not_compared_with(place: Place) -> None:
    place.result("grpo_vs_trl", gpu=None, cpu_ratio=2.0)
    assert place.run("--hardware", "fast-gpu-9") == 0
    assert place.run() == 1
    assert place.run("--update", "--hardware", "some-cpu-2-cores") == 0
    assert place.run() == 0


def test_a_new_metric_is_said_and_holds_nobody_up(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.result("engine_decode", **{"0.5b": {"batch_1": {"tokens_per_s": 900.0}}})
    assert place.run() == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not in the base" in line]
    assert line.startswith("engine_decode/0.5b/batch_1/tokens_per_s")


def test_update_keeps_tolerances_and_says_what_it_drops(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place.baselines / "fast-gpu-9.json"
    baseline = json.loads(file.read_text())
    baseline["metrics"]["grpo_step_gpu/ratio"]["tolerance"] = 0.02
    file.write_text(json.dumps(baseline))
    place.result(ratio=4.0, homeostat={"step_s": 3.0})
    capsys.readouterr()
    assert place.run("--update") == 0
    assert "grpo_step_gpu/homeostat/max_alloc_gb" in capsys.readouterr().out
    metrics = json.loads(file.read_text())["metrics"]
    assert metrics["grpo_step_gpu/ratio"] == {"value": 4.0, "better": "higher", "tolerance": 0.02}
    assert metrics["grpo_step_gpu/homeostat/step_s"]["better"] == "lower"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"metrics": {"grpo_step_gpu/ratio": 5.0}}',
        '{"metrics": {"grpo_step_gpu/ratio": {"value": 0, "better": "higher", "tolerance": 0.1}}}',
        '{"metrics": {"grpo_step_gpu/ratio": {"value": 5, "better": "up", "tolerance": 0.1}}}',
    ],
)
def test_a_damaged_baseline_is_named(
    place: Place, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.baselines / "fast-gpu-9.json").write_text(text)
    assert place.run() == 2
    assert "fast-gpu-9.json" in capsys.readouterr().out


def test_the_committed_baselines_can_be_read(compare: ModuleType) -> None:
    files = sorted(compare.BASELINES_DIR.glob("*.json"))
    assert files
    for file in files:
        assert compare.read_baseline(file), file
