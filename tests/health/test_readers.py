"""Each format of console logs, as its framework prints it, becomes the same kind of view."""

from __future__ import annotations

import math

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.view import Kind, RunView


def steps_of(view: RunView, name: str) -> list[int]:
    series = view.series(name)
    assert series is not None, sorted(view.metrics)
    return series.steps.tolist()


def values_of(view: RunView, name: str) -> list[float]:
    series = view.series(name)
    assert series is not None, sorted(view.metrics)
    return series.values.tolist()


def test_rows_without_steps_are_counted_and_eval_rows_belong_to_the_newest() -> None:
    view = read_text(
        "{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 2e-05, 'epoch': 0.1}\n"
        "{'loss': 2.25, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.2}\n"
        "{'eval_loss': 2.75, 'eval_runtime': 4.5, 'epoch': 0.2}\n"
        "{'train_runtime': 10.0, 'train_loss': 2.4, 'epoch': 0.2}\n"
    )
    assert steps_of(view, "train/loss") == [1, 2]
    assert math.isnan(values_of(view, "grad_norm")[1])
    assert (steps_of(view, "eval/loss"), values_of(view, "eval/loss")) == ([2], [2.75])
    # The mean over the whole run is no step's loss.
    assert view.facts["summary"]["train_loss"] == 2.4
    assert view.kind is Kind.SFT
    assert not view.log


def test_numbers_that_are_printed_as_texts_are_numbers() -> None:
    view = read_text("{'loss': '0.0159', 'reward': '1,250.5', 'kl': 'nan', 'grad_norm': '12.5%'}\n")
    assert values_of(view, "train/loss") == [0.0159]
    assert values_of(view, "reward") == [1250.5]
    assert math.isnan(values_of(view, "kl")[0])
    assert values_of(view, "grad_norm") == [0.125]


def test_a_bar_tells_the_step_of_the_row_that_follows_it() -> None:
    view = read_text(
        " 10%|#         | 10/100 [00:20<03:00, 2.00s/it]\n"
        "{'loss': 1.5, 'epoch': 0.1}\n"
        " 20%|##        | 20/100 [00:40<02:40, 2.00s/it]\n"
        "100%|##########| 4/4 [00:01<00:00, 4.00it/s]\n"
        "{'loss': 1.25, 'epoch': 0.2}\n"
    )
    assert steps_of(view, "train/loss") == [10, 20]
    assert view.total_steps == 100


def test_a_bar_drawn_over_itself_and_a_row_on_its_line() -> None:
    view = read_text("  1%| | 1/50 [00:01<00:50]\r  2%| | 2/50 [00:02<00:49]{'loss': 3.0}\n")
    assert (steps_of(view, "train/loss"), view.total_steps) == ([2], 50)


def test_rows_of_roll_hold_their_metrics_apart_from_the_step() -> None:
    view = read_text(
        "".join(
            "[2025-06-10 12:00:02] [INFO] [tracking.py (45)] [DRIVER 0 / 1][PID 123] metrics_tag: "
            f'{{"step": {step}, "metrics": {{"critic/score/mean": 0.{step}, "actor/lr": 1e-06, '
            '"actor/pg_loss": 0.01, "tokens/response_length/mean": 800.0}}\n'
            for step in range(1, 5)
        )
    )
    assert view.framework.name == "roll"
    assert steps_of(view, "reward") == [1, 2, 3, 4]
    assert values_of(view, "completions/mean_length") == [800.0] * 4


def test_tables_of_notebooks_write_a_slash_between_spaces() -> None:
    view = read_text(
        "Step | Training Loss | reward | completions / mean_length | rewards / format / mean\n"
        "-- | -- | -- | -- | --\n"
        + "".join(f"{step} | 0.0001 | -17.25 | 445.5 | 0.25\n" for step in range(1, 6))
    )
    assert (view.framework.name, view.kind) == ("trl", Kind.RL)
    assert values_of(view, "completions/mean_length") == [445.5] * 5
    assert values_of(view, "rewards/format/mean") == [0.25] * 5
    spaced = read_text(
        "Step Training Loss reward completions / mean_length\n"
        + "".join(f"{step} 0.0001 -17.25 445.5\n" for step in range(1, 6))
    )
    assert values_of(spaced, "completions/mean_length") == [445.5] * 5


