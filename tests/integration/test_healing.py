"""Runs that are watched: findings are written down, remedies are tried, judged and taken back."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.support import runs, tiny, tiny_rl
from tests.support.own_process import shared_engine_process

from homeostat.config import RunConfig
from homeostat.errors import (
    ConfigError,
    DiskFullError,
    NodeLostError,
    NonFiniteHaltError,
    NotServedError,
    PolicyNotFiniteError,
    TrainingHaltedError,
)
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.result import RunResult
from homeostat.run.session.session import open_session
from homeostat.run.wiring.hooks import Hooks
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import Role

# Rules with limits that every run breaks, so that what follows a finding can be seen.
RATIO = "health.options={POL009: {limit: 0.5}}"
NEVER_ZERO_STD = "health.options={RWD001: {max_share: -1.0, fire: 1, window: 1}}"


# Nothing but the learning rate is left to change then.
ONE = "trainer.updates_per_step=1"


def train(config: RunConfig, hooks: Hooks) -> RunResult:
    console = Console(file=io.StringIO())
    with open_session(
        config, recipe="", command=["train"], console=console, log_level="error"
    ) as session:
        return train_recipe(config, session, hooks)


def findings(config: RunConfig) -> list[dict[str, Any]]:
    return list(iter_jsonl(config.run_dir / "findings.jsonl"))


def told(config: RunConfig) -> list[tuple[str, int, str]]:
    return [(line["state"], line["step"], line["code"]) for line in findings(config)]


def rates(config: RunConfig) -> dict[int, float]:
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return {record["step"]: record["learning_rate"] for record in records}


def constant_lr(folder: Path, *overrides: str) -> RunConfig:
    """One that updates at every step, whatever the rewards."""
    steady = ("trainer.schedule={type: constant, warmup_steps: 0}", "algorithm.entropy_bonus=1e-3")
    return tiny_rl.config(folder, *steady, *overrides)


def test_a_healthy_run_is_the_same_whether_it_is_healed_or_not(tmp_path: Path) -> None:
    for heal in ("off", "safe", "all"):
        runs.train(tiny_rl.config(tmp_path, f"name={heal}", f"health.heal={heal}"))
    configs = [tiny_rl.config(tmp_path, f"name={heal}") for heal in ("off", "safe", "all")]
    assert len({tuple(runs.losses(config)) for config in configs}) == 1
    assert len({json.dumps(sorted(map(str, runs.final_tensors(c).items()))) for c in configs}) == 1
    for config in configs:
        assert runs.events(config, "rule_failed") == []
        assert runs.events(config, "remedy_applied") == []
        assert read_metrics(config.run_dir / "metrics.jsonl")[-1]["time/health"] > 0


def test_findings_are_written_down_and_survive_a_resume(tmp_path: Path) -> None:
    whole = tiny_rl.config(tmp_path, NEVER_ZERO_STD, "name=whole", "trainer.max_steps=6")
    runs.train(whole)
    assert told(whole)[0] == ("open", 1, "RWD001")
    cut = tiny_rl.config(tmp_path, NEVER_ZERO_STD, "name=cut", "trainer.max_steps=6")

    class Stop(Hooks):
        def before_step(self, step: int, parts: Any) -> None:
            if step == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(cut, Stop())
    runs.train(cut)
    assert told(cut) == told(whole)
    assert runs.losses(cut) == runs.losses(whole)
    assert {"code", "name", "family", "level", "confidence", "first_step", "message", "evidence",
            "causes", "fixes", "state", "step"} <= findings(cut)[0].keys()  # fmt: skip


def test_a_remedy_that_does_not_help_is_taken_back(tmp_path: Path) -> None:
    # With one update the ratio is 1 at any learning rate.
    still = (ONE, "trainer.max_steps=18")
    config = constant_lr(tmp_path, RATIO, "health.heal=all", *still)
    runs.train(config)
    (applied,) = runs.events(config, "remedy_applied")
    facts = {name: applied[name] for name in ("path", "old", "new", "grade", "code", "cause")}
    assert facts == {
        "path": "trainer.lr",
        "old": 1e-2,
        "new": 5e-3,
        "grade": "unsafe",
        "code": "POL009",
        "cause": "ppo-ratio-exceeds-threshold",
    }
    first, last = applied["step"], applied["step"] + applied["window"] - 1
    assert [rates(config)[step] for step in (first - 1, first, last, last + 1)] == pytest.approx(
        [1e-2, 5e-3, 5e-3, 1e-2]
    )
    (judged,) = runs.events(config, "remedy_judged")
    assert judged["helped"] is False
    (reverted,) = runs.events(config, "remedy_reverted")
    assert (reverted["step"], reverted["new"]) == (last + 1, 1e-2)


@pytest.mark.slow
def test_an_edit_goes_on_after_a_resume_and_is_dropped_when_healing_is_off(tmp_path: Path) -> None:
    config = constant_lr(tmp_path, RATIO, ONE, "health.heal=all", "trainer.max_steps=6")
    runs.train(config)
    assert rates(config)[6] == pytest.approx(5e-3)
    assert len(runs.events(config, "remedy_applied")) == 1
    runs.train(constant_lr(tmp_path, RATIO, ONE, "health.heal=all", "trainer.max_steps=8"))
    assert rates(config)[8] == pytest.approx(5e-3)
    assert len(runs.events(config, "remedy_applied")) == 1
    runs.train(constant_lr(tmp_path, RATIO, ONE, "health.heal=off", "trainer.max_steps=10"))
    assert rates(config)[10] == pytest.approx(1e-2)
    (reverted,) = runs.events(config, "remedy_reverted")
    assert (reverted["path"], reverted["why"]) == ("trainer.lr", "health.heal=off")


def test_nothing_unsafe_is_done_unless_asked_for(tmp_path: Path) -> None:
    config = constant_lr(tmp_path, RATIO, "trainer.max_steps=6")
    runs.train(config)
    assert ("open", 3, "POL009") in told(config)
    assert runs.events(config, "remedy_applied") == []
    assert rates(config)[6] == pytest.approx(1e-2)


def test_an_error_may_halt_the_run_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    config = constant_lr(tmp_path, RATIO, "health.on_error=halt", "checkpoint.interval_steps=100")
    with pytest.raises(TrainingHaltedError, match="POL009"):
        runs.train(config)
    assert CheckpointStore(config.run_dir / "checkpoints").steps() == [3]
    assert runs.events(config, "health_halted")[0]["step"] == 3
    # Begun again it goes on: the finding is known.
    runs.train(config)
    assert CheckpointStore(config.run_dir / "checkpoints").steps() == [3, 4]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("health.levels={RWD00: off}", "RWD00.*Did you mean RWD0"),
        ("health.options={RWD001: {max_shar: 0.5}}", "Did you mean max_share"),
        ("health.options={RWD001: {fire: 0.5}}", "fire.*type of the default"),
        ("health.allow=[{code: RWD999, reason: test}]", "RWD999"),
    ],
)
def test_rules_and_options_that_do_not_exist_are_refused(
    tmp_path: Path, override: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        runs.train(tiny_rl.config(tmp_path, override))


def test_an_allowance_without_use_is_told_at_the_end(tmp_path: Path) -> None:
    known = "{code: RWD001, reason: a test}"
    config = tiny_rl.config(
        tmp_path, NEVER_ZERO_STD, f"health.allow=[{known}, {{code: POL009, reason: none}}]"
    )
    runs.train(config)
    assert [code for _, _, code in told(config) if code == "RWD001"] == []
    assert [event["code"] for event in runs.events(config, "allowance_unused")] == ["POL009"]


class SpoilWeights(Hooks):
    """Once, before a step: one weight becomes a NaN."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, step: int, parts: Any) -> None:
        if step == self.step:
            self.step = -1
            weight = next(parts.trainer.roles[Role.POLICY].model.parameters())
            with torch.no_grad():
                weight.view(-1)[:] = float("nan")


