"""The one-file GRPO oracle is right by itself, and the library follows it.

By itself: against transformers (logits), integer arithmetic (noise), float64 written out token by
token (loss and gradient) and the library's own order and schedules, on fresh random models and
inputs. The library: the same model, prompts and settings through `train_rl`, sampling included,
over 20 steps. Tolerances in fp32: rewards equal; logits, log-probs, losses and weights 1e-5.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import math
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.support import runs
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from homeostat.config import load_config
from homeostat.config.trainer import ConstantSchedule, CosineSchedule, LinearSchedule
from homeostat.data.prepare import shuffled
from homeostat.run.rl import train_rl
from homeostat.run.session.session import open_session
from homeostat.run.session.step import run_to_end

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_one_file.py"
TOKENIZER = ROOT / "recipes" / "assets" / "tiny-sort"
VOCAB, END = 13, 11
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def save_model(folder: Path, *, family: str = "llama", tied: bool = True) -> Any:
    config = FAMILIES[family](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=END,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return model


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random()
    return [[rng.randrange(10) for _ in range(rng.randint(1, 9))] for _ in range(count)]


def write_prompts(file: Path, *, count: int, answer: str) -> None:
    rows = ["".join(map(str, prompt)) + ">" for prompt in random_prompts(count)]
    lines = [json.dumps({"prompt": row, "answer": answer}) + "\n" for row in rows]
    file.write_text("".join(lines))


def test_the_example_imports_nothing_of_ours() -> None:
    imported = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert imported
    assert not [name for name in imported if name.startswith("homeostat")]


# ---- model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_logits_of_padded_rows_equal_transformers_row_by_row(
    oracle: ModuleType, tmp_path: Path, family: str, tied: bool
) -> None:
    reference = save_model(tmp_path, family=family, tied=tied)
    model = oracle.load_model(tmp_path)
    rows = [torch.tensor(row) for row in random_prompts(6)]
    with torch.no_grad():
        logits_BTV = model(oracle.pad(rows))
        for row, logits_TV in zip(rows, logits_BTV, strict=True):
            expected = reference(row[None]).logits[0]
            torch.testing.assert_close(logits_TV[: len(row)], expected, rtol=1e-5, atol=1e-5)


# ---- sampling ----------------------------------------------------------------------------------


def test_noise_is_splitmix64_of_seed_request_and_position(oracle: ModuleType) -> None:
    mask, seed = 2**64 - 1, random.randrange(2**31)
    names = [f"train/{random.randrange(999)}/0/{group}/3" for group in range(5)]
    keys = oracle.noise_keys(seed, names)
    for position in (0, 1, 7, 511):
        found = oracle.uniforms(keys, position).tolist()
        for name, value in zip(names, found, strict=True):
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            x = int.from_bytes(digest, "little") + (position + 1) * 0x9E3779B97F4A7C15 & mask
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
            x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
            x ^= x >> 31
            assert value == (x >> 11) / 2**53
            assert 0 <= value < 1


def test_a_token_is_drawn_as_often_as_it_is_likely(oracle: ModuleType) -> None:
    logits_V = 2 * torch.randn(7)
    logits_V[2] = -math.inf  # impossible: never drawn, not even at the very ends of the range
    num = 20_000
    u = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    u = torch.cat([u, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)])
    drawn = oracle.draw(logits_V.expand(len(u), -1), u)
    assert bool((drawn.diff()[: num - 1] >= 0).all())
    share_V = torch.bincount(drawn, minlength=7) / len(u)
    torch.testing.assert_close(share_V, logits_V.softmax(-1), rtol=0, atol=2 / num)
    assert share_V[2] == 0


def test_a_sample_does_not_depend_on_its_batch_and_its_log_probs_are_the_model_s(
    oracle: ModuleType, tmp_path: Path
) -> None:
    reference = save_model(tmp_path)
    model = oracle.load_model(tmp_path)
    settings = oracle.Settings(model="", data="", max_new_tokens=12, temperature=0.7, seed=5)
    prompts = random_prompts(16)
    names = [f"train/1/0/{index}/0" for index in range(len(prompts))]
    samples = oracle.sample(model, prompts, names, settings, stop_id=END)
    for prompt, name, sample in zip(prompts, names, samples, strict=True):
        alone = oracle.sample(model, [prompt], [name], settings, stop_id=END)[0]
        assert alone.completion == sample.completion
        assert END not in sample.completion[:-1]
        assert len(sample.completion) == 12 or sample.completion[-1] == END
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + sample.completion])).logits[0].double()
        logp_TV = (logits / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logp_TV[range(len(sample.completion)), sample.completion]
        assert sample.old_logp == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)


# ---- learning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_compare_a_sample_with_its_group(oracle: ModuleType, scale: str) -> None:
    rewards = np.random.default_rng().random(8)
    settings = oracle.Settings(model="", data="", scale=scale)
    expected = rewards - rewards.mean()
    if scale == "group":
        expected /= rewards.std(ddof=1) + 1e-4
    assert oracle.advantages(rewards.tolist(), settings) == pytest.approx(expected.tolist())
    assert oracle.advantages([1.0] * 8, settings) == [0.0] * 8


@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
def test_loss_and_gradient_equal_float64_written_out_token_by_token(
    oracle: ModuleType, tmp_path: Path, normalise: str
) -> None:
    reference = save_model(tmp_path).double()
    model = oracle.load_model(tmp_path)
    settings = oracle.Settings(
        model="", data="", max_new_tokens=9, temperature=1.3, clip_low=0.1, clip_high=0.25,
        normalise=normalise, entropy_bonus=0.02,
    )  # fmt: skip
    prompts = random_prompts(10)
    samples = oracle.sample(model, prompts, [str(i) for i in range(10)], settings, stop_id=END)
    # The old policy is some way off, so that all branches of the clip are taken.
    batch = [
        (oracle.Sample(s.prompt, s.completion, [x + random.gauss(0, 0.3) for x in s.old_logp]), a)
        for s, a in zip(samples, np.random.default_rng().normal(size=10).tolist(), strict=True)
    ]
    loss, _ = oracle.policy_loss(model, batch, settings)
    loss.backward()
    expected = float64_loss(reference, batch, settings)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    grads = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), grads[name].grad, rtol=1e-4, atol=1e-5, msg=name
        )


def float64_loss(model: Any, batch: list[tuple[Any, float]], settings: Any) -> torch.Tensor:
    num_tokens = sum(len(sample.completion) for sample, _ in batch)
    total = torch.zeros((), dtype=torch.float64)
    for sample, advantage in batch:
        length = len(sample.completion)
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(batch) * length),
            "fixed": 1 / (len(batch) * settings.max_new_tokens),
        }[settings.normalise]
        logits = model(torch.tensor([sample.prompt + sample.completion])).logits[0]
        for t, (token, old) in enumerate(zip(sample.completion, sample.old_logp, strict=True)):
            p_V = (logits[len(sample.prompt) + t - 1] / settings.temperature).softmax(-1)
            ratio = p_V[token] / math.exp(old)
            if advantage > 0:
                gain = advantage * ratio.clamp(max=1 + settings.clip_high)
            else:
                gain = advantage * ratio.clamp(min=1 - settings.clip_low)
            entropy = -sum(p * p.log() for p in p_V)
            total = total - weight * (gain + settings.entropy_bonus * entropy)
    return total


def test_prompts_come_in_the_library_s_order_without_gaps(oracle: ModuleType) -> None:
    settings = oracle.Settings(model="", data="", prompts_per_step=4, seed=3)
    seen = [
        i for s in range(1, 9) for i in oracle.prompts_of_step(settings, step=s, num_prompts=10)
    ]
    expected = np.concatenate([shuffled(10, (3, epoch)) for epoch in range(4)])
    assert seen == expected[:32].tolist()


@pytest.mark.parametrize("total", [1, 7, 20, 200])
def test_schedules_are_the_library_s(oracle: ModuleType, total: int) -> None:
    shared = {"warmup_share": 0.1}
    schedules = {
        "cosine": CosineSchedule(**shared, min_lr_share=0.2),
        "linear": LinearSchedule(type="linear", **shared, min_lr_share=0.2),
        "constant": ConstantSchedule(type="constant", **shared),
    }
    for name, schedule in schedules.items():
        settings = oracle.Settings(
            model="", data="", max_steps=total, updates_per_step=3, lr=0.3, schedule=name,
            min_lr_share=0.2, **shared,
        )  # fmt: skip
        for update in range(1, 3 * total + 1):
            expected = 0.3 * schedule.factor(update, 3 * total)
            assert oracle.learning_rate(settings, update) == pytest.approx(expected, rel=1e-12)


def test_groups_are_shared_out_among_the_updates_whole_and_in_order(oracle: ModuleType) -> None:
    assert oracle.split([*range(6)], 3) == [[0, 1], [2, 3], [4, 5]]
    assert oracle.split([*range(5)], 3) == [[0], [1, 2], [3, 4]]


def test_it_learns_by_trial_and_says_so_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To answer nothing: one token in 13 is right at first."""
    save_model(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl", count=20, answer="")
    options = ["--model", str(tmp_path), "--lr", "3e-3", "--max_steps", "30"]
    options += ["--prompts_per_step", "16", "--max_new_tokens", "4", "--updates_per_step", "2"]
    runs.run_script(EXAMPLE, *options, "--data", str(tmp_path / "prompts.jsonl"))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["step"] for record in printed] == list(range(1, 31))
    assert printed[0]["reward"] < 0.3
    assert printed[-1]["reward"] > 0.9


