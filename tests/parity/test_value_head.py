"""A value model is transformers' sequence classifier with one label: values, files, adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.parity.tiny_models import FAMILIES, random_model, save
from tests.support import tiny
from tests.support.rounding import assert_right_to_rounding
from transformers import AutoModelForSequenceClassification

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.errors import LossInputError, ModelError
from homeostat.models.adapter_files import save_adapter
from homeostat.models.build import LoadedModel, load_model
from homeostat.models.lora import lora_modules
from homeostat.models.value_head import value_weight
from homeostat.train.cores import PLAIN
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import resolve_runtime
from homeostat.types import LossSpec, Outputs, Role, TokenRow, TrainBatch

POLICY = Role.POLICY


def classifier(folder: Path, family: str, *, num_labels: int = 1) -> torch.nn.Module:
    """A sequence classifier of transformers with random weights, saved in the folder."""
    causal = random_model(FAMILIES[family], seed=5)
    save(causal, folder / "causal")
    torch.manual_seed(6)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "causal", num_labels=num_labels, dtype=torch.float32
    ).eval()
    save(model, folder / "classifier")
    return model


def value_model(folder: Path, *, head: str = "zero", lora: LoraConfig | None = None) -> LoadedModel:
    return load_model(
        ModelConfig(path=str(folder)),
        lora,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=3,
        gradient_checkpointing=False,
        head=head,
    )


def some_rows(seed: int = 0) -> list[TokenRow]:
    """Completions of some prompts: two rows share theirs."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 90, 5)
    tokens = [np.concatenate([prompt, rng.integers(0, 90, n)]) for n in (3, 6)]
    tokens.append(rng.integers(0, 90, 9))
    weights = [np.arange(len(row)) >= 5 for row in tokens]
    pairs = enumerate(zip(tokens, weights, strict=True))
    return [TokenRow(i, row_T, weights_T.astype(np.float32)) for i, (row_T, weights_T) in pairs]


def trainer_of(loaded: LoadedModel, folder: Path, *overrides: str) -> LocalTrainer:
    config = tiny.config(folder, *overrides)
    runtime = resolve_runtime(config, kept=PLAIN)
    models = {POLICY: RoleModel(loaded, config=config.trainer)}
    return LocalTrainer(models, config.trainer, runtime=runtime, seed=0)