@pytest.mark.parametrize(
    "rewards", ["['0.80', '0.00', '0.01', '0.39']", "[0.8, 0.0, 1e-2, 0.39]", "[0.8 0. 0.01 0.39]"]
)
def test_rewards_of_single_samples_are_averaged(rewards: str) -> None:
    view = read_text(
        "".join(
            f"[step {step}/200] correct=1/4 rewards={rewards} loss=-0.0051 lr=1.00e-06 wasted=0\n"
            f"  [attempt {step}] SKIP (ALL_CORRECT, rewards=[1.0, 1.0, 1.0, 1.0])\n"
            for step in range(1, 6)
        )
    )
    assert (view.kind, view.total_steps) == (Kind.RL, 200)
    assert steps_of(view, "train/loss") == steps_of(view, "reward") == [1, 2, 3, 4, 5]
    assert values_of(view, "reward") == pytest.approx([0.3] * 5)
    assert values_of(view, "reward/max") == [0.8] * 5
    assert values_of(view, "learning_rate") == [1e-6] * 5


def test_lines_of_mlx_hold_the_mean_of_all_rewards() -> None:
    view = read_text(
        "".join(
            f"Iter {step}: Train loss 0.000, Total rewards mean 0.{step}, Total rewards std 0.1, "
            "Grouped rewards mean 0.000, KL 0.001, Learning Rate 1.000e-05, It/sec 0.118\n"
            for step in range(1, 6)
        )
    )
    assert view.kind is Kind.RL
    assert values_of(view, "reward") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert values_of(view, "reward/std") == [0.1] * 5


def test_bars_of_vllm_count_prompts_and_not_steps() -> None:
    view = read_text(
        "".join(
            "Processed prompts: 100%|####| 768/768 [00:55<00:00, 13.82it/s, "
            "est. speed input: 1699.36 toks/s, output: 1867.77 toks/s]\n"
            f"pass 1/4 step {step}/256 lr 1.9e-06 reward 0.8{step}\n"
            for step in range(1, 5)
        )
    )
    assert steps_of(view, "reward") == [1, 2, 3, 4]
    assert (view.last_step, view.total_steps) == (4, 256)


def test_an_epoch_before_a_dict_tells_that_another_run_began() -> None:
    first, second = (
        "".join(f"12:01 - INFO - Epoch {n}: {{'loss': {at / (n + 1)}}}\n" for n in range(count))
        for at, count in ((9.0, 12), (8.0, 3))
    )
    view = read_text(first + "12:01 - INFO - Starting training with configuration: base\n" + second)
    assert values_of(view, "train/loss") == [8.0, 4.0, 8.0 / 3]


def test_rows_of_the_fine_tuning_trainer_of_a_framework_for_rl() -> None:
    rows = [
        f"step:{step} - train/loss:{2.0 / step} - train/grad_norm:0.7 - train/lr:1e-05"
        for step in range(1, 6)
    ]
    view = read_text("\n".join(rows))
    assert (view.framework.name, view.kind) == ("verl", Kind.SFT)


def test_verl_rows_behind_ray_prefixes_and_colours() -> None:
    view = read_text(
        "\x1b[36m(TaskRunner pid=71)\x1b[0m step:1 - actor/entropy:0.5 - actor/grad_norm:nan - "
        "critic/score/mean:0.125 - perf/throughput:np.float64(900.5)\n"
        "\x1b[36m(TaskRunner pid=71)\x1b[0m step:2 - actor/entropy:0.25 - actor/grad_norm:1.5 - "
        "critic/score/mean:0.25 - perf/throughput:1000.0\n"
        "(WorkerDict pid=8) some other line\n"
    )
    assert values_of(view, "entropy") == [0.5, 0.25]
    assert values_of(view, "reward") == [0.125, 0.25]
    assert values_of(view, "throughput/tokens_per_s_per_device")[0] == 900.5
    assert (view.framework.name, view.kind, view.decimals) == ("verl", Kind.RL, {})
    (line,) = view.log.lines
    assert (line.number, line.text, line.step) == (3, "(WorkerDict pid=8) some other line", 2)


@pytest.mark.parametrize("escape", ["", "\\x1b", "\\u001b", "\\033", "^["])
def test_colours_whose_escape_character_was_lost_are_no_text(escape: str) -> None:
    pid, file, reset = f"{escape}[36m", f"{escape}[35m", f"{escape}[0m"
    view = read_text(
        f"{pid}(TaskRunner pid=71){reset} step:1 - actor/entropy:0.5 - critic/score/mean:0.125\n"
        "Traceback (most recent call last):\n"
        f'  File {file}"/srv/rewards.py"{reset}, line {file}41{reset}, in {file}score{reset}\n'
        f"{escape}[1;31mKeyError{reset}: {file}'gold'{reset}\n"
    )
    assert values_of(view, "entropy") == [0.5]
    (found,) = view.tracebacks
    assert found.error == "KeyError: 'gold'"
    assert str(found.frames[-1]) == "/srv/rewards.py:41 in score"


def test_brackets_that_are_no_colours_stay() -> None:
    text = "waited [12m 5s], then [36m], at rows[m]"
    assert read_text(text).log.lines[0].text == text


def test_three_decimals_of_everything_are_remembered() -> None:
    view = read_text(
        "step:4 - actor/entropy:0.000 - actor/lr:0.000 - response_length/mean:91.500\n"
    )
    assert view.decimals["entropy"] == 3


def test_validation_alone_belongs_to_its_step() -> None:
    view = read_text("step:0 - val-core/set/acc/mean@1:0.25\nstep:1 - actor/entropy:0.5\n")
    (name,) = [name for name in view.metrics if "set" in name]
    assert (steps_of(view, name), values_of(view, name)) == ([0], [0.25])


def test_slime_counts_rollouts_and_steps_apart() -> None:
    lines = [
        f"(RolloutManager pid=5) [2026-01-01 10:00:0{n}] r.py:1 - perf {n}: "
        f"{{'rollout/response_len/mean': {100 + n}.5, 'perf/rollout_time': 9.0}}\n"
        for n in range(3)
    ]
    lines += [
        f"(TrainActor pid=6) [2026-01-01 10:01:0{n}] m.py:1 - step {n}: "
        f"{{'train/loss': 0.5, 'train/grad_norm': {n}.0}}\n"
        for n in range(3)
    ]
    view = read_text("".join(lines))
    assert steps_of(view, "grad_norm") == [0, 1, 2]
    assert steps_of(view, "completions/mean_length") == [0, 1, 2]
    assert (view.framework.name, "runs" in view.facts) == ("slime", False)


def test_openrlhf_rows_and_the_bar_with_metrics() -> None:
    dicts = read_text("Global step 3: {'policy_loss': 0.5, 'reward': 0.25, 'kl': 0.001}\n")
    assert steps_of(dicts, "reward") == [3]
    bars = read_text(
        "Train epoch [1/1]:  50%|#####     | 1/2 [00:06<00:06, 6.6s/it, pg=-0.5, rm=0.25, kl=0.5]\n"
        "Train epoch [1/1]: 100%|##########| 2/2 [00:12<00:00, 6.6s/it, pg=0.5, rm=0.5, kl=1e-3]\n"
        "Train epoch [1/1]:  50%|#####     | 1/2 [00:06<00:06, 6.6s/it, pg=0.25, rm=0.75, kl=nan]\n"
    )
    # The bar begins anew with each rollout; the run does not.
    assert steps_of(bars, "kl") == [1, 2, 3]
    assert "runs" not in bars.facts


def test_ms_swift_says_step_and_total_in_one_text() -> None:
    view = read_text(
        '{"loss": NaN, "reward": 0.5, "global_step/max_steps": "5/40", "elapsed_time": "1m 2s"}\n'
        '{"loss": 0.5, "reward": 0.75, "global_step/max_steps": "6/40", "elapsed_time": "1m 9s"}\n'
    )
    assert steps_of(view, "reward") == [5, 6]
    assert view.total_steps == 40
    assert "elapsed_time" not in view.metrics


def test_prime_rl_pipes_with_units() -> None:
    view = read_text(
        "10:00:01 SUCCESS Step 7 | Time: 40.50s | Reward: 0.2500 | Throughput: 5,166.5 tokens/s | "
        "Seq. Length: 814.0 tokens/sample | Async Level: 1 | Max. Off-Policy Level: 2\n"
        "10:00:01    INFO Starting orchestrator step 8\n"
        "10:00:09    INFO waiting\n"
    )
    assert (steps_of(view, "reward"), values_of(view, "reward")) == ([7], [0.25])
    assert values_of(view, "time/step") == [40.5]
    assert values_of(view, "throughput/tokens_per_s") == [5166.5]
    assert view.decimals["reward"] == 4
    assert view.log.lines[-1].step == 8


def test_the_distance_to_the_engine_is_not_taken_for_kl_to_the_reference() -> None:
    line = "10:0{i}:01 SUCCESS Step {i} | Loss: 0.0012 | Mismatch KL: 0.000{i} | Grad. Norm: 0.1\n"
    view = read_text("".join(line.format(i=i) for i in range(1, 5)))
    assert values_of(view, "sampling/k3") == [0.0001, 0.0002, 0.0003, 0.0004]
    assert "kl" not in view.metrics


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Critic Loss", "critic/loss"),
        ("Entropy Loss", None),
        ("Test Loss", "eval/loss"),
        ("Max Reward", None),
        ("Teacher Entropy", None),
        ("Unclipped Grad Norm", None),
        ("Smoothed Loss", "train/loss"),
        ("Avg Train Loss", "train/loss"),
        ("Validation Loss", "eval/loss"),
    ],
)
def test_a_word_before_a_metrics_name_makes_it_another_one(name: str, ours: str | None) -> None:
    line = f"10:00:01 INFO Step {{i}} | Time: 3.1s | {name}: 0.{{i}} | Throughput: 900\n"
    view = read_text("".join(line.format(i=i) for i in range(1, 9)))
    known = {"train/loss", "eval/loss", "reward", "entropy", "grad_norm", "critic/loss"}
    assert known & view.metrics.keys() == ({ours} if ours else set())


def test_an_early_areal_names_its_actor_otherwise() -> None:
    table = (
        "(AReaL) 20250812-10:00:0{i}.000 StatsLogger INFO: Epoch 1/2 Step {i}/40 Train step "
        "{i}/80 done.\n"
        "\u2502 grpo_actor/task_reward/avg \u2502 2.0000e-01 \u2502\n"
        "\u2502 grpo_actor/update/grad_norm \u2502 nan \u2502\n"
    )
    view = read_text("".join(table.format(i=i) for i in range(1, 4)))
    assert values_of(view, "reward") == [0.2, 0.2, 0.2]
    assert len(view.metrics["grad_norm"]) == 3


def test_torchtunes_file_of_metrics_names_its_framework() -> None:
    line = "Step {i} | loss:1.{i} lr:2e-05 tokens_per_second_per_gpu:2300.5 peak_memory_active:17.2"
    view = read_text("\n".join(line.format(i=i) for i in range(1, 9)))
    assert view.framework.name == "torchtune"
    assert values_of(view, "memory/max_active")[0] == 17.2 * 2**30


def test_pairs_of_chosen_and_rejected_answers_are_preference_training() -> None:
    bar = (
        "Train step of epoch 0: {i}%|x| {i}/99 [00:0{i}<01:00, 1.5it/s, loss=0.69{i}, acc=0.5, "
        "chosen_reward=0.1, reject_reward=0.2, loss_mean=0.69, acc_mean=0.5, lr=9e-06]\n"
    )
    view = read_text("".join(bar.format(i=i) for i in range(1, 9)))
    assert view.kind is Kind.PREFERENCE
    assert values_of(view, "preference/margin") == [0.1 - 0.2] * 8


def test_blocks_below_a_header() -> None:
    nemo = read_text(
        "========== Step 31/500 ==========\n\u25b6 Training policy...\n\U0001f4ca Results:\n"
        "  \u2022 Loss: -0.0091\n  \u2022 Avg Reward: 0.4109\n"
        "  \u2022 generation: 43.55s (48.0%)\n"
        '{"train/token_mult_prob_error": 1.5, "train/grad_norm": 0.5}\n'
        "========== Step 32/500 ==========\n  \u2022 Loss: 0.0100\n  \u2022 Avg Reward: 0.4209\n"
    )
    assert (steps_of(nemo, "reward"), nemo.total_steps) == ([31, 32], 500)
    assert steps_of(nemo, "grad_norm") == [31]
    forge = read_text(
        "=== [global_reduce] - METRICS STEP 1 ===\n  episode/total_samples: 8.0\n"
        "  grpo_loss/kl_divergence_mean: 1,568,987.96\n"
        "=== [global_reduce] - METRICS STEP 2 ===\n  grpo_loss/kl_divergence_mean: 2.50\n"
    )
    name = next(name for name in forge.metrics if "kl" in name)
    assert values_of(forge, name) == [1568987.96, 2.5]


def test_rows_below_a_header_that_comes_now_and_then_are_counted_on() -> None:
    row = "{'loss': 0.5, 'reward': 0.25}\n"
    view = read_text(f"---- Step 10 ----\n{row}{row}---- Step 20 ----\n{row}{row}")
    assert steps_of(view, "reward") == [10, 11, 20, 21]
    again = read_text(f"Step 1\n{row}Step 2\n{row}Step 1\n{row}")
    assert steps_of(again, "reward") == [1]
    assert len(again.facts["runs"]) == 1


def test_torchtitan_megatron_and_lists_with_commas() -> None:
    titan = read_text(
        "[rank0]:[titan] 2026-01-01 10:00:00,1 - root - INFO - step:  5  loss:  7.9000  "
        "grad_norm:  1.1790  lr: 0.0400  tps: 6,200  mfu: 12.50%\n"
        "[rank1]:[titan] 2026-01-01 10:00:00,1 - root - INFO - step:  5  loss:  9.9000  "
        "grad_norm:  1.1790  lr: 0.0400  tps: 6,200  mfu: 12.50%\n"
    )
    assert (steps_of(titan, "train/loss"), values_of(titan, "train/loss")) == ([5], [7.9])
    assert values_of(titan, "throughput/tokens_per_s_per_device") == [6200.0]
    megatron = read_text(
        " iteration       10/     100 | consumed samples:         640 | elapsed time per iteration "
        "(ms): 1204.5 | learning rate: 1.0E-06 | lm loss: 1.25E+00 | grad norm: 0.500 |\n"
    )
    assert (steps_of(megatron, "train/loss"), megatron.total_steps) == ([10], 100)
    assert values_of(megatron, "train/loss") == [1.25]
    commas = read_text(
        "[rank0] 2026-01-01 INFO t.py: step 3/40, loss: 11.93, grad_norm: 0.00, mem: 31.0 GB\n"
    )
    assert (steps_of(commas, "train/loss"), commas.total_steps) == ([3], 40)
    assert commas.decimals["grad_norm"] == 2


def test_mmengine_counts_through_epochs_and_litgpt_by_iteration() -> None:
    head = "02/19 22:31:31 - mmengine - INFO - "
    mmengine = read_text(
        f"{head}Epoch(train)  [1][100/735]  lr: 1.9960e-04  eta: 2:50:00  loss: 3.4100\n"
        f"{head}Epoch(train)  [2][100/735]  lr: 1.9960e-04  eta: 2:50:00  loss: 2.4100\n"
        f"{head}Epoch(val)  [2][10/10]  loss: 2.9000\n"
    )
    assert steps_of(mmengine, "train/loss") == [100, 835]
    assert "eta" not in mmengine.metrics
    litgpt = read_text(
        "Epoch 1 | iter 8 step 2 | loss train: 1.250, val: n/a | iter time: 220.10 ms (step)\n"
        "Epoch 1 | iter 9 step 2 | loss train: 1.125, val: 1.500 | iter time: 220.10 ms\n"
    )
    assert (steps_of(litgpt, "train/loss"), values_of(litgpt, "eval/loss")) == ([8, 9], [1.5])


def test_mlx_prints_the_evaluation_loss_in_lines_of_its_own() -> None:
    found = read_text(
        "Iter 1: Val loss 2.480, Val took 0.732s\n"
        "Iter 10: Train loss 2.363, Learning Rate 1.000e-05, It/sec 1.022, Tokens/sec 88.083\n"
        "Iter 200: Val loss nan, Val took 0.731s\n"
    )
    assert steps_of(found, "eval/loss") == [1, 200]
    assert values_of(found, "eval/loss")[0] == 2.48
    assert (steps_of(found, "train/loss"), values_of(found, "train/loss")) == ([10], [2.363])


def test_a_reward_function_that_stands_alone_is_the_reward() -> None:
    block = (
        "=== [global_reduce] - METRICS STEP {0} ===\n"
        "  reward/evaluate_response/avg_{1}_reward: 0.5\n"
    )
    alone = read_text("".join(block.format(step, "Sum") for step in range(1, 4)))
    assert values_of(alone, "reward") == [0.5, 0.5, 0.5]
    shape = read_text("".join(block.format(step, "Format") for step in range(1, 4)))
    assert "reward" not in shape.metrics


def test_rollouts_without_advantage_belong_to_the_step_that_follows() -> None:
    text = (
        "10:00:01    INFO Detected 30/64 rollouts (gibberish=2, zero_advantage=48), enforced 48\n"
        "10:00:02 SUCCESS Step 5 | Time: 2.10s | Reward: 0.9500 | Seq. Length: 300.0 tokens\n"
    )
    view = read_text(text)
    assert (steps_of(view, "frac_reward_zero_std"), view.log.has("zero_advantage")) == ([5], True)
    assert values_of(view, "frac_reward_zero_std") == [0.75]


def test_a_framework_is_known_by_its_rows_and_by_paths_of_windows() -> None:
    row = "Global step 4: {'policy_loss': 0.01, 'reward': 0.4, 'ppo_kl': 0.001}\n"
    assert read_text(f"\u2728 {row}").framework.name == "openrlhf"
    assert read_text(row).framework.name != "slime"
    frame = 'File "D:\\py\\Lib\\site-packages\\trl\\trainer\\sft_config.py", line 9, in f\n'
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    assert read_text(frame, config=settings).framework.name == "trl"
    assert read_text("a word\n", config=settings).framework.name != "deepspeed"


