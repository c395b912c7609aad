"""`homeostat import`: settings of other frameworks become a recipe that its own checks accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.config import load_config
from homeostat.errors import ConfigError
from homeostat.importing.convert import convert
from homeostat.importing.entries import Entry, Imported, Status
from homeostat.importing.hints import load_recipe
from homeostat.importing.reading import read_foreign
from homeostat.importing.recognise import recognise
from homeostat.importing.render import render_listing, render_recipe

AXOLOTL = """\
base_model: some/model
datasets:
  - path: rows.jsonl
    type: alpaca
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
tensor_parallel_size: 2
val_set_size: 0
flux_capacitor: 3
hub_token: hf_not_to_be_shown
"""
TRL_SHELL = """\
#!/bin/bash
# --learning_rate 1.0 is a comment
RATE=${RATE:-2e-6}
ARGS=(
   --beta 0.04   # a weight
   --num_generations 4
)
accelerate launch --num_processes 2 grpo.py \\
  --model_name_or_path ./model --dataset_name ./prompts.jsonl --learning_rate $RATE \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \\
  --max_completion_length 64 --max_steps 30 --num_train_epochs 3 --seed $SEED "${ARGS[@]}" $@
"""
TRL_PYTHON = """\
from trl import DPOConfig, DPOTrainer
open("touched", "w").write("executed")
NAME = "./base"
model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.bfloat16)
config = DPOConfig(output_dir="out/dpo", beta=0.2, learning_rate=1e-6, warmup_ratio=compute())
peft = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
DPOTrainer(model=model, args=config, train_dataset=load_dataset("pairs.jsonl"), peft_config=peft)
"""
LLAMA_FACTORY = """\
model_name_or_path: ./model
stage: dpo
finetuning_type: lora
lora_rank: 4
dataset: a, b
template: llama3
cutoff_len: 256
pref_beta: 0.3
pref_loss: orpo
per_device_train_batch_size: 2
num_train_epochs: 1.5
warmup_ratio: 0.1
"""
VERL = """\
set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files='["test.parquet"]' \\
    data.train_batch_size=64 data.max_prompt_length=128 data.max_response_length=256 \\
    data.truncation='error' actor_rollout_ref.model.path=./model \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.name=sglang \\
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_epochs=3 trainer.test_freq=5
"""
SLIME = """\
ROLLOUT_ARGS=(
   --prompt-data prompts.jsonl
   --input-key question
   --label-key solution
   --rm-type my_grader
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --rollout-max-response-len 128
   --global-batch-size 64
   --num-rollout 50
)
ray job submit --runtime-env-json="{}" -- python3 train.py --hf-checkpoint ./model \\
   --advantage-estimator gspo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 3e-4 \\
   --tensor-model-parallel-size 4 --lr 1e-6 --lr-decay-style constant \\
   --wandb-key abcdef0123456789 ${ROLLOUT_ARGS[@]} ${MODEL_ARGS[@]}
"""
OPENRLHF = """\
read -r -d '' commands <<EOF
openrlhf.cli.train_dpo --model.model_name_or_path ./model --data.dataset pairs.jsonl \\
   --train.batch_size 32 --train.micro_batch_size 1 --train.max_epochs 2 --data.max_len 640 \\
   --adam.lr 5e-7 --model.beta 0.2 --data.chosen_key good --data.rejected_key bad
