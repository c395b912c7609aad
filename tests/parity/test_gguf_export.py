"""A model exported as GGUF is the same model, for us and for transformers' own reader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tests.support import tiny
from tests.support.runs import train
from tiny_models import ROPES, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.config.model import ModelConfig
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import ModelError
from homeostat.generation.choice import choose
from homeostat.generation.gguf_export import export_gguf
from homeostat.generation.loading import load_text_model
from homeostat.models.gguf_write import rope_factors
from homeostat.ops.attention import PackedLayout
from homeostat.ops.rope import RopeConfig, inverse_frequencies

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 290, (17,), generator=torch.Generator().manual_seed(5))
# More rows than the tokenizer has tokens, as real models have.
WIDE = {"vocab_size": 320, "intermediate_size": 64, "bos_token_id": None, "eos_token_id": 2}
CASES = {
    "llama": {"model_type": "llama", **WIDE},
    "llama_tied_bias": {
        "model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, **WIDE
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16, **WIDE},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **WIDE},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, **WIDE},
}  # fmt: skip
TEXTS = ["turn around abc", "  two  spaces\n\nand 1234 digits", "<|im_start|>user\nhi<|im_end|>"]


def folder_of(place: Path, settings: dict) -> tuple[Path, torch.nn.Module]:
    """A checkpoint with random weights and the demo's byte-level tokenizer."""
    model = random_model(settings, seed=3)
    model.save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.ASSETS / "tiny-chat" / name, place / name)
    return place, model


def own_logits(path: Path) -> torch.Tensor:
    module = load_text_model(choose(path), device="cpu").loaded.module
    with torch.no_grad():
        layout = PackedLayout.of([len(TOKENS)], CPU)
        hidden = module.hidden(TOKENS, torch.arange(len(TOKENS)), layout)
        return hidden @ module.output_weight().T


@pytest.mark.parametrize("case", CASES)
def test_the_file_gives_the_logits_of_the_folder(case: str, tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path / "model", CASES[case])
    before = own_logits(folder)
    export_gguf(choose(folder), tmp_path / "exact.gguf", dtype="fp32")
    assert torch.equal(own_logits(tmp_path / "exact.gguf"), before), "fp32 keeps every bit"
    if "bias" in case:
        # transformers reads no biases of a Llama from a GGUF file.
        return
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="exact.gguf", dtype=torch.float32
    )
    with torch.no_grad():
        assert torch.allclose(theirs(TOKENS[None]).logits, model(TOKENS[None]).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "largest"),
    [({"dtype": "fp16"}, 2e-3), ({"dtype": "bf16"}, 2e-2), ({"quantization": "q8_0"}, 3e-2)],
)
def test_rounded_weights_are_close(how: dict, largest: float, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "model", CASES["llama"])
    before = own_logits(folder)
    export_gguf(choose(folder), tmp_path / "small.gguf", **how)
    scale = before.abs().max()
    difference = (own_logits(tmp_path / "small.gguf") - before).abs().max() / scale
    assert 0 < difference < largest
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "small.gguf").tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    wanted = {"fp16": "F16", "bf16": "BF16"}.get(how.get("dtype", ""), "Q8_0")
    assert kinds["blk.0.attn_q.weight"] == wanted


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "model", CASES["llama"])
    export_gguf(choose(folder), tmp_path / "m.gguf")
    before = load_tokenizer(ModelConfig(path=str(folder)))
    after = load_tokenizer(ModelConfig(path=str(tmp_path / "m.gguf")))
    for text in TEXTS:
        assert before.encode(text)[0].tolist() == after.encode(text)[0].tolist()
    assert after.chat_template == before.chat_template
    assert (after.eos_id, after.stop_ids) == (before.eos_id, before.stop_ids)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert theirs(TEXTS[0])["input_ids"] == before.encode(TEXTS[0])[0].tolist()


def test_an_adapter_of_an_interrupted_run_is_merged(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    short = {"max_steps": 2, "batch_rows": 4, "threads": 1, "lr": 1e-2}
    folder, _ = folder_of(tmp_path / "base", CASES["llama"])
    model = {"path": str(folder), "init": "pretrained"}
    train(tiny.config(tmp_path, name="adapter", lora=lora, model=model, trainer=short))
    run, file = tmp_path / "runs" / "adapter", tmp_path / "merged.gguf"
    result = CliRunner().invoke(app, ["export", str(run), str(file), "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    assert torch.equal(own_logits(file), own_logits(run))


def test_rows_that_are_no_multiple_of_32_are_not_quantised(tmp_path: Path) -> None:
    settings = {**CASES["llama"], "intermediate_size": 48}
    folder, _ = folder_of(tmp_path / "model", settings)
    written = export_gguf(choose(folder), tmp_path / "m.gguf", quantization="q8_0")
    assert written.not_quantised == ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")
    assert own_logits(tmp_path / "m.gguf").isfinite().all()


def test_frequencies_of_llama_3_become_factors() -> None:
    settings = ROPES["llama3"]
    rope = RopeConfig(
        10_000.0, "llama3", factor=8.0, original_length=64,
        low_freq_factor=settings["low_freq_factor"], high_freq_factor=settings["high_freq_factor"],
    )  # fmt: skip
    factors_F = rope_factors(rope, head_dim=32)
    plain_F = 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    assert factors_F is not None
    # The shortest waves stay, the longest are stretched by the whole factor.
    assert factors_F[0] == pytest.approx(1.0)
    assert factors_F[-1] == pytest.approx(8.0)
    used_F = inverse_frequencies(rope, head_dim=32).numpy()
    np.testing.assert_allclose(plain_F / factors_F, used_F, rtol=1e-5)


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "model", CASES["llama"])
    choice = choose(folder)
    with pytest.raises(ModelError, match=r"ends with \.gguf"):
        export_gguf(choice, tmp_path / "m.bin")
    with pytest.raises(ModelError, match="exclude each other"):
        export_gguf(choice, tmp_path / "m.gguf", dtype="bf16", quantization="q8_0")
    (tmp_path / "there.gguf").touch()
    with pytest.raises(ModelError, match="exists already"):
        export_gguf(choice, tmp_path / "there.gguf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mlp_bias": True}))
    with pytest.raises(ModelError, match="biases"):
        export_gguf(choice, tmp_path / "m.gguf")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ModelError, match="gpt2"):
        export_gguf(choice, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="WordLevel"):
        export_gguf(choose(tiny.ASSETS / "tiny-sort"), tmp_path / "m.gguf")
    assert [one.name for one in tmp_path.glob("*.gguf")] == ["there.gguf"]
