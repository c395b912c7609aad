"""The one-file oracle is right by itself, and the library follows it.

By itself: against transformers and torch, on fresh random models. The library: the same rows, model
and settings through `train_sft`, packed, over 20 steps. Tolerances: logits 1e-5 and losses 1e-5
(relative) in fp32.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.support import runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from homeostat.config import load_config
from homeostat.config.trainer import CosineSchedule
from homeostat.run.session.session import open_session
from homeostat.run.session.step import run_to_end
from homeostat.run.sft import train_sft

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_one_file.py"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sft_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the two marks of a ChatML turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHATML
    return made


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, family: str, tied: bool) -> Any:
    config = FAMILIES[family](
        vocab_size=len(tokenizer) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder, max_shard_size="40KB")
    tokenizer.save_pretrained(folder)
    return model


def write_rows(path: Path, *, count: int) -> list[dict[str, Any]]:
    rng = random.Random()
    words = ["apple", "seven", "river", "blue", "walks", "to", "12", "and"]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 7)))

    rows: list[dict[str, Any]] = []
    for index in range(count):
        if index % 2:
            rows.append({"prompt": text(), "completion": text()})
            continue
        turns = ["system", "user", "assistant", "user", "assistant"]
        rows.append({"messages": [{"role": role, "content": text()} for role in turns]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_the_example_imports_nothing_of_ours() -> None:
    imported = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert imported
    assert not [name for name in imported if name.startswith("homeostat")]


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_logits_equal_transformers(
    oracle: ModuleType,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    family: str,
    tied: bool,
) -> None:
    reference = save_model(tmp_path, tokenizer, family=family, tied=tied)
    model = oracle.load_model(tmp_path)
    tokens_T = torch.randint(0, len(tokenizer), (50,))
    with torch.no_grad():
        expected = reference(tokens_T[None]).logits[0]
        torch.testing.assert_close(model(tokens_T), expected, rtol=1e-5, atol=1e-5)


def test_only_what_the_assistant_wrote_is_trained(
    oracle: ModuleType, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = [("user", "one two"), ("assistant", "three"), ("user", "4"), ("assistant", "five\nsix")]
    row = {"messages": [{"role": role, "content": content} for role, content in chat]}
    tokens_T, trained_T = oracle.tokenize(row, tokenizer)
    text = tokenizer.decode(tokens_T[trained_T])
    assert text == "three<|im_end|>five\nsix<|im_end|>"


def test_every_row_comes_once_an_epoch_and_epochs_differ(oracle: ModuleType) -> None:
    settings = oracle.Settings(model="", data="", batch_rows=4, seed=3)
    epochs = [
        [row for s in steps for row in oracle.rows_of_step(settings, step=s, num_rows=10)]
        for steps in ((1, 2, 3), (4, 5, 6))
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("total", [1, 7, 20, 200])
def test_the_schedule_is_the_library_s_default(oracle: ModuleType, total: int) -> None:
    settings = oracle.Settings(model="", data="", max_steps=total, lr=0.3)
    for step in range(1, total + 1):
        expected = 0.3 * CosineSchedule().factor(step, total)
        assert oracle.learning_rate(settings, step) == pytest.approx(expected, rel=1e-12)


def test_losses_equal_a_padded_transformers_loop(
    oracle: ModuleType,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = save_model(tmp_path, tokenizer, family="llama", tied=True)
    rows = write_rows(tmp_path / "rows.jsonl", count=10)
    options = ["--model", str(tmp_path), "--lr", "1e-2", "--max_steps", "5", "--batch_rows", "4"]
    runs.run_script(EXAMPLE, *options, "--data", str(tmp_path / "rows.jsonl"))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    settings = oracle.Settings(model="", data="", max_steps=5, batch_rows=4, lr=1e-2)
    expected = padded_losses(oracle, settings, model, [oracle.tokenize(r, tokenizer) for r in rows])
    assert [record["loss"] for record in printed] == pytest.approx(expected, rel=1e-5)
    assert printed[-1]["loss"] < printed[0]["loss"]


@pytest.mark.parametrize(
    ("family", "num_steps"),
    [
        ("llama", 20),
        ("qwen2", 5),
        ("qwen3", 5),
        pytest.param("qwen2", 20, marks=pytest.mark.slow),
        pytest.param("qwen3", 20, marks=pytest.mark.slow),
    ],
)
def test_the_library_follows_the_oracle(
    oracle: ModuleType,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    family: str,
    num_steps: int,
) -> None:
    save_model(tmp_path, tokenizer, family=family, tied=family != "qwen2")
    file = tmp_path / "rows.jsonl"
    # 30 rows in updates of 8: epochs end in a smaller update, and 20 steps cross four of them,
    # 5 steps one.
    rows = write_rows(file, count=30)
    messages = [row.get("messages") or as_messages(row) for row in rows]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))

    shared = {"max_steps": num_steps, "batch_rows": 8, "lr": 3e-3}
    settings = oracle.Settings(model=str(tmp_path), data=str(file), seed=11, **shared)
    expected = oracle.train(settings)
    records = library_records(tmp_path, file, seed=11, trainer=shared)

    assert len(records) == num_steps
    for name, theirs in (("train/loss", "loss"), ("learning_rate", "learning_rate")):
        want = [record[theirs] for record in expected]
        assert [record[name] for record in records] == pytest.approx(want, rel=1e-5)
    want = [record["grad_norm"] for record in expected]
    assert [record["grad_norm"] for record in records] == pytest.approx(want, rel=1e-4)
    # It learns; five steps from weights that other tests' draws decide take off a fifth or so.
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"]


def as_messages(row: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]


def library_records(
    folder: Path, file: Path, *, seed: int, trainer: dict[str, Any]
) -> list[dict[str, Any]]:
    """What the library's own loop writes to metrics.jsonl."""
    text = json.dumps(
        {
            "name": "parity",
            "runs_dir": str(folder / "runs"),
            "seed": seed,
            "model": {"path": str(folder)},
            "data": {"train": [{"type": "messages", "path": str(file)}], "max_length": 512},
            "trainer": {**trainer, "max_tokens_per_device": 512, "device": "cpu", "threads": 1},
            "checkpoint": {"export": "off"},
            "observe": {"console": "quiet", "report": False},
        }
    )
    (folder / "recipe.yaml").write_text(text)
    config = load_config(folder / "recipe.yaml")
    with open_session(
        config, recipe=text, command=[], console=Console(quiet=True), log_level="warning"
    ) as session:
        run_to_end(train_sft(config, session))
    lines = (folder / "runs" / "parity" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def padded_losses(oracle: ModuleType, settings: Any, model: Any, rows: list[Any]) -> list[float]:
    """The same training with transformers' model, one padded batch per update and its own loss."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(1, settings.max_steps + 1):
        batch = [rows[i] for i in oracle.rows_of_step(settings, step=step, num_rows=len(rows))]
        tokens = torch.nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True)
        labels = [torch.where(m, t, -100) for t, m in batch]
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t, _ in batch], True)
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = settings.lr * CosineSchedule().factor(step, settings.max_steps)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses
