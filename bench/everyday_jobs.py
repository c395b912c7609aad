"""Thirty everyday jobs: the commands of other libraries and of homeostat, and the time of ours.

    python bench/everyday_jobs.py [--out jobs.json] [--only 3,17]

Each job is a command of homeostat over a tiny model in an empty folder. Its time is the processor
time of all its processes, which does not depend on what else the machine does; starting Python and
loading torch is measured once and comes on top. The commands of others are from their
documentation, whose page is named. Prints the table of docs/guide/everyday_jobs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from homeostat.cli.verbs import app

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets"
SHORT = "trainer.max_steps=2 trainer.threads=1 observe.console=quiet"
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Job:
    """A job, how it is done elsewhere (and on which page that is written), and our command.

    A command that stands for a job that does not work here is empty, with the reason in `note`.
    """

    title: str
    page: str
    theirs: str
    ours: str
    note: str = ""


JOBS = (
    Job("a first config for my data", "axolotl cli", "axolotl fetch examples; edit a copy",
        "new first.yaml --task sft --model model --data chats.jsonl"),
    Job("find mistakes before training", "axolotl dataset_preprocessing",
        "axolotl preprocess config.yml", "check sft.yaml"),
    Job("see tokens and labels", "axolotl cli", "axolotl preprocess config.yml --debug",
        "inspect sft.yaml --rows 2"),
    Job("how much memory it will take", "TRL reducing_memory_usage", "try, and lower the batch",
        "estimate sft.yaml"),
    Job("SFT on chats", "TRL clis", "trl sft --model_name_or_path M --dataset_name D",
        f"train sft.yaml name=j1 {SHORT}"),
    Job("SFT on prompts and completions", "TRL dataset_formats", "rows with prompt, completion",
        f"train pairs.yaml {SHORT}"),
    Job("continued pre-training on text", "axolotl dataset-formats/pretraining",
        "pretraining_dataset: ...", f"train text.yaml {SHORT}"),
    Job("LoRA", "TRL peft_integration", "trl sft ... --use_peft --lora_r 16",
        f"train sft.yaml name=j2 lora.rank=16 {SHORT}"),
    Job("QLoRA in 4 bits", "unsloth get-started/fine-tuning-llms-guide",
        "from_pretrained(..., load_in_4bit=True); get_peft_model(...)",
        f"train sft.yaml name=j3 lora.rank=16 model.quantization=nf4 {SHORT}"),
    Job("DoRA", "axolotl lora", "peft_use_dora: true",
        f"train sft.yaml name=j4 lora.rank=16 lora.dora=true {SHORT}"),
    Job("packing without cross-talk", "axolotl multipack", "sample_packing: true",
        f"train sft.yaml name=j5 trainer.packing=true {SHORT}"),
    Job("8-bit optimizer state", "axolotl optimizers", "optimizer: adamw_8bit",
        f"train sft.yaml name=j6 trainer.optimizer.moments=8bit {SHORT}"),
    Job("gradient checkpointing", "axolotl gradient_checkpointing", "gradient_checkpointing: true",
        f"train sft.yaml name=j7 trainer.gradient_checkpointing=true {SHORT}"),
    Job("evaluate on held-out rows", "TRL sft_trainer", "eval_strategy='steps', eval_dataset=...",
        f"train sft.yaml name=j8 data.validation_share=0.1 eval.interval_steps=1 {SHORT}"),
    Job("log to TensorBoard", "TRL sft_trainer", "report_to='tensorboard'",
        f"train sft.yaml name=j9 observe.sinks=[{{type:\u00a0tensorboard}}] {SHORT}"),
    Job("resume after an interruption", "axolotl cli", "axolotl train config.yml "
        "--resume-from-checkpoint DIR", f"train sft.yaml name=base {SHORT}".replace("=2 ", "=3 ")),
    Job("DPO", "TRL clis", "trl dpo --model_name_or_path M --dataset_name D",
        f"train dpo.yaml {SHORT}"),
    Job("KTO", "TRL clis", "trl kto ...", f"train kto.yaml {SHORT}"),
    Job("ORPO", "axolotl rlhf", "rl: orpo", f"train dpo.yaml name=j10 algorithm.type=orpo {SHORT}"),
    Job("SimPO", "TRL cpo_trainer", "CPOConfig(loss_type='simpo', cpo_alpha=0.0)",
        f"train dpo.yaml name=j11 algorithm.type=simpo {SHORT}"),
    Job("a reward model", "TRL clis", "trl reward ...",
        f"train dpo.yaml name=j12 algorithm.type=reward_model {SHORT}"),
    Job("GRPO with my reward function", "TRL clis", "trl grpo ... --reward_funcs module.function",
        f"train grpo.yaml {SHORT}"),
    Job("RLOO", "TRL clis", "trl rloo ...",
        f"train grpo.yaml name=j13 algorithm.type=rloo {SHORT}"),
    Job("sample from the trained model", "axolotl inference",
        "axolotl inference config.yml --lora-model-dir DIR",
        "generate runs/base 'turn around abc' --max-new-tokens 8"),
    Job("merge the adapter", "axolotl cli", "axolotl merge-lora config.yml",
        "export runs/lora merged"),
    Job("a GGUF file in 8 bits", "unsloth basics/inference-and-deployment/saving-to-gguf",
        "save_pretrained_gguf(DIR, tokenizer, quantization_method='q8_0')",
        "export runs/base model.gguf --quantization q8_0"),
    Job("upload with a model card", "TRL sft_trainer", "push_to_hub=True",
        "push runs/base me/model --dry-run card", "measured with --dry-run: no network"),
    Job("convert a config", "", "rewrite it by hand", "import axolotl.yml --out imported.yaml"),
    Job("why did this run fail", "axolotl faq", "read the page",
        "doctor failed.log"),
    Job("SFT of a vision model", "axolotl multimodal", "processor_type: AutoProcessor", "",
        "text only"),
)  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Write a tiny model, rows of each kind, recipes, a foreign config and a log."""
    shutil.copytree(ASSETS / "tiny-chat", folder / "shape")
    config = json.loads((folder / "shape" / "config.json").read_text())
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    (folder / "shape" / "config.json").write_text(json.dumps({**config, **small}))
    rng = random.Random(0)
    # The same word both ways would be no preference.
    words = ["".join(rng.choices("abcdef", k=6)) + "xyz" for _ in range(120)]
    prompts = [f"turn around {word}" for word in words]
    backs = [word[::-1] for word in words]
    both = list(zip(prompts, backs, words, strict=True))
    chat = [[{"role": "user", "content": p}, {"role": "assistant", "content": b}]
            for p, b, _ in both]  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {
        "chats": [{"messages": one} for one in chat],
        "pairs": [{"prompt": p, "completion": b} for p, b, _ in both],
        "text": [{"text": f"{p} {b}"} for p, b, _ in both],
        "preferences": [{"prompt": p, "chosen": b, "rejected": w} for p, b, w in both],
        "labelled": [{"prompt": p, "completion": b, "label": n % 2 == 0}
                     for n, (p, b, _) in enumerate(both)],
        "prompts": [{"prompt": p, "answer": b} for p, b, _ in both],
    }  # fmt: skip
    for name, lines in rows.items():
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "score.py").write_text(
        "def shares_letters(completions, answer, **_):\n"
        "    return [len(set(c) & set(a)) / 6 for c, a in zip(completions, answer)]\n"
    )
    for name, recipe in recipes().items():
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    (folder / "axolotl.yml").write_text(
        "base_model: model\ndatasets:\n  - path: chats.jsonl\n    type: chat_template\n"
        "sequence_len: 128\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 1\n"
        "learning_rate: 0.0002\nadapter: lora\nlora_r: 16\nlora_alpha: 32\n"
    )
    (folder / "failed.log").write_text(
        "{'loss': 2.1, 'grad_norm': 0.9, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 23.65 GiB of which 1.20 GiB is free.\n"
    )


