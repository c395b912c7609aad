"""TRL's side of grpo_vs_trl: GRPOTrainer on the same prompts, in a separate process.

The workload is small on purpose, so that what is measured is the trainer and not the matrix
products: a Qwen2 of 1,018,368 parameters, one token per byte, 8 prompts x 8 samples of up to 64 new
tokens a step. `build_workload` writes it; `VARIANTS` holds the settings that were tried to make TRL
fast. Two modes:

    sample    generate, score, train; each step appends a line to a file, as metrics.jsonl does
    replay    the rollouts come from a file: which loss and gradient does TRL give them?

Run with one JSON argument; the last line printed is a JSON object.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ["<|pad|>", "<|start|>", "<|end|>"]
END = "<|end|>"

# What each variant changes; GRPOConfig's names, except `rows` (per_device_train_batch_size;
# accumulation makes up the rest of an update) and `attention` (attn_implementation).
VARIANTS: dict[str, dict[str, Any]] = {
    "rows64": {"rows": 64},
    "rows32": {"rows": 32},
    "rows16": {"rows": 16},
    "rows8": {"rows": 8},
    "rows64_eager": {"rows": 64, "attention": "eager"},
    "rows64_compile": {"rows": 64, "torch_compile": True},
    "rows64_static_cache": {"rows": 64, "cache_implementation": "static"},
    "rows64_no_cache": {"rows": 64, "generation_kwargs": {"use_cache": False}},
    "rows32_generate32": {"rows": 32, "steps_per_generation": 1},
    "rows64_plain_adamw": {"rows": 64, "optim": "adamw_torch"},
    "rows64_continuous": {"rows": 64, "use_transformers_continuous_batching": True},
}
# The fastest of them; rows64_compile and rows64_plain_adamw are level with it, the others slower.
BEST = "rows64"


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of both sides. `folder` holds the model, the tokenizer, prompts.jsonl."""

    folder: str
    steps: int
    threads: int = 1
    processes: int = 1
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_new_tokens: int = 64
    learning_rate: float = 1e-4
    loss_type: str = "grpo"
    scale: str = "group"
    seed: int = 0


# ---- the workload ------------------------------------------------------------------------------


def build_workload(folder: Path, *, num_prompts: int, seed: int = 0) -> dict[str, Any]:
    """Writes model, tokenizer and prompts; returns what the result says about them."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # With one, transformers would give that token's embedding no gradient where it is sampled.
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    rng = random.Random(seed)
    prompts = [_question(rng) for _ in range(num_prompts)]
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "mean_prompt_tokens": sum(len(prompt) for prompt in prompts) / len(prompts),
    }


def _byte_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=SPECIAL_TOKENS[0]
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _question(rng: random.Random) -> str:
    terms = [str(rng.randint(1, 999)) for _ in range(rng.randint(2, 5))]
    return f"What is {' + '.join(terms)}? "


def digit_share(completions: list[str], **columns: Any) -> list[float]:
    """The reward: how much of a completion is digits. A random model earns some of it at once."""
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in completions]


# ---- TRL ---------------------------------------------------------------------------------------


def base_settings(workload: Workload, *, rows: int) -> dict[str, Any]:
    """Return the settings that all variants share, under GRPOConfig's names."""
    return {
        "num_generations": workload.samples_per_prompt,
        "max_completion_length": workload.max_new_tokens,
        "per_device_train_batch_size": rows // workload.processes,
        "gradient_accumulation_steps": workload.prompts_per_step
        * workload.samples_per_prompt
        // rows,
        "max_steps": workload.steps,
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": workload.loss_type,
        "scale_rewards": workload.scale,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        "seed": workload.seed,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **({"ddp_backend": "gloo"} if workload.processes > 1 else {}),
    }


