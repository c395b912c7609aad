"""`homeostat import`: the rows, engines and defaults of other frameworks keep their meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homeostat.importing.convert import convert
from homeostat.importing.entries import Imported
from homeostat.importing.reading import read_foreign
from homeostat.importing.recognise import recognise

OPENRLHF = "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d.jsonl --max_len 64 "
VERL = "torchrun -m verl.trainer.{} model.partial_pretrain=m data.train_files=a.parquet "
VERL += "data.val_files=b.parquet data.max_length=64 "
SLIME = "python3 train.py --hf-checkpoint m --prompt-data p.jsonl --n-samples-per-prompt 4 "
QLORA = """\
base_model: m
rl: grpo
trl: {use_vllm: true, reward_funcs: [r.f], num_generations: 4}
datasets: [{path: rows.jsonl}]
adapter: qlora
load_in_8bit: false
load_in_4bit: true
lora_r: 8
micro_batch_size: 4
"""


def imported(text: str, folder: Path, **how: Any) -> Imported:
    name = "a.yaml" if text.startswith("base_model") else "a.sh"
    name = "a.py" if text.startswith("from") else name
    (folder / name).write_text(text)
    file = read_foreign(folder / name)
    framework = recognise(file)
    assert framework is not None
    found = convert(file, framework, stem="a", **how)
    assert not found.problems, found.problems
    return found


def source(text: str, folder: Path, part: str = "train") -> dict[str, Any]:
    found = dict(imported(text, folder).recipe["data"][part][0])
    found.pop("path")
    return found


PAIRS = {"type": "prompt_completion", "prompt_column": "q", "completion_column": "a"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{OPENRLHF} --input_key q --output_key a --apply_chat_template", PAIRS),
        (f"{OPENRLHF} --input_key q --output_key a", {**PAIRS, "chat": False}),
        (
            f"{OPENRLHF} --input_key c --apply_chat_template",
            {"type": "messages", "messages_column": "c", "turns": "last"},
        ),
        (
            f"{OPENRLHF} --input_key c --apply_chat_template --multiturn",
            {"type": "messages", "messages_column": "c"},
        ),
        (f"{OPENRLHF} --input_key t", {"type": "text", "text_column": "t"}),
        (VERL.format("fsdp_sft_trainer") + "data.prompt_key=q data.response_key=a", PAIRS),
        (
            VERL.format("fsdp_sft_trainer"),
            {
                "type": "prompt_completion",
                "prompt_column": "question",
                "completion_column": "answer",
            },
        ),
        (
            VERL.format("fsdp_sft_trainer")
            + "data.multiturn.enable=true data.multiturn.messages_key=c",
            {"type": "messages", "messages_column": "c"},
        ),
        (VERL.format("sft_trainer"), {"type": "messages"}),
        (SLIME, {"type": "prompts", "prompt_column": "input", "chat": False}),
        (
            f"{SLIME} --input-key q --apply-chat-template",
            {"type": "prompts", "prompt_column": "q"},
        ),
    ],
)
def test_rows_are_read_as_they_are_there(
    text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    assert source(text, tmp_path) == expected
    if "val_files" in text:
        assert source(text, tmp_path, "validation") == expected


def test_a_part_of_a_column_is_to_be_looked_at(tmp_path: Path) -> None:
    keys = "data.prompt_key=q data.prompt_dict_keys=['x'] data.response_key=a"
    found = imported(VERL.format("fsdp_sft_trainer") + keys, tmp_path)
    assert "data.train.0.prompt_column" in found.comments
    assert [one.key for one in found.needed] == ["data.train.0.prompt_column"]


def test_an_adapter_on_a_quantised_base_is_sampled_by_the_native_engine(tmp_path: Path) -> None:
    recipe = imported(QLORA, tmp_path).recipe
    assert recipe["engine"] == {"type": "native"}
    assert recipe["model"]["quantization"] == "nf4"


def test_a_switch_that_is_off_does_not_hide_the_one_that_quantises(tmp_path: Path) -> None:
    text = QLORA.replace("rl: grpo\n", "").replace("trl: {", "wandb_mode: x\nx: {")
    recipe = imported(text, tmp_path, devices=2).recipe
    assert recipe["model"]["quantization"] == "nf4"
    assert "cluster" not in recipe


TRL = "trl {} --model_name_or_path m --dataset_name d.jsonl --learning_rate 1e-6 "
SCRIPT = """\
from trl import {0}Config, {0}Trainer
args = {0}Config(output_dir="out", per_device_train_batch_size=8, {1})
{0}Trainer(model="m", args=args, train_dataset=load_dataset("a/b"), peft_config=LoraConfig({2}))
"""


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_the_beta_of_preferences_is_no_kl_penalty(verb: str, tmp_path: Path) -> None:
    recipe = imported(f"{TRL.format(verb)} --beta 0.2", tmp_path).recipe
    assert recipe["preference"] == {"beta": 0.2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SCRIPT.format("SFT", "bf16=True", ""), {"rank": 8, "alpha": 8}),
        (SCRIPT.format("SFT", "bf16=True", "r=4"), {"rank": 4, "alpha": 8}),
        (f"{TRL.format('sft')} --use_peft", {"dropout": 0.05}),
    ],
)
def test_an_adapter_has_the_defaults_of_peft_or_of_trl(
    text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    lora = imported(text, tmp_path).recipe["lora"]
    assert lora == {**expected, "targets": ["q_proj", "v_proj"]}


def test_rloo_of_trl_has_its_own_defaults(tmp_path: Path) -> None:
    recipe = imported(SCRIPT.format("RLOO", "bf16=True", ""), tmp_path).recipe
    penalty = {"coefficient": 0.05, "place": "reward", "estimator": "k1"}
    assert recipe["algorithm"] == {"type": "rloo", "kl": penalty}
    assert recipe["rollout"] == {"prompts_per_step": 4, "samples_per_prompt": 2}


PPO = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet "
PPO += "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
RAY = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d.jsonl --input_key q "
RAY += "--advantage_estimator reinforce --n_samples_per_prompt 4 --actor_learning_rate 1e-6 "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PPO, {"rollout.prompts_per_step": 1024, "trainer.updates_per_step": 4,
               "trainer.epochs": 30, "data.max_length": 512, "algorithm.dual_clip": 3.0}),
        (f"{PPO} data.train_batch_size=512 trainer.total_training_steps=9",
         {"rollout.prompts_per_step": 512, "trainer.updates_per_step": 2, "trainer.epochs": None}),
        (f"{PPO} data.train_batch_size=128", {"trainer.updates_per_step": None}),
        (VERL.format("sft_trainer"), {"trainer.batch_rows": 256, "trainer.epochs": 4}),
        (RAY, {"rollout.prompts_per_step": 1024, "trainer.updates_per_step": 32}),
        (OPENRLHF, {"trainer.batch_rows": 128, "trainer.epochs": 2, "trainer.lr": 5e-6}),
    ],
)  # fmt: skip
def test_sizes_and_lengths_that_are_not_given_are_those_there(
    text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    recipe = imported(text, tmp_path).recipe
    for key, value in expected.items():
        section, name = key.split(".")
        assert recipe[section].get(name) == value, key


LLAMA = "model_name_or_path: m\nstage: dpo\npref_loss: simpo\nfinetuning_type: full\n"


def test_a_reward_model_of_axolotl_is_one(tmp_path: Path) -> None:
    start = QLORA.partition("rl: grpo")[0]
    text = f"{start}reward_model: true\ndatasets: [{{path: rows.jsonl}}]\nmicro_batch_size: 4\n"
    recipe = imported(text, tmp_path).recipe
    assert recipe["algorithm"] == {"type": "reward_model"}
    assert recipe["data"]["train"][0]["type"] == "preference"


def test_simpo_has_the_weight_and_margin_that_it_has_there(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{LLAMA}dataset: d\ncutoff_len: 64\n")
    file = read_foreign(tmp_path / "a.yaml")
    framework = recognise(file)
    assert framework is not None
    recipe = convert(file, framework, stem="a").recipe
    assert recipe["preference"]["beta"] == 0.1
    assert recipe["algorithm"] == {"type": "simpo", "target_margin": 0.5}


def test_rates_scales_and_corrections_of_slime_are_taken_over(tmp_path: Path) -> None:
    more = "--lr 1e-6 --min-lr 1e-7 --lr-decay-style cosine --disable-grpo-std-normalization "
    recipe = imported(f"{SLIME}{more} --use-tis --tis-clip 3", tmp_path).recipe
    assert recipe["trainer"]["schedule"]["min_lr_share"] == 0.1
    assert recipe["algorithm"]["scale"] == "none"
    assert recipe["algorithm"]["correction"] == {"weight": {"type": "token", "high": 3}}


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_a_fixed_penalty_of_verl_has_no_target(kind: str, tmp_path: Path) -> None:
    more = f"algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type={kind} "
    more += "algorithm.kl_ctrl.kl_coef=0.002 algorithm.kl_ctrl.target_kl=0.1"
    kl = imported(f"{PPO} {more}", tmp_path).recipe["algorithm"]["kl"]
    assert ("target" in kl) == (kind == "adaptive")