EOF
deepspeed --module $commands
"""
FILES = {
    "axolotl": ("a.yml", AXOLOTL),
    "trl": ("t.sh", TRL_SHELL),
    "llama_factory": ("l.yaml", LLAMA_FACTORY),
    "verl": ("v.sh", VERL),
    "slime": ("s.sh", SLIME),
    "openrlhf": ("o.sh", OPENRLHF),
}


def imported(folder: Path, name: str, text: str, *, devices: int | None = None) -> Imported:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    file = read_foreign(path)
    framework = recognise(file)
    assert framework is not None
    return convert(file, framework, stem="run", devices=devices)


def entry(found: Imported, name: str) -> Entry:
    return next(one for one in found.entries if one.given.name == name)


def at(recipe: dict[str, Any], place: str) -> Any:
    here: Any = recipe
    for part in place.split("."):
        here = here[int(part)] if part.isdigit() else here[part]
    return here


@pytest.mark.parametrize("framework", FILES)
def test_recipes_are_accepted_and_every_setting_is_listed_once(
    framework: str, tmp_path: Path
) -> None:
    name, text = FILES[framework]
    found = imported(tmp_path, name, text)
    assert (found.framework, found.problems) == (framework, ())
    given = [one.given.name for one in found.entries]
    assert given == [one.name for one in read_foreign(tmp_path / name).settings]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(render_recipe(found, source=name), encoding="utf-8")
    loaded = load_config(recipe)
    assert loaded.algorithm.type == found.recipe["algorithm"]["type"]


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        (
            "axolotl",
            {
                "model.path": "some/model",
                "model.quantization": "nf4",
                "lora.targets": ["all-linear"],
                "trainer.batch_rows": 8,
                "trainer.optimizer.moments": "8bit",
                "trainer.schedule.min_lr_share": 0.0,
                "data.train.0.columns.prompt": ["instruction", "input"],
            },
        ),
        (
            "trl",
            {
                "algorithm.kl.coefficient": 0.04,
                "rollout.prompts_per_step": 16,
                "rollout.samples_per_prompt": 4,
                "trainer.max_steps": 30,
                "trainer.lr": 2e-6,
                "cluster.processes": 2,
                "engine.own_process": True,
            },
        ),
        (
            "llama_factory",
            {
                "algorithm.type": "orpo",
                "preference.beta": 0.3,
                "lora.alpha": 8,
                "trainer.epochs": 2,
                "trainer.schedule.type": "linear",
                "data.train.1.path": "b",
            },
        ),
        (
            "verl",
            {
                "algorithm.kl.coefficient": 0.01,
                "algorithm.kl.estimator": "k3",
                "algorithm.normalise": "token",
                "trainer.updates_per_step": 4,
                "data.max_length": 128,
                "data.overlong": "refuse",
                "data.validation.0.path": "test.parquet",
                "engine.type": "sglang",
            },
        ),
        (
            "slime",
            {
                "algorithm.type": "gspo",
                "algorithm.clip_high": 3e-4,
                "trainer.updates_per_step": 2,
                "data.train.0.prompt_column": "question",
                "rewards.functions.0.path": "rewards.py:my_grader",
            },
        ),
        (
            "openrlhf",
            {
                "algorithm.type": "dpo",
                "trainer.epochs": 2,
                "trainer.batch_rows": 32,
                "data.max_length": 640,
                "data.train.0.chosen_column": "good",
            },
        ),
    ],
)
def test_values_are_converted(framework: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = imported(tmp_path, *FILES[framework])
    assert {place: at(found.recipe, place) for place in expected} == expected


def test_a_python_script_is_parsed_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = imported(tmp_path, "d.py", TRL_PYTHON)
    assert not (tmp_path / "touched").exists()
    assert found.problems == ()
    expected = {"algorithm.type": "dpo", "model.path": "./base", "lora.rank": 4}
    assert {place: at(found.recipe, place) for place in expected} == expected
    assert entry(found, "warmup_ratio").status is Status.UNKNOWN


@pytest.mark.parametrize(("arguments", "rate"), [("TrainingArguments", 5e-5), ("SFTConfig", 2e-5)])
def test_training_arguments_bring_their_own_learning_rate(
    arguments: str, rate: float, tmp_path: Path
) -> None:
    """SFTTrainer copies all fields of TrainingArguments, so 5e-5 is in force there."""
    found = imported(
        tmp_path,
        "sft.py",
        f"""
