"""RL with rollout.max_staleness: equal to the sync loop at 0, bounded above, exactly resumed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import kills, ranks, runs, tiny_rl

from homeostat.config import RunConfig
from homeostat.config.loading.live import Edit
from homeostat.data.prompts import prepare_prompts
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import RewardError
from homeostat.observe.jsonl import read_metrics
from homeostat.rewards.pool import PendingScore
from homeostat.rollout.journal import Journal
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.healing.healer import Healing, RollBackError
from homeostat.run.learning.learn import Learner
from homeostat.types import RolloutGroup

OWN = {"own_process": True}
STALE = "rollout.max_staleness=2"
SAVES = "checkpoint={interval_steps: 2, export: off, keep_last: 9}"
# What a clock or another process decides, or only one of the loops has.
MEASURED = ("time", "throughput/", "memory/", "engine/", "sync/", "rollout/", "stale/mixed")
# Of different lengths, four at a time in invariant numerics, so that some are unfinished when an
# update is finished.
RAGGED = {**tiny_rl.ROLLOUT, "max_new_tokens": 150, "keep_journal": True}
SLOW = ("engine.max_concurrency=4",)
WIDE = {"max_tokens_per_device": 512}


class CrashError(Exception):
    """Ends a run where a test wants it to end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


def config_of(folder: Path, name: str, *overrides: str, **sections: Any) -> RunConfig:
    sections.setdefault("engine", OWN)
    return tiny_rl.config(folder, f"name={name}", *overrides, **sections)


def ragged(folder: Path, name: str, *overrides: str) -> RunConfig:
    """A run whose completions differ in length; batches do not change their bits."""
    trainer = {**tiny_rl.recipe(folder)["trainer"], **WIDE}
    return config_of(
        folder, name, "model.numerics=invariant", *SLOW, *overrides, rollout=RAGGED, trainer=trainer
    )


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunConfig:
    config = config_of(folder, "undisturbed", STALE, SAVES, "trainer.max_steps=6")
    runs.train(config)
    return config


def values(config: RunConfig, name: str) -> list[Any]:
    return [record.get(name) for record in read_metrics(config.run_dir / "metrics.jsonl")]


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in read_metrics(config.run_dir / "metrics.jsonl")
    ]


def tensors(config: RunConfig) -> dict[str, bytes]:
    """The trainer's tensors in the newest checkpoint; sync runs have no buffer beside them."""
    return {k: v for k, v in runs.final_tensors(config).items() if k != "buffer.safetensors"}


def assert_equal(one: RunConfig, other: RunConfig) -> None:
    assert comparable(one) == comparable(other)
    assert tensors(one) == tensors(other)


def groups(config: RunConfig) -> dict[str, RolloutGroup]:
    """The groups of a run's journal, by their keys."""
    prompts = prepare_prompts(config.data.train, load_tokenizer(config.model), config.data)
    journal = Journal(config.run_dir / "journal")
    found = {}
    for step in journal.steps():
        for key in journal.keys(step):
            record = journal.read(key, prompts.__getitem__)
            assert record is not None, key
            found[str(key)] = record.group
    return found


def tokens(config: RunConfig) -> dict[str, list[list[int]]]:
    return {
        key: [sample.completion.policy_tokens_T.tolist() for sample in group.samples]
        for key, group in groups(config).items()
    }


def sampling_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("sampling")]


@pytest.mark.parametrize("place", ["in_process", "own_process"])
def test_without_staleness_it_is_the_sync_loop_bitwise(folder: Path, place: str) -> None:
    engine = OWN if place == "own_process" else {}
    data = {**tiny_rl.recipe(folder)["data"], "validation_share": 0.25}
    sync, turns = (
        config_of(
            folder, f"{name}_{place}", "eval.interval_steps=2", *more, engine=engine, data=data
        )
        for name, more in (("sync", ()), ("turns", ("rollout.max_staleness=0",)))
    )
    runs.train(sync)
    runs.train(turns)
    assert_equal(turns, sync)