def test_a_poisoned_run_goes_back_to_its_last_healthy_checkpoint(tmp_path: Path) -> None:
    sound = tiny.config(tmp_path, "name=sound", "trainer.lr=1e-3")
    runs.train(sound)
    ill = tiny.config(tmp_path, "name=ill", "trainer.lr=1e-3", "health.heal=all")
    result = train(ill, SpoilWeights(6))
    assert result.step == 6
    assert runs.losses(ill) == runs.losses(sound)
    assert runs.final_tensors(ill) == runs.final_tensors(sound)
    (back,) = runs.events(ill, "rolled_back")
    assert (back["from_step"], back["to_step"]) == (5, 4)
    refused = tiny.config(tmp_path, "name=refused")
    with pytest.raises(NonFiniteHaltError):
        train(refused, SpoilWeights(6))


class SpoilAndLose(SpoilWeights):
    """As the run passes the step again, a machine of the trainer is lost, once."""

    is_lost = False

    def before_step(self, step: int, parts: Any) -> None:
        if self.step == -1 and not self.is_lost:
            self.is_lost = True
            raise NodeLostError("a machine is gone")
        super().before_step(step, parts)


def test_a_rollback_is_not_forgotten_when_ranks_are_lost_before_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    config = tiny.config(tmp_path, "trainer.lr=1e-3", "health.heal=all")
    assert train(config, SpoilAndLose(6)).step == 6
    state = CheckpointStore(config.run_dir / "checkpoints").at_step(6).state
    healing = state["health"]["healing"]
    assert (healing["roll_backs"], healing["went_to"]) == (1, 4)