# ---- the library -------------------------------------------------------------------------------


BY_TOKEN = {"scale": "none", "normalise": "token", "entropy_bonus": 0.01}
BY_SEQUENCE = {"scale": "group", "normalise": "sequence", "clip_high": 0.28}


@pytest.mark.parametrize(
    ("family", "changes", "num_steps"),
    [
        ("llama", BY_TOKEN, 8),
        ("qwen2", BY_SEQUENCE, 6),
        pytest.param("llama", BY_TOKEN, 20, marks=pytest.mark.slow),
        pytest.param("qwen2", BY_SEQUENCE, 20, marks=pytest.mark.slow),
    ],
    ids=["llama", "qwen2", "llama for longer", "qwen2 for longer"],
)
def test_the_library_follows_the_oracle(
    oracle: ModuleType, tmp_path: Path, family: str, changes: dict[str, Any], num_steps: int
) -> None:
    # A fixed model: of a fresh one in a hundred, some token falls within rounding of the noise.
    torch.manual_seed(7)
    save_model(tmp_path, family=family, tied=family == "llama")
    file = tmp_path / "prompts.jsonl"
    random.seed(7)
    rows = ["".join(random.choices("0123456789", k=random.randint(1, 9))) for _ in range(30)]
    file.write_text("".join(json.dumps({"prompt": r, "answer": ""}) + "\n" for r in rows))

    sizes = {"max_new_tokens": 6, "samples_per_prompt": 4, "prompts_per_step": 7}
    rollout = sizes | {"temperature": 0.9}
    trainer = {"max_steps": num_steps, "updates_per_step": 2, "lr": 3e-3}
    settings = oracle.Settings(
        model=str(tmp_path), data=str(file), seed=11, **rollout, **trainer, **changes
    )
    expected, model = oracle.train(settings)
    records = library_records(
        tmp_path, file, seed=11, rollout=rollout, trainer=trainer, algorithm=changes
    )

    assert len(records) == num_steps
    assert [r["reward"] for r in records] == [r["reward"] for r in expected]
    assert [r["completions/mean_length"] for r in records] == pytest.approx(
        [r["length"] for r in expected]
    )
    without = [2 - len(r["losses"]) for r in expected]
    assert [r["train/updates_without_signal"] for r in records] == without
    pairs = [pair for pair in zip(records, expected, strict=True) if pair[1]["losses"]]
    for ours, theirs, close in (("train/loss", "losses", 1e-5), ("grad_norm", "grad_norms", 1e-4)):
        for record, wanted in pairs:
            mean = sum(wanted[theirs]) / len(wanted[theirs])
            assert record[ours] == pytest.approx(mean, rel=close, abs=close), record["step"]
    saved = tmp_path / "runs" / "parity" / "checkpoints" / f"step_{num_steps:08d}"
    final = load_file(saved / "hf" / "model.safetensors")
    wanted = {name: one for name, one in model.state_dict().items() if name in final}
    ours, theirs = (
        torch.cat([side[name].flatten() for name in wanted]) for side in (final, wanted)
    )
    # AdamW moves by its rate whatever the size of a gradient, so where one is nearly 0 its last
    # bits, which differ between machines, count.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=trainer["lr"])
    is_close = torch.isclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert is_close.float().mean() > 0.99
    assert len(final) >= len(list(model.parameters()))
    assert expected[-1]["reward"] > 2 * expected[0]["reward"]


def library_records(
    folder: Path,
    file: Path,
    *,
    seed: int,
    rollout: dict[str, Any],
    trainer: dict[str, Any],
    algorithm: dict[str, Any],
) -> list[dict[str, Any]]:
    """What the library's own loop writes to metrics.jsonl."""
    text = json.dumps(
        {
            "name": "parity",
            "runs_dir": str(folder / "runs"),
            "seed": seed,
            "model": {"path": str(folder)},
            "data": {
                "train": [{"type": "prompts", "path": str(file), "chat": False}],
                "max_length": 32,
            },
            "algorithm": {"type": "grpo", **algorithm},
            "rollout": rollout,
            "rewards": {"functions": [{"type": "exact_match"}]},
            "trainer": {**trainer, "max_tokens_per_device": 128, "device": "cpu", "threads": 1},
            "observe": {"console": "quiet", "report": False},
        }
    )
    (folder / "recipe.yaml").write_text(text)
    config = load_config(folder / "recipe.yaml")
    with open_session(
        config, recipe=text, command=[], console=Console(quiet=True), log_level="warning"
    ) as session:
        run_to_end(train_rl(config, session))
    lines = (folder / "runs" / "parity" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