def test_staleness_is_bounded_and_timing_changes_no_bit(
    folder: Path, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run whose trainer is slower now and then, so that other things finish first."""
    assert values(undisturbed, "stale/steps/max") == [0, 1, 2, 2, 2, 2]
    plain, slept = Learner.learn, iter([0.3, 0.0, 0.2, 0.0, 0.3, 0.0])

    def learn(self: Learner, *args: Any, **named: Any) -> Any:
        time.sleep(next(slept))
        return plain(self, *args, **named)

    monkeypatch.setattr(Learner, "learn", learn)
    slower = config_of(folder, "slower", STALE, SAVES, "trainer.max_steps=6")
    runs.train(slower)
    assert_equal(slower, undisturbed)
    assert sampling_threads() == []


@pytest.mark.slow
def test_slow_groups_are_trained_on_and_requests_decide_their_tokens(folder: Path) -> None:
    """With a learning rate of almost 0 all versions sample alike: whatever the timing, every group
    has the tokens that the sync loop gives it, short or long, and none is missing."""
    still = ("trainer.lr=1e-30", "trainer.max_steps=4")
    sync = ragged(folder, "still_sync", *still)
    ahead = ragged(folder, "still_ahead", *still, STALE)
    partial = ragged(folder, "still_partial", *still, STALE, "rollout.partial=true")
    for config in (sync, ahead, partial):
        runs.train(config)
    wanted = tokens(sync)
    lengths = [len(sample) for group in wanted.values() for sample in group]
    assert len(wanted) == 4 * RAGGED["prompts_per_step"]
    assert max(lengths) > 5 * min(lengths)
    assert tokens(ahead) == wanted
    assert tokens(partial) == wanted
    assert values(ahead, "reward") == values(sync, "reward")


def test_unfinished_completions_continue_under_new_weights(folder: Path) -> None:
    config = ragged(folder, "partial", "rollout.max_staleness=1", "rollout.partial=true")
    runs.train(config)
    assert max(values(config, "stale/mixed_share")) > 0
    assert max(values(config, "stale/steps/max")) == 1
    for group in groups(config).values():
        for sample in group.samples:
            assert (np.diff(sample.completion.policy_versions_T) >= 0).all()
    # A token of the newest version has the log-prob that this version gives it after the tokens
    # of the older one; tokens of the older one differ by what an update changed.
    fresh = [v for v in values(config, "sampling/by_age/0/logp_difference")[1:] if v is not None]
    old = [v for v in values(config, "sampling/by_age/1/logp_difference") if v is not None]
    assert fresh
    assert max(fresh) < 1e-5 < 1e-3 < max(old)


def crash_in_step(config: RunConfig, step: int) -> None:
    plain = Learner.learn

    def learn(self: Learner, now: int, *args: Any, **named: Any) -> Any:
        if now == step:
            raise CrashError
        return plain(self, now, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", learn)
        with pytest.raises(CrashError):
            runs.train(config)
    assert sampling_threads() == []


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    folder: Path, undisturbed: RunConfig
) -> None:
    """Step 2 is saved with the groups of steps 3 and 4, which older weights sampled."""
    config = config_of(folder, "resumed", STALE, SAVES, "trainer.max_steps=6")
    crash_in_step(config, 4)
    runs.train(config)
    assert values(config, "rollout/replayed_rounds")[:4] == [0, 0, 1, 1]
    assert_equal(config, undisturbed)


def test_partial_completions_are_in_the_checkpoint(folder: Path) -> None:
    """What is trained on again is what was trained on before, and no group is lost or doubled."""
    saves = "checkpoint={interval_steps: 1, export: off, keep_last: 9}"
    config = ragged(folder, "cut", STALE, "rollout.partial=true", "trainer.max_steps=5", saves)
    crash_in_step(config, 4)
    before = groups(config)
    losses = runs.losses(config)
    runs.train(config)
    assert runs.losses(config)[: len(losses)] == losses
    after = groups(config)
    assert list(after) == [f"train/{step}/0/{place}" for step in range(1, 6) for place in range(4)]
    for key, group in before.items():
        for old, new in zip(group.samples, after[key].samples, strict=True):
            assert (
                old.completion.policy_tokens_T.tolist() == new.completion.policy_tokens_T.tolist()
            )
    assert max(values(config, "stale/steps/max")) <= 2
    assert max(values(config, "stale/mixed_share")) > 0


def test_what_is_sampled_by_weights_that_are_gone_is_not_trained_on(folder: Path) -> None:
    """A run that goes back with another learning rate makes another version 3 than before: parts
    of completions that the old one sampled do not come from the journal."""
    config = ragged(
        folder,
        "back",
        STALE,
        "rollout.partial=true",
        "health.heal=all",
        SAVES,
        "engine.max_concurrency=2",
    )
    plain, learned = Learner.learn, []

    def learn(self: Learner, now: int, *args: Any, **named: Any) -> Any:
        learned.append(now)
        if learned == [1, 2, 3, 4]:
            raise RollBackError(2, Healing(overlay={"trainer.lr": Edit(value=1e-5, step=3)}))
        return plain(self, now, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", learn)
        runs.train(config)
    assert learned == [1, 2, 3, 4, 3, 4]
    assert all((value or 0) < 1e-5 for value in values(config, "sampling/by_age/0/logp_difference"))


MOMENTS = {
    "while training": ("homeostat.train.step", "GuardedStep.run", 7),
    "while groups are admitted": ("homeostat.rollout.ahead", "AheadCollector.admit", 9),
    "while completions come in": ("homeostat.rollout.ahead", "Batch._take", 70),
    "while publishing": ("homeostat.sync.publish", "Publisher.publish", 5),
    "while the buffer is saved": ("homeostat.rollout.ahead", "AheadCollector.save", 2),
    "before the journal's barrier": ("homeostat.rollout.journal", "Journal.barrier", 4),
}


@pytest.mark.parametrize(
    "moment",
    [
        "while training",
        *(pytest.param(one, marks=pytest.mark.slow) for one in list(MOMENTS)[1:]),
    ],
)
def test_a_kill_costs_nothing_and_changes_nothing(
    tmp_path: Path, folder: Path, undisturbed: RunConfig, moment: str
) -> None:
    place, name, count = MOMENTS[moment]
    prelude = runs.before(place, name, "os.kill(os.getpid(), 9)", only_if=f"call == {count}")
    raw = tiny_rl.recipe(folder, engine=OWN)
    overrides = (f"name={tmp_path.name}", STALE, SAVES, "trainer.max_steps=6")
    process = runs.start(raw, tmp_path, *overrides, prelude=prelude)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == -9, output
    config = config_of(folder, *overrides[0][5:].split(), *overrides[1:])
    runs.train(config)
    assert_equal(config, undisturbed)


def test_an_engine_that_dies_while_the_trainer_trains_is_replaced(
    folder: Path, undisturbed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process has the weights that were published, not those that are being trained."""
    config = config_of(folder, "dying", STALE, SAVES, "trainer.max_steps=6")
    monkeypatch.setattr(RemoteEngine, "poll", kills.killed_at("poll", call=12, within_s=0.05))
    runs.train(config)
    assert len(runs.events(config, "engine_restarted")) == 1
    assert_equal(config, undisturbed)


def test_a_reward_that_cannot_be_computed_ends_the_run_and_its_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = PendingScore.result, iter(range(100))

    def result(self: PendingScore) -> Any:
        if next(calls) == 10:
            raise RewardError("no worker can be started")
        return plain(self)

    monkeypatch.setattr(PendingScore, "result", result)
    config = config_of(folder, "unrewarded", STALE)
    with pytest.raises(RewardError):
        runs.train(config)
    assert sampling_threads() == []


def test_an_evaluation_beside_training_is_of_one_version(folder: Path) -> None:
    data = {**tiny_rl.recipe(folder)["data"], "validation_share": 0.25}
    common = ("eval={interval_steps: 2, keep_best: false}", STALE, "trainer.max_steps=6")
    waits = config_of(folder, "waits", *common, data=data)
    beside = config_of(folder, "beside", *common, "eval.sampling.blocking=false", data=data)
    for config in (waits, beside):
        runs.train(config)
    assert values(waits, "eval/policy_version") == [None, 2, None, 4, None, 6]
    assert values(beside, "eval/policy_version") == [None, None, 2, None, 4, 6]
    rewards = [
        [reward for reward in values(config, "eval/reward") if reward is not None]
        for config in (waits, beside)
    ]
    assert rewards[0] == rewards[1]
    assert tensors(beside) == tensors(waits)


def test_a_complete_run_that_goes_on_does_not_repeat_its_last_evaluation(folder: Path) -> None:
    """A second judgement of the same answers would count against eval.patience."""
    data = {**tiny_rl.recipe(folder)["data"], "validation_share": 0.25}
    common = ("eval={interval_steps: 2, keep_best: false, sampling: {blocking: false}}", STALE)
    for steps in (4, 6):
        config = config_of(folder, "extended", *common, f"trainer.max_steps={steps}", data=data)
        runs.train(config)
    assert values(config, "eval/policy_version") == [None, None, 2, 4, None, 6]


@pytest.mark.slow
def test_several_engines_sample_what_one_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines behind a router, one of which dies while the trainer trains."""
    common = (STALE, "model.numerics=invariant", "trainer.max_steps=5")
    one, two = (
        config_of(folder, f"engines_{count}", *common, f"engine.data_parallel_size={count}")
        for count in (1, 2)
    )
    runs.train(one)
    monkeypatch.setattr(RemoteEngine, "poll", kills.killed_at("poll", call=12, within_s=0.05))
    runs.train(two)
    assert len(runs.events(two, "engine_lost")) == 1
    assert_equal(two, one)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_sampling_beside_fsdp_cannot_deadlock(folder: Path) -> None:
    """The thread that samples issues no collective, so those of the ranks keep their order."""
    common = (STALE, "trainer.max_steps=5", "sync={transport: {type: collective}}")
    one = config_of(folder, "one_rank", *common)
    two = config_of(folder, "two_ranks", *common, *ranks.over(2))
    with ranks.forked():
        for config in (one, two):
            runs.train(config)
    assert values(two, "stale/steps/max") == [0, 1, 2, 2, 2]
    assert runs.losses(two) == pytest.approx(runs.losses(one), rel=1e-4, abs=1e-6)