class Killed(BaseException):
    """Ends a run at once, as a signal does that nothing can catch: nothing is saved."""


class SpoilAndDie(SpoilWeights):
    """As the run passes the step again, it is killed."""

    def before_step(self, step: int, parts: Any) -> None:
        if self.step == -1:
            raise Killed
        super().before_step(step, parts)


@pytest.mark.parametrize(("spoilt", "target"), [(6, 4), (2, 0)])
def test_a_rollback_is_not_forgotten_when_the_run_is_killed_before_the_next_checkpoint(
    tmp_path: Path, spoilt: int, target: int
) -> None:
    config = tiny.config(tmp_path, "trainer.lr=1e-3", "health.heal=all")
    with pytest.raises(Killed):
        train(config, SpoilAndDie(spoilt))
    assert [event["to_step"] for event in runs.events(config, "rolled_back")] == [target]
    # The illness comes back: this time the rate is lowered, as after any rollback but the first.
    assert train(config, SpoilWeights(spoilt)).step == 6
    backs = runs.events(config, "rolled_back")
    assert [back["path"] for back in backs] == ["", "trainer.lr"]
    state = CheckpointStore(config.run_dir / "checkpoints").at_step(6).state
    assert state["health"]["healing"]["roll_backs"] == 2


class PoisonPolicy(Hooks):
    """Once, after the updates of a step: nothing can be sampled any more."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_update(self, step: int, parts: Any) -> None:
        if step == self.step:
            self.step = -1
            with torch.no_grad():
                next(parts.trainer.roles[Role.POLICY].model.parameters()).fill_(float("nan"))


@pytest.mark.slow
def test_a_policy_that_cannot_be_sampled_from_goes_back(tmp_path: Path) -> None:
    sound = tiny_rl.config(tmp_path, "name=sound")
    runs.train(sound)
    ill = tiny_rl.config(tmp_path, "name=ill", "health.heal=all")
    # What was saved at step 2 is poisoned, too: it goes to the beginning then.
    train(ill, PoisonPolicy(2))
    assert [event["to_step"] for event in runs.events(ill, "rolled_back")][-1] == 0
    assert runs.final_tensors(ill).keys() == runs.final_tensors(sound).keys()
    assert runs.losses(ill)[:1] == runs.losses(sound)[:1]
    refused = tiny_rl.config(tmp_path, "name=refused")
    with pytest.raises(PolicyNotFiniteError):
        train(refused, PoisonPolicy(2))


@pytest.mark.slow
def test_all_doses_of_a_remedy_are_taken_back_together(tmp_path: Path) -> None:
    # Steps too small to move any ratio, and a limit below 1: nothing can help.
    still = ("trainer.lr=1e-9", "trainer.updates_per_step=4", "trainer.max_steps=18")
    config = constant_lr(tmp_path, RATIO, "health.heal=all", *still)
    runs.train(config)
    applied = runs.events(config, "remedy_applied")[:2]
    assert [(event["path"], event["old"], event["new"]) for event in applied] == [
        ("trainer.updates_per_step", 4, 2),
        ("trainer.updates_per_step", 2, 1),
    ]
    reverted = runs.events(config, "remedy_reverted")[0]
    assert (reverted["path"], reverted["old"], reverted["new"]) == (applied[0]["path"], 1, 4)
    assert reverted["step"] == applied[1]["step"] + applied[1]["window"]


def test_a_skipped_step_is_told_as_the_remedy_that_it_is(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    with pytest.raises(NonFiniteHaltError):
        train(config, SpoilWeights(2))
    (told_as,) = runs.events(config, "remedy_applied")
    assert (told_as["remedy"], told_as["grade"]) == ("skip_step", "safe")


class FullDisk(Hooks):
    """Room for so many checkpoints, and no more: the quota of a disk."""

    def __init__(self, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = most
        self.patch = monkeypatch

    def started(self, parts: Any, session: Any) -> None:
        store, write = session.checkpoints, parts.trainer.save

        def save(folder: Path) -> None:
            if len(store.steps()) >= self.most:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(folder)

        self.patch.setattr(parts.trainer, "save", save)


def test_a_full_disk_gives_up_the_oldest_checkpoint_and_never_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, "name=healed")
    train(config, FullDisk(2, monkeypatch))
    assert CheckpointStore(config.run_dir / "checkpoints").steps() == [4, 6]
    applied = runs.events(config, "remedy_applied")
    assert [event["remedy"] for event in applied] == ["prune_checkpoints"]
    assert runs.events(config, "checkpoint_failed") == []
    stuck = tiny.config(tmp_path, "name=stuck")
    with pytest.raises(DiskFullError):
        train(stuck, FullDisk(1, monkeypatch))
    assert CheckpointStore(stuck.run_dir / "checkpoints").steps() == [2]
    off = tiny.config(tmp_path, "name=off", "health.heal=off")
    with pytest.raises(DiskFullError):
        train(off, FullDisk(2, monkeypatch))


class NoRoomForExports(Hooks):
    """A disk with room for the state of a run, and none for its weights in another format."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def started(self, parts: Any, session: Any) -> None:
        def export(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch.setattr(parts.trainer, "export", export)


def test_no_room_for_an_export_does_not_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, "checkpoint.export=final")
    with pytest.raises(DiskFullError):
        train(config, NoRoomForExports(monkeypatch))
    last = CheckpointStore(config.run_dir / "checkpoints").steps()[-1]
    assert last == config.trainer.max_steps
    folder = CheckpointStore(config.run_dir / "checkpoints").path(last)
    assert not (folder / "hf").exists()
    # With room again, the same command writes what is missing.
    train(config, Hooks())
    assert (folder / "hf" / "config.json").is_file()


