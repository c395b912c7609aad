"""Which framework wrote a log: what is built on another is not mistaken for it."""
# ruff: noqa: E501 (log lines)

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.frameworks import ALL
from homeostat.health.log import Log
from homeostat.health.readers import read_text
from homeostat.health.readers.views.detect import framework_of
from homeostat.health.registry import RULES
from homeostat.health.rules.readings import usual_rates
from homeostat.health.view import Kind, RunView

ROWS = "".join(
    f"{{'loss': {1.5 - step / 50:.4f}, 'grad_norm': 0.8, 'learning_rate': 1e-05, 'epoch': {step}}}\n"
    for step in range(8)
)
HF = (
    "[INFO|trainer.py:2412] 2026-01-01 10:00:00,000 >> ***** Running training *****\n"
    "[INFO|trainer.py:2413] 2026-01-01 10:00:00,000 >>   Num examples = 9,600\n"
)
GRPO_ROW = (
    "{'loss': 0.01, 'reward': 0.4, 'reward_std': 0.2, 'kl': 0.01, 'completions/mean_length': 210.0, "
    "'completions/clipped_ratio': 0.1, 'learning_rate': 1e-06, 'epoch': 0.1}\n"
)
SLIME_ROW = (
    "(RolloutManager pid=70) rollout.py:210 - perf 3: {'rollout/response_len/mean': 300.0, "
    "'rollout/raw_reward': 0.4, 'rollout/truncated_ratio': 0.1}\n"
)


def frame(path: str) -> str:
    return f'  File "/env/lib/python3.11/site-packages/{path}", line 80, in step\n'


TRACE = "Traceback (most recent call last):\n"
LOGS: dict[str, list[str]] = {
    "transformers": [HF + ROWS, ROWS + TRACE + frame("transformers/trainer.py")],
    "trl": [
        HF + ROWS + TRACE + frame("trl/trainer/sft_trainer.py") + frame("transformers/trainer.py"),
        "data collator: DataCollatorForCompletionOnlyLM(response_template='### Answer:')\n" + ROWS,
        GRPO_ROW * 5,
        ROWS.replace("'epoch'", "'mean_token_accuracy': 0.61, 'num_tokens': 466, 'epoch'"),
        "trainer = GRPOTrainer(model)\n" + TRACE + frame("deepspeed/runtime/engine.py"),
        # An environment that is named after another trainer.
        "/opt/conda/envs/verl/lib/python3.10/site-packages/wandb/sdk/build.py:11: "
        "UserWarning: pkg_resources is deprecated\n" + GRPO_ROW * 5,
    ],
    "llama_factory": [
        "llamafactory-cli train --stage sft --template qwen --finetuning_type lora\n" + HF + ROWS,
        HF + ROWS + TRACE + frame("llamafactory/train/ppo/workflow.py")
        + frame("trl/trainer/ppo_trainer.py") + frame("transformers/trainer.py"),
        TRACE + '  File "/data/LLaMA-Factory/src/train_bash.py", line 14, in <module>\n' + ROWS,
        "[INFO|2026-01-01 10:00:00] llamafactory.data.loader:143 >> Loading dataset x.json\n" + ROWS,
        "".join(
            f'{{"current_steps": {step}, "total_steps": 90, "loss": 2.4, "learning_rate": 5e-07, '
            f'"epoch": 0.1, "percentage": 0.1, "elapsed_time": "0:00:24", "remaining_time": "5:58:33", '
            f'"throughput": "0.00", "total_tokens": {step}}}\n'
            for step in range(1, 9)
        ),
    ],
    "axolotl": [
        "[2026-01-01 10:00:00,000] [INFO] [axolotl.train:80] [PID:1] loading tokenizer\n"
        + GRPO_ROW * 4 + TRACE + frame("axolotl/train.py") + frame("trl/trainer/grpo_trainer.py"),
    ],
    "ms_swift": ["[INFO:swift] Global seed set to 42\n" + ROWS + TRACE + frame("swift/cli/sft.py")],
    "unsloth": [
        "Unsloth: Will smartly offload gradients to save VRAM!\n"
        + GRPO_ROW * 4 + TRACE + frame("trl/trainer/grpo_trainer.py"),
    ],
    "open_r1": [GRPO_ROW * 3 + TRACE + '  File "/w/open-r1/src/open_r1/grpo.py", line 3, in main\n'],
    "open_instruct": [
        "(LLMRayActor pid=9) INFO 01-01 [core.py:1] ready\n"
        "(PolicyTrainerRayProcess pid=7) loading\n"
        + TRACE + '  File "/w/open-instruct/open_instruct/grpo_fast.py", line 9, in main\n',
        "(PolicyTrainerRayProcess pid=7) x\n(LLMRayActor pid=9) y\n(LLMRayActor pid=8) z\n",
    ],
    "openrlhf": ["(LLMRayActor pid=9) x\n" + TRACE + frame("openrlhf/trainer/ppo_trainer.py")],
    "slime": [SLIME_ROW * 4, SLIME_ROW + TRACE + '  File "/opt/slime/train.py", line 2, in f\n'],
    "miles": [
        SLIME_ROW * 4 + "(MegatronTrainRayActor pid=8) "
        + TRACE + '  File "/opt/miles/train.py", line 2, in f\n',
        SLIME_ROW * 4 + "(MegatronTrainRayActor pid=8) from miles.backends.megatron_utils import x\n",
    ],
    "torchtune": [
        "INFO:torchtune.utils._logging:Running LoRAFinetuneRecipeSingleDevice with resolved config:\n"
        "\nbatch_size: 2\nmodel:\n  _component_: torchtune.models.qwen2.lora_qwen2_0_5b\n",
        TRACE + frame("torchtune/training/checkpointing/_checkpointer.py"),
        "tune run lora_finetune_single_device --config qwen2/0.5B_lora\n",
    ],
    "roll": [
        TRACE + '  File "/w/ROLL/roll/pipeline/rlvr/rlvr_pipeline.py", line 4, in run\n',
        "python examples/start_rlvr_pipeline.py --config_path qwen3 --config_name rlvr\n"
        "(ActorWorker(actor_train-0) pid=4) initialising\n",
    ],
    "areal": [
        "(AReaL) 20260101-10:00:00.000 LocalLauncher INFO: LocalLauncher: experiment_name=gsm8k\n",
        TRACE + '  File "/w/AReaL/areal/trainer/ppo/actor.py", line 9, in ppo_update\n',
    ],
    "litgpt": [
        "Epoch 1 | iter 46 step 1 | loss train: 3.724, val: n/a | iter time: 45.73 ms\n" * 3,
        "iter 100 step 50: loss 3.7451, iter time: 187.97ms (optimizer.step)\n" * 3,
        "litgpt finetune_lora meta-llama/Llama-2-7b-hf --data JSON\n" + TRACE + frame("litgpt/lora.py"),
    ],
    "verl": [
        "(vLLMHttpServer pid=2) INFO 01-01 [gpu_worker.py:9] x\n" + TRACE + frame("vllm/v1/engine.py"),
        "(TaskRunner pid=9) " + TRACE + frame("verl/trainer/ppo/ray_trainer.py"),
    ],
    "vllm": [TRACE + frame("vllm/v1/engine/core.py") + frame("vllm/v1/executor/abstract.py")],
    "sglang": ["[2026-01-01 10:00:00 TP0] Decode batch. #running-req: 3\n" + TRACE
               + frame("sglang/srt/managers/scheduler.py")],
    "unknown": [
        "step 1 of 10\nall is well\n",
        TRACE + frame("mypackage/train.py"),
        "".join(f"step={step} avg_loss={2 - step / 9:.3f} acc=0.{step}\n" for step in range(1, 9)),
    ],
}  # fmt: skip
CASES = [(name, place) for name, logs in LOGS.items() for place in range(len(logs))]