def test_padded_counts_and_two_names_of_the_loss_are_one_series() -> None:
    padded = read_text(
        "Epoch 0 | iter  9 step  9 | loss train: 1.250, val: n/a | iter time: 3.101 s (step)\n"
        "Epoch 0 | iter 10 step 10 | loss train: nan, val: n/a | iter time: 3.101 s (step)\n"
    )
    assert steps_of(padded, "train/loss") == [9, 10]
    rows = [
        f"step {step}, {'loss' if step > 4 else 'train_loss'}: 1.5, lr: 1e-5" for step in range(9)
    ]
    assert steps_of(read_text("\n".join(rows)), "train/loss") == list(range(9))


@pytest.mark.parametrize("sign", ["\t", "   ", " | "])
def test_a_notebook_table(sign: str) -> None:
    rows = [
        ["Step", "Training Loss", "reward"],
        ["1", "0.500000", "0.125000"],
        ["2", "No log", "1.0"],
    ]
    view = read_text("\n".join(sign.join(row) for row in rows))
    assert (steps_of(view, "train/loss"), steps_of(view, "reward")) == ([1], [1, 2])


def test_a_notebook_table_of_epochs_whose_names_hold_digits() -> None:
    view = read_text(
        "Using device: cuda\n\nEpoch\tTraining Loss\tValidation Loss\tMacro F1\n"
        "1\t0.747868\t0.746368\t0.787534\n"
    )
    assert {"train/loss", "eval/loss", "eval_macro_f1"} <= set(view.metrics)


def test_engine_lines_are_metrics_and_stay_in_the_log() -> None:
    line = (
        "[2026-01-01 10:00:00 TP0] Decode batch, #running-req: 6, token usage: 0.83, #queue-req: {}"
    )
    alone = read_text("\n".join(line.format(n) for n in range(3)))
    assert len(alone.log.lines) == 3
    assert [len(series) for series in alone.metrics.values()] == [3, 3, 3]
    # Within training they are of the step that was being trained.
    mixed = read_text("\n".join(f"step:{n} - actor/entropy:0.5\n{line.format(n)}" for n in (7, 8)))
    assert mixed.last_step == 8
    spec = read_text(
        "INFO SpecDecoding metrics: Draft acceptance rate: 62.0%, Accepted: 10 tokens\n"
    )
    assert 0.62 in [series.latest for series in spec.metrics.values()]


def test_a_second_run_in_one_log_is_kept_apart_with_its_settings() -> None:
    def rows(loss: float) -> str:
        return "".join(f"{{'loss': {loss}, 'epoch': {n / 10}}}\n" for n in range(1, 4))

    view = read_text(
        f"gradient_accumulation_steps=1\n{rows(1.0)}gradient_accumulation_steps=4\n{rows(4.0)}"
    )
    assert values_of(view, "train/loss") == [4.0] * 3
    (first,) = view.facts["runs"]
    assert first["label"] == "gradient_accumulation_steps=1"
    assert first["metrics"]["train/loss"].values.tolist() == [1.0] * 3
    assert 1 in first["settings"].values()
    assert view.raw_settings["gradient_accumulation_steps"] == 4


def test_a_resumed_run_goes_on_from_where_it_was_resumed() -> None:
    def row(step: int, loss: float) -> str:
        return f"step:{step} - train/loss:{loss} - actor/entropy:0.5\n"

    view = read_text("".join(row(n, 1.0) for n in range(1, 7)) + row(4, 2.0) + row(5, 2.0))
    assert steps_of(view, "train/loss") == [1, 2, 3, 4, 5]
    assert values_of(view, "train/loss") == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert len(view.facts["runs"][0]["metrics"]["train/loss"]) == 6


def test_settings_from_a_log_have_our_names_and_values() -> None:
    view = read_text(
        "$ python -m verl.trainer.main_ppo --trainer.n_gpus_per_node 8 --dry-run\n"
        "(TaskRunner pid=1) {'actor_rollout_ref': {'actor': {'optim': {'lr': 1e-06},\n"
        "(TaskRunner pid=1)                                  'use_kl_loss': True},\n"
        "(TaskRunner pid=1)                        'rollout': {'n': 5, 'temperature': 1.0}}}\n"
        "(TaskRunner pid=1) Total training steps: 1,232\n"
        "step:1 - actor/entropy:0.5\n"
    )
    assert view.setting("trainer.lr") == 1e-06
    assert view.setting("rollout.samples_per_prompt") == 5
    assert view.raw_settings["actor_rollout_ref.actor.use_kl_loss"] is True
    assert view.raw_settings["dry-run"] is True
    assert view.total_steps == 1232