class ScaleWeights(Hooks):
    """Once, before a step: weights are many times as large. And what rates there were, in order."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, step: int, parts: Any) -> None:
        if step == self.step:
            self.step = -1
            with torch.no_grad():
                for weight in parts.trainer.roles[Role.POLICY].model.parameters():
                    weight.mul_(20.0)


DIVERGED = "health.options={LRN002: {fire: 2}}"


def test_a_finding_takes_the_run_back_before_its_first_step(tmp_path: Path) -> None:
    steady = ("trainer.schedule={type: constant, warmup_steps: 0}", "trainer.max_steps=12")
    config = tiny.config(tmp_path, DIVERGED, "trainer.lr=1e-3", "health.heal=all", *steady)
    result = train(config, ScaleWeights(8))
    assert result.step == 12
    (back,) = runs.events(config, "rolled_back")
    assert (back["code"], back["to_step"]) == ("LRN002", 6)
    assert back["from_step"] >= 8
    assert (rates(config)[6], rates(config)[7]) == pytest.approx((1e-3, back["new"]))
    assert back["new"] <= 1e-4
    assert list(rates(config)) == list(range(1, 13))
    assert [line for line in findings(config) if line["level"] != "info"] == []
    losses = runs.losses(config)
    assert losses[-1] < 1.5 * losses[5]


def test_a_run_that_was_ill_from_its_start_begins_anew_with_a_rate_that_it_bears(
    tmp_path: Path,
) -> None:
    steady = ("trainer.schedule={type: constant, warmup_steps: 0}", "trainer.max_steps=12")
    ill = ("trainer.lr=3.0", "checkpoint.interval_steps=10")
    config = tiny.config(tmp_path, DIVERGED, "health.heal=all", *steady, *ill)
    train(config, Hooks())
    (back,) = runs.events(config, "rolled_back")
    assert (back["to_step"], back["old"]) == (0, 3.0)
    assert 1e-4 < back["new"] < 3e-2
    assert list(rates(config).values()) == pytest.approx([back["new"]] * 12)
    losses = runs.losses(config)
    assert losses[-1] < losses[0]
    assert [line for line in findings(config) if line["level"] != "info"] == []


OWN = ("engine.own_process=true", "trainer.max_steps=4")


class WrongOnce(Hooks):
    """An engine that computes with other weights, until it is sent them again."""

    def started(self, parts: Any, session: Any) -> None:
        score = parts.engine.score

        def wrong(rows: Any, *, temperature: float) -> Any:
            parts.engine.score = score
            return [values + 1.0 for values in score(rows, temperature=temperature)]

        parts.engine.score = wrong


@shared_engine_process()
def test_weights_that_are_not_served_are_sent_again(tmp_path: Path) -> None:
    sound, ill = (tiny_rl.config(tmp_path, *OWN, f"name={name}") for name in ("sound", "ill"))
    runs.train(sound)
    train(ill, WrongOnce())
    (applied,) = runs.events(ill, "remedy_applied")
    assert (applied["remedy"], applied["grade"]) == ("republish_weights", "safe")
    assert "does not serve" in applied["cause"]
    assert runs.losses(ill) == runs.losses(sound)
    off = tiny_rl.config(tmp_path, *OWN, "name=off", "health.heal=off")
    with pytest.raises(NotServedError):
        train(off, WrongOnce())


@shared_engine_process()
def test_a_mismatch_of_engine_and_trainer_is_answered_by_new_weights(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path, *OWN, "health.options={OFF001: {nats: -1.0, fire: 1}}")
    runs.train(config)
    applied = runs.events(config, "remedy_applied")
    assert [(event["code"], event["remedy"]) for event in applied][:1] == [("OFF001", "republish")]
    published = [event["version"] for event in runs.events(config, "weights_published")]
    assert published.count(applied[0]["step"] - 1) == 2