@pytest.mark.parametrize(("framework", "place"), CASES)
def test_a_log_is_taken_for_the_framework_that_wrote_it(framework: str, place: int) -> None:
    assert read_text(LOGS[framework][place]).framework.name == framework


def test_what_a_framework_is_built_on_is_known() -> None:
    assert {name for table in ALL.values() for name in table.built_on} <= ALL.keys()


def test_settings_of_transformers_alone_are_not_taken_for_a_component_that_has_them_too() -> None:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "warmup_ratio",
             "deepspeed", "optim", "fp16_opt_level", "lr_scheduler_type", "logging_steps",
             "max_grad_norm", "gradient_checkpointing", "save_steps", "eval_steps")  # fmt: skip
    found = framework_of(
        names=["train/loss", "train/grad_norm"],
        log=Log(()),
        forms={"wandb": 5},
        settings=dict.fromkeys(names, 1),
    )
    assert found.name == "transformers"


def test_scores_of_a_reward_model_in_training_are_no_reward_of_a_policy() -> None:
    """Rows of TRL's RewardTrainer: the mean score drifts, and that is no illness."""
    rows = [
        {
            "loss": 0.69 - n / 1_000, "grad_norm": 1.0 + n % 3 / 10, "learning_rate": 1e-5,
            "min_reward": -n / 20, "mean_reward": 0.4 - n / 40, "max_reward": 0.5,
            "accuracy": 0.5 + n % 4 / 10, "margin": n / 100, "epoch": n / 25,
        }
        for n in range(1, 41)
    ]  # fmt: skip
    view = read_text("".join(f"{row}\n" for row in rows))
    assert (view.framework.name, view.kind) == ("trl", Kind.REWARD_MODEL)
    assert view.series("reward") is None
    assert not any(one.code.startswith("RWD") for one in diagnose(view, RULES).findings)


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.UNKNOWN])
def test_every_kind_of_run_has_its_usual_learning_rates(kind: Kind, adapter: bool) -> None:
    settings = {"lora.rank": 8} if adapter else {"lora": None}
    found = usual_rates(RunView(kind=kind, settings=settings))
    assert found is not None
    assert 0 < found.low < found.high < 1e-3