def make_trainer(workload: Workload, scratch: Path, *, variant: str, **changes: Any) -> Any:
    """A GRPOTrainer as `variant` says; `changes` go to its constructor."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = dict(VARIANTS[variant])
    attention = settings.pop("attention", "sdpa")
    settings = base_settings(workload, rows=settings.pop("rows")) | settings
    torch.set_num_threads(workload.threads)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            workload.folder, dtype=torch.float32, attn_implementation=attention
        ),
        args=GRPOConfig(output_dir=str(scratch / "trl"), **settings),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        **changes,
    )


def run_trl(workload: Workload, out: Path, *, variant: str) -> dict[str, Any]:
    """Train as `variant` says; `out` gets a line per step. The first step is not counted."""
    from datasets import Dataset
    from transformers import TrainerCallback

    stamps: list[tuple[float, float]] = []

    class Lines(TrainerCallback):
        """One line per step, as homeostat's metrics.jsonl has."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stamps.append((time.perf_counter(), time.process_time()))

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            if "loss" in logs and state.is_world_process_zero:
                names = {"train/loss": "loss", "completions/mean_length": "completions/mean_length"}
                names |= {name: name for name in ("reward", "grad_norm", "num_tokens")}
                line = {ours: logs[theirs] for ours, theirs in names.items()}
                with open(out, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")

    text = (Path(workload.folder) / "prompts.jsonl").read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines()]
    trainer = make_trainer(
        workload,
        out.parent,
        variant=variant,
        reward_funcs=digit_share,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Lines()],
    )
    trainer.train()
    steps = list(itertools.pairwise(stamps))
    if not trainer.is_world_process_zero():
        return {}
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {
        "variant": variant,
        "wall_s": [round(after[0] - before[0], 4) for before, after in steps],
        "cpu_s": [round(after[1] - before[1], 4) for before, after in steps],
        "mean_length": [round(record["completions/mean_length"], 2) for record in records],
        "rewards": [record["reward"] for record in records],
    }


def replay_trl(workload: Workload, rollouts: Path, *, variant: str) -> dict[str, Any]:
    """The loss and gradient norm TRL gives to each step of the file, training as it goes.

    The file: {"steps": [[group, ...], ...]}, a group {"prompt_ids": [...], "completion_ids":
    [[...], ...], "rewards": [...]}. With several steps they agree with another trainer's as long as
    its weights follow the same path, so that the recorded samples are on-policy for both.
    """
    from datasets import Dataset

    steps = json.loads(rollouts.read_text(encoding="utf-8"))["steps"]
    flat = [
        [
            (group["prompt_ids"], completion, reward)
            for group in step
            for completion, reward in zip(group["completion_ids"], group["rewards"], strict=True)
        ]
        for step in steps
    ]
    at = iter(range(len(flat)))
    current: list[tuple[list[int], list[int], float]] = []

    def give(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        current[:] = flat[next(at)]
        assert len(prompts) == len(current), (len(prompts), len(current))
        prompt_ids, completion_ids, _ = zip(*current, strict=True)
        return {
            "prompt_ids": list(prompt_ids),
            "completion_ids": list(completion_ids),
            "logprobs": None,
        }

    def recorded(completions: list[str], **columns: Any) -> list[float]:
        return [reward for _, _, reward in current]

    trainer = make_trainer(
        workload,
        rollouts.parent,
        variant=variant,
        reward_funcs=recorded,
        rollout_func=give,
        train_dataset=Dataset.from_list([{"prompt": "?"}] * workload.prompts_per_step),
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in logs],
        "grad_norms": [line["grad_norm"] for line in logs],
        "rewards": [line["reward"] for line in logs],
    }


def main() -> None:
    """Argument: {"workload": {...}, "variant": ..., "out": file} or "rollouts" for "out"."""
    task = json.loads(sys.argv[1])
    workload = Workload(**task["workload"])
    if "rollouts" in task:
        result = replay_trl(workload, Path(task["rollouts"]), variant=task["variant"])
    else:
        result = run_trl(workload, Path(task["out"]), variant=task["variant"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