def test_settings_of_a_namespace_a_banner_and_a_version() -> None:
    view = read_text(
        "args: Namespace(learning_rate=1e-06, name='a, b', tags=['x'], path=None)\n"
        "transformers==4.50.3\n"
        "[INFO|trainer.py:2421] 2026-01-01 >>   Gradient Accumulation steps = 4\n"
        "[INFO|trainer.py:2422] 2026-01-01 >>   Total optimization steps = 15,600\n"
        'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g(learning_rate=9)\n'
    )
    assert view.number("trainer.lr") == 1e-06
    assert view.raw_settings["name"] == "a, b"
    assert view.raw_settings["transformers"] == "4.50.3"
    assert view.raw_settings["gradient_accumulation_steps"] == 4
    assert view.total_steps == 15600


def test_the_users_config_goes_before_what_the_log_prints() -> None:
    config = {"actor_rollout_ref": {"rollout": {"n": 8}}, "custom_reward_function": {"name": "f"}}
    view = read_text("rollout.n=5\nstep:1 - actor/entropy:0.5\n", config=config)
    assert view.setting("rollout.samples_per_prompt") == 8
    # "name" alone says nothing about what is named.
    assert "f" not in view.settings.values()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("INFO Weight update took 14.2s", "weights_published"),
        ("INFO 01-01 Sleep mode freed 40.10 GiB memory, 2.00 GiB is still in use", "engine_slept"),
        ("UserWarning: the ratio exceeds threshold 10.00. Skipping batch.", "step_skipped"),
        ("Saving model checkpoint to out/checkpoint-10", "checkpoint_saved"),
        ("Resuming training from checkpoint 30", "run_resumed"),
    ],
)
def test_events_are_recognised_at_their_step(line: str, kind: str) -> None:
    view = read_text(f"{{'loss': 1.0}}\n{line}\n")
    (event,) = view.events
    assert (event.kind, event.step) == (kind, 1)
    if kind == "engine_slept":
        assert event.fields["gib"] == [40.1, 2.0]


def test_samples_of_one_line_and_below_tags() -> None:
    view = read_text(
        "(RolloutManager pid=9) rollout 2 sample: 'it\\'s 7' finish_reason=length\n"
        "query: 'How many?' response: '' reward=-1.0\n"
        "[prompt] What is 2+2?\n[response] Let me see.\nIt is 4.\n[ground_truth] 4\n[score] 0.5\n"
    )
    first, second, third = view.samples
    assert (first.step, first.text, first.stop_reason) == (2, "it's 7", "length")
    assert (second.prompt, second.text, second.reward) == ("How many?", "", -1.0)
    assert (third.prompt, third.text) == ("What is 2+2?", "Let me see.\nIt is 4.")
    assert third.reward == 0.5


def test_samples_of_a_drawn_table_in_a_panel() -> None:
    view = read_text(
        "\u256d\u2500\u2500\u2500\u2500 Step 10 \u2500\u2500\u2500\u2500\u2500\u2500\u256e\n"
        "\u2502 \u250f\u2501\u2501\u2533\u2501\u2501\u2513 \u2502\n"
        "\u2502 \u2503 Prompt \u2503 Completion \u2503 exact \u2503 Advantage \u2503 \u2502\n"
        "\u2502 \u2521\u2501\u2501\u2547\u2501\u2501\u2529 \u2502\n"
        "\u2502 \u2502 2+2? \u2502 It is      \u2502 0.25 \u2502 -0.71 \u2502 \u2502\n"
        "\u2502 \u2502      \u2502 4          \u2502      \u2502       \u2502 \u2502\n"
        "\u2502 \u251c\u2500\u2500\u253c\u2500\u2500\u2524 \u2502\n"
        "\u2502 \u2502 3+3? \u2502            \u2502 1.00 \u2502  0.71 \u2502 \u2502\n"
        "\u2502 \u2514\u2500\u2500\u2534\u2500\u2500\u2518 \u2502\n"
    )
    first, second = view.samples
    assert (first.step, first.prompt, first.text, first.reward) == (10, "2+2?", "It is 4", 0.25)
    assert (second.prompt, second.text, second.reward) == ("3+3?", "", 1.0)


def test_preference_runs_and_ppo_are_told_apart() -> None:
    dpo = read_text("{'loss': 0.5, 'rewards/chosen': 0.5, 'rewards/margins': 1.5, 'epoch': 0.1}\n")
    ppo = read_text("{'objective/kl': 0.5, 'ppo/policy/ratio': 1.0, 'ppo/mean_scores': 0.5}\n")
    assert (dpo.kind, ppo.kind) == (Kind.PREFERENCE, Kind.RL)