from trl import SFTTrainer
data = load_dataset("json", data_files="rows.jsonl", split="train")
trainer = SFTTrainer(model="./base", args={arguments}("out"), train_dataset=data)
""",
    )
    assert at(found.recipe, "trainer.lr") == rate


def test_each_status_has_its_reason(tmp_path: Path) -> None:
    found = imported(tmp_path, *FILES["axolotl"])
    assert entry(found, "learning_rate").status is Status.TAKEN
    assert "paged" in entry(found, "optimizer").why
    assert entry(found, "tensor_parallel_size").status is Status.NOT_NEEDED
    assert "fsdp splits every layer" in entry(found, "tensor_parallel_size").why
    assert entry(found, "hub_token").status is Status.NOT_NEEDED
    assert entry(found, "flux_capacitor").status is Status.UNKNOWN
    assert "hf_not_to_be_shown" not in render_listing(found)
    assert "abcdef0123456789" not in render_listing(imported(tmp_path, *FILES["slime"]))


def test_sampling_ahead_is_explained_and_not_switched_on(tmp_path: Path) -> None:
    """Files of sync runs have such settings, too, with their defaults."""
    name, text = FILES["slime"]
    found = imported(
        tmp_path,
        name,
        text.replace("--rollout-batch-size", "--partial-rollout --rollout-batch-size", 1),
    )
    partial = entry(found, "--partial-rollout")
    assert partial.status is Status.APPROXIMATED
    assert "rollout.max_staleness" in partial.why
    assert "partial" not in found.recipe["rollout"]


def test_devices_multiply_the_batch_and_end_the_guess(tmp_path: Path) -> None:
    text = LLAMA_FACTORY.replace("num_train_epochs: 1.5", "num_train_epochs: 1")
    guess, sure = (imported(tmp_path, "l.yaml", text, devices=one) for one in (None, 4))
    name = "per_device_train_batch_size"
    assert (entry(guess, name).status, guess.recipe["trainer"]["batch_rows"]) == (
        Status.APPROXIMATED,
        2,
    )
    assert (entry(sure, name).status, sure.recipe["trainer"]["batch_rows"]) == (Status.TAKEN, 8)


def test_keys_to_look_at_are_marked_where_they_are(tmp_path: Path) -> None:
    found = imported(tmp_path, *FILES["llama_factory"])
    lines = render_recipe(found, source="a.yml").splitlines()
    assert any("path: a" in line and "# LOOK" in line for line in lines)


def test_the_columns_and_splits_of_other_frameworks_are_taken_over(tmp_path: Path) -> None:
    text = AXOLOTL.replace(
        "  - path: rows.jsonl\n    type: alpaca\n",
        "  - path: some/rows\n    type: alpaca\n    split: train_sft\n"
        "  - path: talks.jsonl\n    type: sharegpt\n    split: train\n",
    )
    found = imported(tmp_path, "axolotl.yml", text)
    named, talks = found.recipe["data"]["train"]
    assert named["columns"] == {"prompt": ["instruction", "input"], "completion": "output"}
    assert (named["path"], named["split"]) == ("some/rows", "train_sft")
    assert talks["columns"]["messages.role"] == "from"
    assert "split" not in talks
    load_config_text = tmp_path / "recipe.yaml"
    load_config_text.write_text(render_recipe(found, source="a.yml"), encoding="utf-8")
    assert load_config(load_config_text).model.path == "some/model"


def test_keys_and_roles_of_messages_are_taken_over(tmp_path: Path) -> None:
    text = AXOLOTL.replace(
        "    type: alpaca\n",
        "    type: chat_template\n    roles_to_train: [assistant]\n"
        "    message_property_mappings: {role: from, content: content}\n"
        "    roles: {user: [user, caller], assistant: [gpt], system: [system]}\n",
    )
    found = imported(tmp_path, "axolotl.yml", text)
    assert found.recipe["data"]["train"][0]["columns"] == {
        "messages.role": "from",
        "messages.user": ["caller"],
        "messages.assistant": ["gpt"],
    }
    unknown = {one.given.name for one in found.entries if one.status is Status.UNKNOWN}
    assert unknown == {"flux_capacitor"}
    assert found.problems == ()


def test_the_critic_of_verl_is_taken_over_apart_from_what_it_shares(tmp_path: Path) -> None:
    script = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.gamma=0.99 "
        "actor_rollout_ref.model.path=./policy data.train_files=a.parquet data.train_batch_size=8 "
        "actor_rollout_ref.model.enable_gradient_checkpointing=True critic.model.path=./judge "
        "critic.model.enable_gradient_checkpointing=False critic.model.use_remove_padding=True "
        "critic.optim.lr_warmup_steps_ratio=0.1 critic.grad_clip=2.0 critic.optim.lr=1e-5 "
        "critic.model.fsdp_config.param_offload=False critic.optim.weight_decay=0.02"
    )
    found = imported(tmp_path, "run.sh", script)
    critic = found.recipe["critic"]
    assert critic["schedule"] == {"warmup_share": 0.1, "type": "constant"}
    assert critic["optimizer"] == {"weight_decay": 0.02}
    assert {name: critic[name] for name in ("path", "gamma", "lr", "max_grad_norm")} == {
        "path": "./judge", "gamma": 0.99, "lr": 1e-5, "max_grad_norm": 2.0
    }  # fmt: skip
    other = entry(found, "critic.model.enable_gradient_checkpointing")
    assert other.status is Status.APPROXIMATED
    assert entry(found, "critic.model.fsdp_config.param_offload").status is Status.NOT_NEEDED
    assert found.problems == ()
    same = imported(tmp_path, "run.sh", script.replace("./judge", "./policy"))
    assert entry(same, "critic.model.path").status is Status.NOT_NEEDED
    sampled = imported(tmp_path, "run.sh", script.replace("=gae", "=grpo"))
    assert "critic" not in sampled.recipe


def test_the_verb_writes_a_recipe_and_overwrites_none(tmp_path: Path) -> None:
    source, out = tmp_path / "a.yml", tmp_path / "recipe.yaml"
    source.write_text(AXOLOTL, encoding="utf-8")
    runner = CliRunner()
    first = runner.invoke(app, ["import", str(source), "--out", str(out)])
    assert (first.exit_code, "taken over" in first.stdout) == (0, True)
    assert load_config(out).lora is not None
    assert runner.invoke(app, ["import", str(source), "--out", str(out)]).exit_code != 0
    told = json.loads(runner.invoke(app, ["import", str(source), "--format", "json"]).stdout)
    assert (told["framework"], told["ok"]) == ("axolotl", True)


def test_a_recipe_is_called_one() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tiny_sort_grpo_cpu.yaml"
    answer = CliRunner().invoke(app, ["import", str(recipe)])
    assert "a recipe of homeostat already" in str(answer.exception) + answer.output


def test_a_file_that_no_framework_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("one: 1\ntwo: 2\nthree: 3\n", encoding="utf-8")
    assert recognise(read_foreign(path)) is None
    with pytest.raises(ConfigError, match="no such file"):
        read_foreign(tmp_path / "absent.yaml")


@pytest.mark.parametrize("framework", FILES)
def test_a_foreign_file_given_as_a_recipe_is_one_problem(framework: str, tmp_path: Path) -> None:
    name, text = FILES[framework]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="homeostat import") as caught:
        load_recipe(path)
    assert len(caught.value.problems) == 1


def recipe_with(folder: Path, text: str, *, model: str = "model") -> Path:
    path = folder / "recipe.yaml"
    head = f"name: x\nmodel: {{path: {model}}}\ndata: {{train: [{{type: text, path: a.jsonl}}]}}\n"
    path.write_text(head + text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("trainer: {learning_rate: 1e-5}", "Did you mean trainer.lr?"),
        ("trainer: {num_train_epochs: 1}", "Did you mean trainer.epochs?"),
        ("lora: {lora_alpha: 8}", "Did you mean lora.alpha?"),
    ],
)
def test_names_of_other_frameworks_lead_to_our_keys(text: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_with(tmp_path, text))
    assert [problem.hint for problem in caught.value.problems] == [hint]


def test_an_algorithm_that_is_not_here_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Choose one of.*'grpo'"):
        load_recipe(recipe_with(tmp_path, "algorithm: {type: xyzzy}"))


def test_the_folder_of_a_run_given_as_a_model_points_at_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "run" / "checkpoints" / "step_00000002" / "hf"
    weights.mkdir(parents=True)
    for name in ("config.json", "events.jsonl"):
        (tmp_path / "run" / name).touch()
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"name: x\nmodel: {{path: {tmp_path / 'run'}}}\ndata: {{train: [{{path: rows.jsonl}}]}}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_recipe(file)
    assert "model.path: this is the folder of a run" in str(error.value)
    assert str(weights) in str(error.value)


def test_an_adapter_given_as_a_model_points_at_lora_path(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"base_model_name_or_path": "the/base"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the/base.*lora\.path"):
        load_recipe(recipe_with(tmp_path, "", model=str(folder)))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert load_recipe(recipe_with(tmp_path, "", model=str(folder))).name == "x"


def test_words_of_a_tokenizer_are_shown_and_counts_per_epoch_name_their_key(tmp_path: Path) -> None:
    more = "evals_per_epoch: 4\nspecial_tokens:\n  pad_token: <pad>\n"
    file = tmp_path / "a.yaml"
    file.write_text(AXOLOTL + more)
    listed = CliRunner().invoke(app, ["import", str(file), "-o", str(tmp_path / "r.yaml")]).output
    assert "pad_token = <pad>  ->  model.pad_token" in listed
    assert "evals_per_epoch = 4  ->  eval.interval_steps" in listed
    assert "hf_not_to_be_shown" not in listed


def test_words_that_are_booleans_elsewhere_are_booleans(tmp_path: Path) -> None:
    """PyYAML, which the other frameworks read with, takes False, no and off for a boolean."""
    text = AXOLOTL.replace("load_in_4bit: true", "load_in_8bit: False\nload_in_4bit: Yes")
    text = text.replace("lora_target_linear: true", "lora_target_linear: True")
    found = imported(tmp_path, "a.yml", text + "gradient_checkpointing: no\n")
    assert at(found.recipe, "model.quantization") == "nf4"
    assert at(found.recipe, "lora.targets") == ["all-linear"]
    assert entry(found, "gradient_checkpointing").status is Status.NOT_NEEDED


def test_a_reward_model_of_openrlhf_is_a_reward_model(tmp_path: Path) -> None:
    text = (
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain ./m --reward_pretrain ./rm "
        "--prompt_data p.jsonl --n_samples_per_prompt 4 --rollout_batch_size 64 "
        "--train_batch_size 64 --advantage_estimator reinforce --generate_max_len 64\n"
    )
    found = imported(tmp_path, "o.sh", text)
    assert found.problems == ()
    assert at(found.recipe, "rewards.functions.0") == {"type": "reward_model", "path": "./rm"}


@pytest.mark.parametrize("switch", ["True", "False", None])
def test_what_verl_switches_off_stays_off(switch: str | None, tmp_path: Path) -> None:
    text = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=p.parquet "
        "actor_rollout_ref.model.path=./m reward_model.overlong_buffer.len=16 "
        "reward_model.overlong_buffer.penalty_factor=1.0 data.max_response_length=64 "
        "algorithm.filter_groups.max_num_gen_batches=10"
    )
    if switch is not None:
        text += f" reward_model.overlong_buffer.enable={switch}"
        text += f" algorithm.filter_groups.enable={switch}"
    found = imported(tmp_path, "v.sh", text + "\n")
    is_on = switch == "True"
    assert ("overlong" in found.recipe["algorithm"]) is is_on
    assert ("dynamic_sampling" in found.recipe["algorithm"]) is is_on


def test_the_upper_bound_of_trls_cispo_is_that_of_the_weight(tmp_path: Path) -> None:
    """TRL clamps the ratio at epsilon_high; here it is clipped above 1 + clip_high."""
    text = (
        "config = GRPOConfig(loss_type='cispo', epsilon=0.2, epsilon_high=5.0)\n"
        "GRPOTrainer(model='./m', args=config, train_dataset=load_dataset('p.jsonl'))\n"
    )
    found = imported(tmp_path, "c.py", text)
    assert found.problems == ()
    assert at(found.recipe, "algorithm.clip_high") == 4.0
    assert "clip_low" not in found.recipe["algorithm"]


def test_steps_of_trl_are_updates(tmp_path: Path) -> None:
    text = (
        "config = GRPOConfig(num_iterations=2, steps_per_generation=8, max_steps=400,\n"
        "    gradient_accumulation_steps=2, per_device_train_batch_size=8, save_steps=100,\n"
        "    warmup_steps=20)\n"
        "GRPOTrainer(model='./m', args=config, train_dataset=load_dataset('p.jsonl'))\n"
    )
    found = imported(tmp_path, "g.py", text)
    assert at(found.recipe, "trainer.updates_per_step") == 4
    assert at(found.recipe, "trainer.max_steps") == 50
    assert at(found.recipe, "checkpoint.interval_steps") == 13
    assert "rounded up" in entry(found, "save_steps").why
    assert at(found.recipe, "trainer.schedule.warmup_steps") == 20


def test_a_generation_of_several_updates_keeps_their_size(tmp_path: Path) -> None:
    text = (
        "config = GRPOConfig(generation_batch_size=256, per_device_train_batch_size=4,\n"
        "    gradient_accumulation_steps=8, num_generations=8)\n"
        "GRPOTrainer(model='./m', args=config, train_dataset=load_dataset('p.jsonl'))\n"
    )
    found = imported(tmp_path, "g.py", text)
    assert at(found.recipe, "rollout.prompts_per_step") == 32
    assert at(found.recipe, "trainer.updates_per_step") == 8


@pytest.mark.parametrize(
    ("trainer", "place", "size"),
    [("SFT", "trainer.batch_rows", 16), ("GRPO", "rollout.prompts_per_step", 2)],
)
def test_a_batch_that_is_not_given_has_the_size_it_has_there(
    trainer: str, place: str, size: int, tmp_path: Path
) -> None:
    text = f"{trainer}Trainer(model='./m', train_dataset=load_dataset('p.jsonl'))\n"
    found = imported(tmp_path, "s.py", text, devices=2)
    assert at(found.recipe, place) == size
    assert "8 rows per device" in found.comments[place]


def test_the_warm_up_of_verl_counts_steps_and_not_updates(tmp_path: Path) -> None:
    """verl advances its schedule once in update_actor, after all mini-batches of a step."""
    text = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=p.parquet "
        "actor_rollout_ref.model.path=./m data.train_batch_size=1024 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10\n"
    )
    found = imported(tmp_path, "v.sh", text)
    assert at(found.recipe, "trainer.schedule.warmup_steps") == 40


def test_ratios_of_sequences_are_clipped_as_they_are_there(tmp_path: Path) -> None:
    text = (
        "config = GRPOConfig(importance_sampling_level='sequence', epsilon_high=0.3)\n"
        "GRPOTrainer(model='./m', args=config, train_dataset=load_dataset('p.jsonl'))\n"
    )
    found = imported(tmp_path, "g.py", text)
    assert at(found.recipe, "algorithm.type") == "gspo"
    assert at(found.recipe, "algorithm.clip_low") == 0.2
    assert at(found.recipe, "algorithm.clip_high") == 0.3


def test_sft_of_verl_has_the_schedule_of_its_sft_trainer(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet "
        "data.train_batch_size=64 model.partial_pretrain=./m trainer.total_epochs=4\n"
    )
    found = imported(tmp_path, "v.sh", text)
    assert found.problems == ()
    assert at(found.recipe, "trainer.schedule") == {
        "type": "cosine", "min_lr_share": 0.0, "warmup_share": 0.1,
    }  # fmt: skip
    assert at(found.recipe, "trainer.lr") == 1e-5


VERL_PPO = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=p.parquet "
    "actor_rollout_ref.model.path=./m data.max_response_length=64 "
)
OPENRLHF_PPO = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain ./m --prompt_data p.jsonl "
    "--n_samples_per_prompt 4 --rollout_batch_size 64 --train_batch_size 64 "
    "--advantage_estimator reinforce --generate_max_len 64 "
)


@pytest.mark.parametrize(
    ("script", "kl"),
    [
        (OPENRLHF_PPO, {"coefficient": 0.01, "place": "reward", "estimator": "k1"}),
        (OPENRLHF_PPO + "--init_kl_coef 0", None),
        (OPENRLHF_PPO + "--init_kl_coef $KL", None),
        (VERL_PPO, None),
        (
            VERL_PPO + "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002",
            {"coefficient": 0.002, "place": "reward", "estimator": "k1"},
        ),
        (VERL_PPO + "actor_rollout_ref.actor.use_kl_loss=True", {"coefficient": 0.001}),
    ],
)
def test_a_kl_penalty_has_the_weight_and_estimator_it_has_there(
    script: str, kl: dict[str, Any] | None, tmp_path: Path
) -> None:
    found = imported(tmp_path, "k.sh", script + "\n")
    assert found.problems == ()
    assert found.recipe["algorithm"].get("kl") == kl


@pytest.mark.parametrize("given", ["", "actor_rollout_ref.rollout.n=1"])
def test_one_sample_of_a_prompt_becomes_two_and_not_eight(given: str, tmp_path: Path) -> None:
    found = imported(tmp_path, "v.sh", VERL_PPO + given + "\n")
    assert at(found.recipe, "rollout.samples_per_prompt") == 2
    if given:
        assert "twice" in entry(found, "actor_rollout_ref.rollout.n").why
    else:
        assert "is 1" in found.comments["rollout.samples_per_prompt"]


def test_the_reward_model_of_llama_factory_is_no_function(tmp_path: Path) -> None:
    text = "model_name_or_path: ./m\nstage: ppo\nreward_model: ./rm\ndataset: d\n"
    found = imported(tmp_path, "l.yaml", text + "finetuning_type: full\ntemplate: qwen\n")
    assert at(found.recipe, "rewards.functions.0") == {"type": "reward_model", "path": "./rm"}
    assert "adapter" in found.comments["rewards.functions.0.path"]