def recipes() -> dict[str, dict[str, Any]]:
    """Return a recipe of each kind of rows."""

    def recipe(name: str, kind: str, file: str, **more: Any) -> dict[str, Any]:
        data = {"train": [{"type": kind, "path": f"{file}.jsonl"}], "max_length": 64}
        trainer = {"batch_rows": 8, "lr": 1e-3, "device": "cpu"}
        base = {"name": name, "model": {"path": "model"}, "data": data, "trainer": trainer}
        return {**base, "observe": {"report": False}, **more}

    rl = {
        "algorithm": {"type": "grpo"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
        "rewards": {"functions": [{"type": "function", "path": "score.py:shares_letters"}]},
        "trainer": {"lr": 1e-4, "device": "cpu"},
    }
    return {
        "sft": recipe("sft", "messages", "chats"),
        "pairs": recipe("pairs", "prompt_completion", "pairs"),
        "text": recipe("text", "text", "text"),
        "dpo": recipe("dpo", "preference", "preferences", algorithm={"type": "dpo"}),
        "kto": recipe("kto", "unpaired_preference", "labelled", algorithm={"type": "kto"}),
        "grpo": recipe("grpo", "prompts", "prompts", **rl),
    }


def cpu_seconds() -> float:
    """Return the processor time of this process and of those that it has started and awaited."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run(folder: Path, command: str) -> tuple[float, int, str]:
    """Run a command of homeostat. Return its processor time, exit code and last line."""
    words = [word.replace("\u00a0", " ") for word in shlex.split(command)]
    os.chdir(folder)
    started = cpu_seconds()
    result = CliRunner().invoke(app, words)
    seconds = cpu_seconds() - started
    said = result.output.strip().splitlines()[-1:] or [""]
    last = said if result.exit_code == 0 else [repr(result.exception)[:300]]
    return seconds, result.exit_code, last[0]


def start_seconds() -> float:
    """Return the processor time of starting Python and loading torch and transformers."""
    started = cpu_seconds()
    code = "import torch, transformers, homeostat.run.sft, homeostat.run.rl, homeostat.cli.verbs"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
    return cpu_seconds() - started


def measure(folder: Path, only: set[int]) -> Iterator[dict[str, Any]]:
    """Prepare a model and two runs, then time every job."""
    write_inputs(folder)
    start = "trainer.max_steps=2 trainer.threads=1 observe.console=quiet checkpoint.export=off"
    for command in (
        "train sft.yaml name=made model.path=shape model.init=random " + SHORT,
        "export runs/made model",
        f"train sft.yaml name=base {start}",
        f"train sft.yaml name=lora lora.rank=4 {start}",
    ):
        _, code, last = run(folder, command)
        assert code == 0, f"{command}: {last}"
    for number, job in enumerate(JOBS, start=1):
        if only and number not in only:
            continue
        if not job.ours:
            yield {"number": number, **asdict(job), "seconds": None, "works": False}
            continue
        seconds, code, last = run(folder, job.ours)
        # The doctor's code 1 says that it found what is wrong.
        works = code == 0 or (code == 1 and job.ours.startswith("doctor"))
        found = {"seconds": round(seconds, 1), "works": works, "last_line": last}
        yield {"number": number, **asdict(job), **found}


def as_markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table's lines."""
    yield "| | job | elsewhere (page) | `homeostat ...` | time | works |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        page = f" ({row['page']})" if row["page"] else ""
        ours = row["ours"].replace(f" {SHORT}", "").replace("\u00a0", " ")
        ours = f"`{ours}`" if ours else "-"
        time_s = "-" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        works = "yes" if row["works"] else "no"
        note = f"; {row['note']}" if row["note"] else ""
        yield (
            f"| {row['number']} | {row['title']} | `{row['theirs']}`{page} | {ours} | {time_s} | "
            f"{works}{note} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON, too")
    parser.add_argument("--only", default="", help="numbers of jobs, separated by commas")
    arguments = parser.parse_args()
    only = {int(one) for one in arguments.only.split(",") if one}
    os.environ["HF_HUB_OFFLINE"] = "1"
    home, rows = Path.cwd(), []
    with tempfile.TemporaryDirectory(prefix="everyday_jobs_") as folder:
        for row in measure(Path(folder), only):
            print(f"{row['number']:2} {row['seconds']} {row['works']} {row['title']}: "
                  f"{row.get('last_line', '')}", file=sys.stderr)  # fmt: skip
            rows.append(row)
        os.chdir(home)
    print("\n".join(as_markdown(rows)))
    print(f"\nStarting Python and loading torch: {start_seconds():.1f} s of processor time.")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