def test_ppo_without_an_end_token_has_only_cut_completions() -> None:
    row = "{{'objective/scores': 0.5, 'val/num_eos_tokens': {}, 'episode': {}}}"
    never = read_text("\n".join(row.format(0, n) for n in range(1, 9)))
    assert list(never.metrics["completions/clipped_ratio"].values) == [1.0] * 8
    some = read_text("\n".join(row.format(n % 2, n) for n in range(1, 9)))
    assert "completions/clipped_ratio" not in some.metrics


def test_a_notebook_that_shows_the_loss_alone_is_of_its_trainer() -> None:
    table = "Step\tTraining Loss\n" + "".join(f"{n}\t0.000000\n" for n in range(1, 9))
    assert read_text("Initializing GRPOTrainer...\n" + table).kind is Kind.RL
    assert read_text("Patched GRPOTrainer, SFTTrainer\n" + table).kind is Kind.SFT


def test_the_short_log_of_llama_factory_tells_preference_training() -> None:
    row = (
        '{"current_steps": 20, "total_steps": 90, "loss": 1.4, "accuracy": 0.5, "lr": 4e-06, '
        '"epoch": 0.2, "percentage": 22.2, "elapsed_time": "0:00:27", "remaining_time": "0:01:35"}'
    )
    assert read_text(row + "\n").kind is Kind.PREFERENCE


def test_what_looks_like_a_row_and_is_none_stays_in_the_log() -> None:
    text = (
        "Demands: {'CPU': 2.0} * 1 (SPREAD): 1+ pending placement groups\n"
        "config: {'learning_rate': 1e-05, 'seed': 3, 'output_dir': 'x'}\n"
        "ValueError: loss is negative: see step 3\n"
        'Traceback (most recent call last):\n  File "loss.py", line 7\n'
    )
    view = read_text(text)
    assert not view.metrics
    assert len(view.log.lines) == 5
    assert view.setting("trainer.lr") == 1e-05


def test_metrics_that_no_table_knows_keep_their_names() -> None:
    view = read_text("step:1 - actor/entropy:0.5 - mine/of_my_own:3.5\n")
    assert values_of(view, "mine/of_my_own") == [3.5]


def test_a_setting_with_hundreds_of_digits_is_no_trap() -> None:
    view = read_text("", config={"learning_rate": int("9" * 400), "beta": -int("9" * 400)})
    assert view.raw_settings["learning_rate"] == float("inf")
    diagnose(view, RULES)


def test_a_reward_of_episodes_under_a_heading_of_the_user_is_read() -> None:
    lines = ["custom/eval_episode_reward_mean,custom/episode_reward_mean,train/approx_kl"]
    lines += [f"0,{i},0.0{i}" for i in range(1, 9)]
    assert read_text("\n".join(lines)).latest("reward") == 8


def test_baselines_reward_kl_and_clip_share_are_read() -> None:
    lines = ["approxkl,clipfrac,eprewmean,policy_entropy"]
    lines += [f"0.{i},0.5,{i},1.{i}" for i in range(1, 9)]
    view = read_text("\n".join(lines))
    assert view.latest("reward") == 8
    assert view.latest("policy/update_kl") == 0.8
    assert view.latest("clip_ratio/region_mean") == 0.5
    assert view.latest("entropy") == 1.8


def test_stable_baselines_reward_and_entropy_are_read() -> None:
    lines = ["rollout/ep_rew_mean,train/entropy_loss,train/backbone_lr,train/head_lr"]
    lines += [f"{i},-0.{9 - i},1e-5,{i}e-4" for i in range(1, 9)]
    view = read_text("\n".join(lines))
    reward, entropy, rate = (view.series(n) for n in ("reward", "entropy", "learning_rate"))
    assert reward is not None
    assert reward.latest == 8
    # Logged as a loss, which is the negative entropy.
    assert entropy is not None
    assert entropy.first == 0.8
    # Of several groups' rates the highest.
    assert rate is not None
    assert rate.latest == 8e-4


def test_rewards_of_form_and_of_right_answers_are_told_apart() -> None:
    row = (
        "{{'step': {i}, 'reward': 0.5, 'format_reward': 0.9, 'accuracy_reward': 0.1, 'kl': 0.01}}\n"
    )
    view = read_text("".join(row.format(i=i) for i in range(1, 9)))
    assert values_of(view, "rewards/format/mean")[0] == 0.9
    assert values_of(view, "rewards/accuracy/mean")[0] == 0.1