def every_value(model: torch.nn.Module, row: TokenRow) -> torch.Tensor:
    """The value at every token, by transformers: its classifier returns the last one alone."""
    tokens = torch.from_numpy(row.tokens_T)[None]
    return model.score(model.model(tokens).last_hidden_state)[0, :, 0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_values_are_those_of_transformers_sequence_classifier(family: str, tmp_path: Path) -> None:
    reference, rows = classifier(tmp_path, family), some_rows()
    trainer = trainer_of(value_model(tmp_path / "classifier"), tmp_path)
    batches = [TrainBatch.of(rows[:2]), TrainBatch.of(rows[2:])]
    found = trainer.forward(POLICY, batches, Outputs(value=True))
    assert all(one.logp_M is None and one.entropy_M is None for one in found)
    value_M = torch.from_numpy(np.concatenate([one.value_M for one in found]))
    value_B = torch.from_numpy(np.concatenate([one.value_B for one in found]))

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            per_row = [every_value(reference, row) for row in rows]
            # The state in which a token is chosen ends with the token before it.
            before = [v[:-1][row.weights_T[1:] > 0] for v, row in zip(per_row, rows, strict=True)]
            whole = [reference(torch.from_numpy(row.tokens_T)[None]).logits[0, 0] for row in rows]
        return torch.cat(before), torch.stack(whole)

    (before, whole), (exact_before, exact_whole) = theirs(), (reference.double(), theirs())[1]
    assert_right_to_rounding(value_M, before, exact=exact_before)
    assert_right_to_rounding(value_B, whole, exact=exact_whole)


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    reference = classifier(tmp_path, "llama")
    trainer = trainer_of(value_model(tmp_path / "causal", head="random"), tmp_path)
    config = tiny.config(tmp_path)
    trainer.export(POLICY, tmp_path / "ours", config.for_export)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    theirs, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.num_labels == 1
    batch = TrainBatch.of(some_rows())
    (found,) = trainer.forward(POLICY, [batch], Outputs(value=True))
    with torch.no_grad():
        wanted = [theirs(torch.from_numpy(row.tokens_T)[None]).logits[0, 0] for row in batch.rows()]
    np.testing.assert_allclose(found.value_B, wanted, rtol=1e-4, atol=1e-6)
    # The same folder is a start of ours again, whose head counts and not a new one.
    again = value_model(tmp_path / "ours", head="zero")
    assert torch.equal(value_weight(again.module), value_weight(trainer.roles[POLICY].model))
    assert reference.config.num_labels == 1


def test_a_causal_lm_gets_a_new_head_and_loses_its_output_matrix(tmp_path: Path) -> None:
    causal = random_model(FAMILIES["llama"], seed=5)
    save(causal, tmp_path)
    zero, random = (value_model(tmp_path, head=head) for head in ("zero", "random"))
    assert not value_weight(zero.module).any()
    assert 0 < value_weight(random.module).abs().max() < 1
    assert value_weight(random.module).requires_grad
    assert "lm_head.weight" not in dict(zero.module.named_parameters())
    assert zero.sheet.has_value_head
    assert zero.sheet.vocab_size == 97
    for name, tensor in zero.module.model.state_dict().items():
        assert torch.equal(tensor, causal.model.state_dict()[name]), name


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    classifier(tmp_path, "llama", num_labels=3)
    with pytest.raises(ModelError, match=r"has 3 rows: .* num_labels 1, or a causal LM"):
        value_model(tmp_path / "classifier")


def test_transformers_implementation_is_refused(tmp_path: Path) -> None:
    save(random_model(FAMILIES["llama"]), tmp_path)
    with pytest.raises(ModelError, match="native decoder alone"):
        load_model(
            ModelConfig(path=str(tmp_path), implementation="transformers"),
            None,
            dtype=torch.float32,
            device=torch.device("cpu"),
            seed=0,
            gradient_checkpointing=False,
            head="zero",
        )


def test_log_probs_and_losses_of_log_probs_are_refused(tmp_path: Path) -> None:
    save(random_model(FAMILIES["llama"]), tmp_path)
    trainer = trainer_of(value_model(tmp_path), tmp_path)
    batch = TrainBatch.of(some_rows())
    with pytest.raises(ModelError, match="value head in place of its output matrix"):
        trainer.forward(POLICY, [batch], Outputs(logp=True))
    with pytest.raises(LossInputError, match="is of log-probs, and the policy has a value head"):
        trainer.accumulate(POLICY, [batch], LossSpec("sft", denominator=1.0), step=1)


def test_peft_reads_an_adapter_with_its_value_head(tmp_path: Path) -> None:
    save(random_model(FAMILIES["qwen2"], seed=1), tmp_path / "base")
    # A classifier of transformers over the same trunk, whose own head peft replaces.
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    lora = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "down_proj"))
    loaded = value_model(tmp_path / "base", head="random", lora=lora)
    assert value_weight(loaded.module).requires_grad
    assert not loaded.module.model.norm.weight.requires_grad
    with torch.no_grad():
        for _, module in lora_modules(loaded.module):
            module.lora_B.weight.normal_(0, 0.5)
    folder = tmp_path / "adapter"
    save_adapter(loaded.module, folder, lora, base=ModelConfig(path=str(tmp_path / "base")))
    theirs = PeftModel.from_pretrained(base, folder).eval()
    batch = TrainBatch.of(some_rows())
    (found,) = trainer_of(loaded, tmp_path).forward(POLICY, [batch], Outputs(value=True))
    with torch.no_grad():
        wanted = [theirs(torch.from_numpy(row.tokens_T)[None]).logits[0, 0] for row in batch.rows()]
    np.testing.assert_allclose(found.value_B, wanted, rtol=1e-4, atol=1e-6)
    # We read it, too: the adapter and the head.
    again = value_model(
        tmp_path / "base", lora=LoraConfig(**{**lora.model_dump(), "path": str(folder)})
    )
    ours, theirs_again = (dict(one.module.named_parameters()) for one in (loaded, again))
    assert all(torch.equal(ours[name], theirs_again[name]) for name in ours)
