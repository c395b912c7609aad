"""`import homeostat`: recipes in code, steps, callbacks, and nothing of the process is changed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import runs, tiny, tiny_rl

import homeostat
from homeostat.config import RunConfig
from homeostat.errors import (
    CallbackError,
    ConfigError,
    DataError,
    MissingDependencyError,
    ModelError,
)
from homeostat.observe.jsonl import read_metrics

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A rule that finds something in every run.
ALWAYS = """
from homeostat.plugins import Confidence, Family, Level, Rule, Sighting

def check(view, options):
    yield Sighting(message="always")

RULE = Rule(code="OWN009", name="always", family=Family.DATA, level=Level.WARN,
            confidence=Confidence.MEASURED, check=check, needs=("train/loss",))
"""


def rl(folder: Path, name: str, **sections: Any) -> RunConfig:
    return homeostat.recipe(tiny_rl.recipe(folder, **sections), name=name)


def sft(folder: Path, name: str, **sections: Any) -> RunConfig:
    folder = folder / "sft"
    folder.mkdir(exist_ok=True)
    (folder / "rule.py").write_text(ALWAYS)
    rules = {"rules": [str(folder / "rule.py:RULE")]}
    return homeostat.recipe(tiny.recipe(folder, **sections), name=name, health=rules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[RunConfig, list[Any]]:
    """A run of four steps, and its steps."""
    config = rl(folder, "finished")
    with homeostat.steps(config) as steps:
        taken = list(steps)
        assert steps.result is not None
        assert steps.result.step == 4
    return config, taken


def test_importing_homeostat_is_light_and_lists_its_names() -> None:
    code = (
        "import sys, homeostat\n"
        "assert homeostat.train is sys.modules['homeostat.train'], 'one object'\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(homeostat.__all__) <= set(dir(homeostat))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in homeostat.__all__:
        assert getattr(homeostat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        homeostat.tran  # noqa: B018


def test_a_recipe_is_built_of_sections_a_file_or_another_recipe(tmp_path: Path) -> None:
    raw = tiny.recipe(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(raw))
    built = homeostat.recipe(**raw)
    assert built == homeostat.recipe(file) == homeostat.recipe(raw)
    faster = homeostat.recipe(file, "trainer.lr=0.5", trainer={"max_steps": 3})
    assert (faster.trainer.lr, faster.trainer.max_steps) == (0.5, 3)
    assert faster.trainer.batch_rows == built.trainer.batch_rows
    again = homeostat.recipe(built, "trainer.lr=0.5")
    assert (again.trainer.lr, again.data) == (0.5, built.data)
    assert homeostat.recipe(raw, runs_dir=tmp_path / "elsewhere").run_dir.parent.name == "elsewhere"
    with pytest.raises(ConfigError, match=r"trainer\.lrr.*Did you mean trainer\.lr"):
        homeostat.recipe(raw, trainer={"lrr": 1.0})
    with pytest.raises(ConfigError, match="texts, numbers, lists"):
        homeostat.recipe(raw, trainer={"lr": object()})


def test_steps_have_metrics_and_groups(finished: tuple[RunConfig, list[Any]]) -> None:
    config, taken = finished
    assert [(one.step, one.total_steps) for one in taken] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    records = read_metrics(config.run_dir / "metrics.jsonl")
    for one, record in zip(taken, records, strict=True):
        assert one.metrics["reward"] == record["reward"]
        assert len(one.groups) == 4
        rewards = [reward for group in one.groups for reward in group.rewards]
        assert np.mean(rewards) == pytest.approx(one.metrics["reward"])
        for group in one.groups:
            assert len(group.completions) == len(group.token_ids) == 4
            assert group.columns["first"] in "0123456789"
            assert group.rewards == tuple(one["exact_match"] for one in group.rewards_by_name)
            spread = np.array(group.rewards) - np.mean(group.rewards)
            expected = spread / (np.std(group.rewards, ddof=1) + 1e-4)
            np.testing.assert_allclose(group.advantages, expected, atol=1e-6)


def test_breaking_off_saves_the_step_and_the_same_call_resumes(
    folder: Path, finished: tuple[RunConfig, list[Any]]
) -> None:
    config = rl(folder, "broken_off")
    for one in homeostat.steps(config):
        if one.step == 3:
            break
    assert runs.events(config, "run_stopped")[0]["signal"] == "the caller"
    assert not runs.events(config, "run_failed")
    # Step 3 is saved although a checkpoint is due at every second step only.
    rest = homeostat.steps(config)
    assert [one.step for one in rest] == [4]
    assert rest.result is not None
    assert runs.final_tensors(config) == runs.final_tensors(finished[0])
    assert list(homeostat.steps(config)) == []


def test_an_exception_in_the_loop_is_the_callers_and_loses_nothing(tmp_path: Path) -> None:
    config = sft(tmp_path, "raised")

    def loop() -> None:
        for one in homeostat.steps(config):
            if one.step == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert runs.events(config, "run_stopped")
    assert [one.step for one in homeostat.steps(config)] == [2, 3, 4, 5, 6]


def surroundings() -> list[Any]:
    return [
        [signal.getsignal(number) for number in SIGNALS],
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        (torch.full((1,), 1e-310, dtype=torch.float64) * 1.0).item(),
        dict(os.environ),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        random.getstate(),
    ]


def test_a_run_leaves_the_process_as_it_was(folder: Path, tmp_path: Path) -> None:
    before_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = surroundings()
        for one in homeostat.steps(rl(folder, "as_before")):
            assert surroundings() == before, one.step
        assert surroundings() == before
        # Numbers that the caller draws meanwhile are not taken back.
        drawn = [random.random() for _ in homeostat.steps(sft(tmp_path, "drawing"))]
        assert len(set(drawn)) == 6
        assert surroundings()[:6] == before[:6]
    finally:
        torch.set_num_threads(before_threads)


def test_callbacks_are_told_in_order(folder: Path) -> None:
    told: list[Any] = []
    config = sft(folder, "told", trainer={"max_steps": 4, "batch_rows": 4, "lr": 1e-2})
    result = homeostat.train(
        config,
        on_step=lambda one: told.append(("step", one.step)),
        on_finding=lambda found: told.append(("finding", found["code"])),
        on_checkpoint=lambda step, path: told.append(("checkpoint", step, path.is_dir())),
        on_event=lambda kind, step, fields: told.append((kind, step)),
        on_end=lambda result: told.append(("end", result.step)),
    )
    assert result.checkpoint is not None
    shown = [one for one in told if one[0] in ("step", "checkpoint", "end")]
    assert shown == [
        ("step", 1),
        ("step", 2),
        ("checkpoint", 2, True),
        ("step", 3),
        ("step", 4),
        ("checkpoint", 4, True),
        ("end", 4),
    ]
    assert ("finding", "OWN009") in told[: told.index(("step", 1))]
    assert ("checkpoint_saved", 2) in told
    with pytest.raises(TypeError, match="on_step must be a function"):
        homeostat.train(config, on_step=3)


@pytest.mark.parametrize("name", ["on_step", "on_finding", "on_checkpoint", "on_end"])
def test_an_exception_in_a_callback_is_told_as_the_users_and_loses_nothing(
    folder: Path, name: str
) -> None:
    config = sft(folder, f"bad_{name}", trainer={"max_steps": 4, "batch_rows": 4, "lr": 1e-2})

    def broken(*arguments: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(CallbackError) as caught:
        homeostat.train(config, **{name: broken})
    text = str(caught.value)
    assert f"the callback {name}" in text
    assert "broken" in text
    assert "test_python_api.py" in text
    assert "KeyError: 'mine'" in text
    assert isinstance(caught.value.__cause__, KeyError)
    assert not runs.events(config, "run_failed")
    last = {"on_step": 1, "on_finding": 1, "on_checkpoint": 2, "on_end": 4}[name]
    assert runs.events(config, "checkpoint_saved")[-1]["step"] == last
    assert homeostat.train(config).step == 4


@pytest.mark.parametrize("name", ["on_step", "on_event", "on_checkpoint"])
def test_an_exit_in_a_callback_saves_the_step(folder: Path, name: str) -> None:
    config = sft(folder, f"exit_{name}", trainer={"max_steps": 4, "batch_rows": 4, "lr": 1e-2})
    ends: list[int] = []

    def leave(*arguments: Any) -> None:
        if name != "on_event" or arguments[:2] == ("rules_watching", 1):
            sys.exit(7)

    with pytest.raises(SystemExit) as caught:
        homeostat.train(config, on_end=lambda result: ends.append(result.step), **{name: leave})
    assert caught.value.code == 7
    assert not runs.events(config, "run_failed")
    saved = runs.events(config, "checkpoint_saved")[-1]["step"]
    assert saved == (2 if name == "on_checkpoint" else 1)
    assert ends == [saved]
    assert homeostat.train(config).step == 4


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, although this process may have been started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["on_step", pytest.param("on_event", marks=pytest.mark.slow)])
def test_ctrl_c_saves_the_step_and_is_raised(folder: Path, where: str) -> None:
    """on_step is called with the caller's handlers, on_event in the middle of the run."""
    config = sft(folder, f"ctrl_c_{where}", trainer={"max_steps": 4, "batch_rows": 4, "lr": 1e-2})

    def interrupt(*arguments: Any) -> None:
        if where == "on_step" or arguments[:2] == ("checkpoint_saved", 2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        homeostat.train(config, **{where: interrupt})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert runs.events(config, "run_stopped")
    saved = runs.events(config, "checkpoint_saved")[-1]["step"]
    assert saved == (1 if where == "on_step" else 2)
    assert next(iter(homeostat.steps(config))).step == saved + 1


@pytest.mark.slow
def test_a_run_in_another_thread_needs_no_signals(tmp_path: Path) -> None:
    found: list[Any] = []
    config = sft(tmp_path, "thread")
    thread = threading.Thread(target=lambda: found.append(homeostat.train(config)))
    thread.start()
    thread.join(120)
    assert found[0].step == 6


@pytest.mark.slow
def test_a_complete_run_is_evaluated_as_it_was_while_it_trained(tmp_path: Path) -> None:
    config = sft(
        tmp_path,
        "evaluated",
        data={"validation_share": 0.2},
        eval={"at_start": True, "interval_steps": 2},
    )
    homeostat.train(config)
    records = {one["step"]: one for one in read_metrics(config.run_dir / "metrics.jsonl")}
    assert homeostat.evaluate(config)["eval/loss"] == records[0]["eval/loss"]
    files = sorted(str(path) for path in config.run_dir.rglob("*"))
    last = homeostat.evaluate(config.run_dir, step="latest")
    assert last["eval/loss"] == records[6]["eval/loss"]
    assert homeostat.evaluate(config.run_dir, step=4)["eval/loss"] == records[4]["eval/loss"]
    assert sorted(str(path) for path in config.run_dir.rglob("*")) == files
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        homeostat.evaluate(sft(tmp_path, "none"))


def test_held_out_prompts_of_rl_are_evaluated(folder: Path) -> None:
    raw = tiny_rl.recipe(folder)
    data = {**raw["data"], "validation_share": 0.2}
    config = rl(folder, "rl_evaluated", data=data, eval={"interval_steps": 4})
    homeostat.train(config)
    record = read_metrics(config.run_dir / "metrics.jsonl")[-1]
    found = homeostat.evaluate(config.run_dir)
    assert found["eval/reward"] == record["eval/reward"]
    assert found["eval/completions/mean_length"] == record["eval/completions/mean_length"]


def test_a_trained_model_generates_and_scores(finished: tuple[RunConfig, list[Any]]) -> None:
    before = surroundings()
    model = homeostat.Model(finished[0].run_dir)
    options = {"samples": 2, "max_new_tokens": 5, "seed": 3}
    answers = model.generate(["312>", "54>"], **options)
    assert [len(one) for one in answers] == [2, 2]
    assert homeostat.generate(finished[0].run_dir, "312>", **options) == answers[:1]
    cut = [(p, a) for p, both in zip(["312>", "54>"], answers, strict=True) for a in both]
    cut = [(p, a) for p, a in cut if a.num_tokens == 5 and len(a.text) == 5]
    assert cut, "one that was not ended by a token that is not in its text"
    scores = homeostat.score(model, [p for p, _ in cut], [a.text for _, a in cut])
    for (_, answer), found in zip(cut, scores, strict=True):
        assert len(found.token_logprobs) == 5
        assert found.logprob == pytest.approx(answer.logprob, abs=1e-4)
    assert surroundings() == before


def test_a_text_as_stop_is_one_stop_and_an_empty_prompt_is_not_scored(
    finished: tuple[RunConfig, list[Any]],
) -> None:
    model = homeostat.Model(finished[0].run_dir)
    options = {"samples": 8, "max_new_tokens": 8, "seed": 3}
    stopped = model.generate("312>", stop="0123456789", **options)
    assert stopped == model.generate("312>", **options)
    with pytest.raises(DataError, match="prompt is empty"):
        model.score("", "123")
    with pytest.raises(DataError, match="samples is 0"):
        model.generate("3142>", samples=0)
    with pytest.raises(DataError, match="context is 0"):
        homeostat.Model(finished[0].run_dir, context=0)
    with pytest.raises(ModelError, match="known devices are auto, cpu, cuda"):
        homeostat.Model(finished[0].run_dir, device="gpu")


def test_check_is_a_table_and_diagnose_a_page(
    folder: Path, finished: tuple[RunConfig, list[Any]]
) -> None:
    before = surroundings()
    missing = {"functions": [{"type": "exact_match", "column": "nowhere"}]}
    bad = homeostat.check(rl(folder, "bad", rewards=missing))
    assert surroundings() == before
    assert not bad.ok
    assert "not yet" in str(bad)
    assert any(item.level == "error" and "nowhere" in item.text for item in bad.items)
    report = homeostat.diagnose(finished[0].run_dir)
    assert str(report) == report.text
    assert {one.code for one in report.findings} == {
        one["code"] for one in report.facts["findings"]
    }


def test_a_verb_that_needs_torch_says_so(
    finished: tuple[RunConfig, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from homeostat.api import runs as verbs

    monkeypatch.setattr(verbs, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"train needs .*homeostat\[train\]"):
        homeostat.train(finished[0])
