"""Metrics over several lines and bars that are drawn anew: every one of them is a row."""

from __future__ import annotations

import json
from pprint import pformat

import pytest

from homeostat.health.readers import read_text

RAY = "(Entrypoint pid=77) "
ROWS = [
    {
        "policy/policy_entropy": 0.4 / step,
        "policy/policy_loss": 0.01 * step,
        "policy/raw_grad_norm": 0.2 + 0.1 * step,
        "reward/avg_raw_reward": 0.1 * step,
        "generate/avg_num_tokens": 200.0 + step,
    }
    for step in (1, 2, 3, 4)
]


def quoted(row: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.4f}" for name, value in row.items()}


@pytest.mark.parametrize("prefix", ["", RAY])
def test_a_pprinted_row_has_the_step_of_the_line_above_it(prefix: str) -> None:
    lines = []
    for step, row in enumerate(ROWS, start=5):
        lines.append(f"2026-01-01 10:00:0{step} | INFO | skyrl_train.tracking:log:1 - Step {step}:")
        lines += pformat(quoted(row), width=60).splitlines()
    view = read_text("\n".join(prefix + line for line in lines))
    assert view.metrics["entropy"].steps.tolist() == [5, 6, 7, 8]
    assert view.metrics["reward"].values.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert len(view.metrics["grad_norm"]) == 4


def test_indented_json_and_a_step_within() -> None:
    rows = [{"train/loss": 2.0 - step / 10, "step": step, "grad_norm": 0.5} for step in (10, 20)]
    view = read_text("\n".join(json.dumps(row, indent=2) for row in rows))
    assert view.metrics["train/loss"].steps.tolist() == [10, 20]


def test_lines_of_others_within_a_row_are_no_part_of_it() -> None:
    lines = [RAY + line for line in pformat(quoted(ROWS[0]) | {"step": 3}, width=60).splitlines()]
    lines.insert(2, "(Engine pid=5) INFO: {half a thought")
    lines.insert(3, "Rollout:  50%|#####     | 4/8 [00:03<00:03, 1.2it/s]")
    view = read_text("\n".join(lines))
    assert view.metrics["grad_norm"].steps.tolist() == [3]
    assert len(view.metrics["entropy"]) == 1


def test_a_row_in_sections_below_its_step() -> None:
    text = "\n".join(
        f"Step {step}: {{'loss': {{'policy': 0.1,\n           'value': 0.2}},\n 'kl': 0.{step}}}"
        for step in (3, 4)
    )
    assert read_text(text).metrics["kl"].steps.tolist() == [3, 4]


def test_a_config_over_several_lines_stays_settings() -> None:
    config = {"algorithm": {"kl": 0.01, "loss": "grpo"}, "trainer": {"lr": 1e-6, "epochs": 3}}
    view = read_text(pformat(config, width=30) + "\nstep 1 loss: 0.5, grad_norm: 0.1\n")
    assert view.raw_settings["trainer.lr"] == 1e-6
    assert view.metrics["train/loss"].values.tolist() == [0.5]


def test_a_brace_that_is_never_closed_takes_no_rows_along() -> None:
    rows = "\n".join(f"{{'loss': 0.{step}, 'grad_norm': 1.0}}" for step in range(1, 6))
    view = read_text("loading {config\n" + rows)
    assert len(view.metrics["train/loss"]) == 5


def test_two_metrics_behind_the_place_in_the_code() -> None:
    line = "2026-01-01 | INFO | trainer.ppo:advantages:70 - avg_final_rewards: {}, kl_mean: 0.1"
    view = read_text("\n".join(line.format(value) for value in (0.1, 0.2, 0.3)))
    assert view.metrics["reward"].values.tolist() == [0.1, 0.2, 0.3]


def bar(count: int, total: int, **values: float) -> str:
    inside = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"Train epoch [1/1]: {100 * count // total}%|##| {count}/{total} [00:09<00:00, {inside}]"


def test_full_bars_between_others_are_a_row_each() -> None:
    lines = []
    for episode in range(1, 7):
        lines.append(f"Episode [1/1]: 2%|  | {episode}/50 [01:00<09:00, 60.0s/it]")
        lines.append(bar(16, 16, rate=3.0, pg=-0.01, rm=0.1 * episode, glen=300, kl=0.02 * episode))
    view = read_text("\n".join(lines))
    assert view.metrics["kl"].steps.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_full_bar_that_is_drawn_twice_is_one_row() -> None:
    drawn = [bar(count, 4, rate=3.0, rm=0.1 * count, kl=0.01) for count in (1, 2, 3, 4, 4)]
    again = [bar(count, 4, rate=3.0, rm=0.1 * count, kl=0.02) for count in (1, 2, 3, 4)]
    view = read_text("\n".join(drawn + again))
    assert view.metrics["kl"].steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_samples_with_their_number_in_brackets() -> None:
    view = read_text("[completion 0] 'four'\n[sample #2]: \"five\"\nstep 1 loss: 0.5, lr: 0.1\n")
    assert [sample.text for sample in view.samples] == ["four", "five"]


def test_where_nothing_is_trained_lines_count_by_the_engines_rows() -> None:
    decode = "Decode batch, #running-req: 4, token usage: 0.50, gen throughput (token/s): 90.0"
    view = read_text("\n".join(["starting", decode, decode, "all is lost", decode]))
    assert [line.step for line in view.log.lines if "lost" in line.text] == [2]
    trained = read_text("\n".join([decode, decode, "all is lost", "{'loss': 0.5, 'reward': 1}"]))
    assert [line.step for line in trained.log.lines if "lost" in line.text] == [None]


@pytest.mark.parametrize(
    "line",
    [
        "[2026-01-01 10:00:00] step={step} loss={loss} lr=1e-05 grad_norm=0.5",
        "steps: {step} loss: {loss} iter time (s): 1.2 samples/sec: 20.1",
        "Iter {step}: Train loss {loss}, Learning Rate 1.000e-05, It/sec 0.9",
        "1|{step}|Loss: {loss}:   3%|#         | {step}/90 [00:10<01:00,  1.1it/s]",
        "Train step {step}/90 done.\n\u2502 actor/loss \u2502 {loss} \u2502 kl \u2502 0.1 \u2502",
    ],
)
def test_pairs_that_spaces_bars_and_boxes_part(line: str) -> None:
    text = "\n".join(line.format(step=step, loss=2.0 - step / 10) for step in (1, 2, 3))
    view = read_text(text)
    found = view.metrics.get("train/loss", view.metrics.get("actor/loss"))
    assert found is not None
    assert found.steps.tolist() == [1, 2, 3]
    assert found.values.tolist() == pytest.approx([1.9, 1.8, 1.7])


@pytest.mark.parametrize(
    "line",
    [
        "Step 2: run epoch 3 of the recipe",
        "loading loss weights from shard=3 of file=/data/x",
        "\u2502 prompt \u2502 What is 3 + 4? \u2502",
    ],
)
def test_prose_is_no_row(line: str) -> None:
    assert read_text("\n".join([line] * 3)).metrics == {}
