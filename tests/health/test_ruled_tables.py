"""Tables with rules around them, as Stable-Baselines prints them, and the sign of its entropy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from homeostat.health.readers import RunPlace, open_run, read_text
from homeostat.health.readers.files.long_logs import LongLogReader
from homeostat.health.readers.files.text import MAX_SETTINGS, TextReader
from homeostat.health.view import Kind

TABLE = """\
------------------------------------
| rollout/             |           |
|    ep_rew_mean       | {reward}  |
| time/                |           |
|    total_timesteps   | {step}    |
| train/               |           |
|    approx_kl         | 0.0028709 |
|    entropy_loss      | {entropy} |
|    loss              | 38.8      |
------------------------------------
"""


def tables(num: int) -> str:
    """A log in which the policy narrows until its entropy is below 0."""
    return "".join(
        TABLE.format(reward=100 + i, step=2048 * (i + 1), entropy=round(-8.5 + i, 3))
        for i in range(num)
    )


def test_a_table_is_one_row_at_the_step_that_it_counts() -> None:
    view = read_text("Using cpu device\n" + tables(12))
    reward, moved = view.series("reward"), view.series("policy/update_kl")
    assert reward is not None
    assert moved is not None
    assert view.kind is Kind.RL
    assert reward.steps.tolist() == [2048 * (i + 1) for i in range(12)]
    assert reward.values.tolist() == [100.0 + i for i in range(12)]
    assert len(moved) == 12


def test_an_entropy_that_is_logged_as_a_loss_turns_its_sign(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    rows = [f"{2048 * (i + 1)},{100 + i},{-8.5 + i},0.2" for i in range(12)]
    names = "time/total_timesteps,rollout/ep_rew_mean,train/entropy_loss,train/clip_range"
    file.write_text("\n".join([names, *rows]))
    entropy = open_run(RunPlace(file), config=None).series("entropy")
    assert entropy is not None
    assert np.allclose(entropy.values, [8.5 - i for i in range(12)])


def test_a_table_without_a_count_of_steps_stays_text() -> None:
    lines = ["-" * 30, "| loss | 0.5 |", "-" * 30, "| size | 3 |", "-" * 30]
    view = read_text("\n".join(lines))
    assert not view.metrics
    assert [line.text for line in view.log.lines] == lines


def test_a_long_log_gives_the_same_rows() -> None:
    lines = ["nothing to see here"] * (MAX_SETTINGS + 10) + tables(20).splitlines()
    plain, long = TextReader(), LongLogReader()
    plain.feed(lines)
    long.feed_bytes([line.encode() for line in lines])
    assert plain.recorder.num_rows == 20
    for name, one in plain.recorder.series().items():
        assert long.recorder.series()[name].steps.tolist() == one.steps.tolist(), name


def test_the_reward_of_deepspeed_chat_is_read_beside_its_losses() -> None:
    lines = [
        f"epoch: 0|step: {i}|ppo_ep: 1|act_loss: {0.1 * i}|cri_loss: 0.5|unsuper_loss: 0.0\n"
        f"average reward score: {i / 10}\n"
        for i in range(20)
    ]
    view = read_text("".join(lines))
    assert view.kind is Kind.RL
    reward, critic = view.series("reward"), view.series("critic/loss")
    assert reward is not None
    assert critic is not None
    assert reward.values.tolist() == [i / 10 for i in range(20)]
    assert critic.values.tolist() == [0.5] * 20
