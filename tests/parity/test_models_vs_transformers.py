"""The native decoder is the transformers model: logits, gradients, files, both ways."""

import json

import pytest
import torch
from safetensors import safe_open
from tests.parity.tiny_models import FAMILIES, ROPES, edit_config, random_model, save
from tests.support.rounding import assert_right_to_rounding
from transformers import AutoModelForCausalLM

from homeostat.config.model import ModelConfig
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.models.lora import merged_state
from homeostat.ops.attention import PackedLayout
from homeostat.ops.logprobs import token_logprobs

CPU = torch.device("cpu")
LENGTHS = (7, 3, 7, 1, 12)


def load(folder, *, gradient_checkpointing=False, seed=0, **settings):
    return load_model(
        ModelConfig(path=str(folder), **settings),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=seed,
        gradient_checkpointing=gradient_checkpointing,
    )


def rows(seed=0, lengths=LENGTHS, vocab=97):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def packed_hidden(module, documents, **extra):
    layout = PackedLayout.of([len(document) for document in documents], CPU)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return module.hidden(torch.cat(documents), positions, layout, **extra)


def packed_logits(module, documents):
    return packed_hidden(module, documents) @ module.output_weight().t()


def separate_logits(model, documents):
    return torch.cat([model(input_ids=document[None]).logits[0] for document in documents])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_transformers_row_by_row(family, attention, tmp_path):
    reference = random_model(FAMILIES[family], seed=11)
    loaded = load(save(reference, tmp_path), attention=attention)
    documents = rows(seed=1)
    with torch.no_grad():
        ours = packed_logits(loaded.module, documents)
        theirs = separate_logits(reference, documents)
        exact = separate_logits(reference.double(), documents)
    assert_right_to_rounding(ours, theirs, exact=exact)
    assert loaded.sheet.facts["attention"] == attention
    assert loaded.sheet.num_params == loaded.sheet.num_trainable == reference.num_parameters()


@pytest.mark.parametrize("spelling", ["new", "old"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_scaling_equals_transformers_in_both_spellings(rope, spelling, tmp_path):
    reference = random_model({"model_type": "llama", "rope_parameters": dict(ROPES[rope])}, seed=3)
    save(reference, tmp_path)
    if spelling == "old":
        scaling = dict(ROPES[rope])
        theta = scaling.pop("rope_theta")
        scaling["type"] = scaling.pop("rope_type")
        has_scaling = scaling["type"] != "default"
        old = {"rope_theta": theta, "rope_scaling": scaling if has_scaling else None}
        edit_config(tmp_path, rope_parameters=None, **old)
    module = load(tmp_path).module
    documents = rows(seed=2, lengths=(130, 40))
    with torch.no_grad():
        ours, theirs = packed_logits(module, documents), separate_logits(reference, documents)
        exact = separate_logits(reference.double(), documents)
    assert_right_to_rounding(ours, theirs, exact=exact)


def loss_of(module, documents):
    tokens = torch.cat(documents)
    starts = torch.cat([torch.arange(len(document)) for document in documents])
    predicted = (starts > 0).nonzero().squeeze(1)
    hidden = packed_hidden(module, documents)
    logp = token_logprobs(
        hidden[predicted - 1], module.output_weight(), tokens[predicted], chunk_bytes=2**16
    )
    return -logp.sum()


def reference_loss(model, documents):
    total = 0.0
    for document in documents:
        logits = model(input_ids=document[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum")
    return total


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_bias"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_equal_transformers(family, gradient_checkpointing, tmp_path):
    reference = random_model(FAMILIES[family], seed=5)
    folder = save(reference, tmp_path)
    module = load(folder, gradient_checkpointing=gradient_checkpointing).module
    documents = [document for document in rows(seed=4) if len(document) > 1]
    ours, theirs = loss_of(module, documents), reference_loss(reference, documents)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-6)
    ours.backward()
    theirs.backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        scale = float(wanted[name].grad.abs().max())
        torch.testing.assert_close(
            parameter.grad, wanted[name].grad, atol=2e-5 * max(1.0, scale), rtol=0, msg=name
        )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_what_we_save_transformers_loads_with_equal_logits(family, max_shard_bytes, tmp_path):
    reference = random_model(FAMILIES[family], seed=6)
    loaded = load(save(reference, tmp_path / "in"))
    out = tmp_path / "out"
    save_hf(
        merged_state(loaded.module),
        out,
        source_config=loaded.sheet.source_config,
        generation_config=loaded.sheet.generation_config,
        max_shard_bytes=max_shard_bytes,
    )
    shards = sorted(out.glob("*.safetensors"))
    assert (len(shards) > 2) == (max_shard_bytes < 10**9)
    assert (out / "model.safetensors.index.json").exists() == (len(shards) > 1)
    assert (out / "generation_config.json").exists()
    assert not list(out.glob("part-*"))
    again, report = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    documents = rows(seed=9)
    with torch.no_grad():
        theirs, want = separate_logits(again, documents), separate_logits(reference, documents)
    torch.testing.assert_close(theirs, want, atol=1e-5, rtol=1e-5)
    assert load(out).sheet.num_params == loaded.sheet.num_params


def test_saved_dtype_is_written_under_the_key_the_source_used(tmp_path):
    reference = random_model(FAMILIES["llama"])
    folder = save(reference, tmp_path / "in")
    edit_config(folder, dtype=None, torch_dtype="bfloat16")
    loaded = load(folder)
    save_hf(merged_state(loaded.module), tmp_path / "out", source_config=loaded.sheet.source_config)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["torch_dtype"] == "float32"
    assert "dtype" not in written


def test_shards_hold_at_most_their_limit(tmp_path):
    loaded = load(save(random_model(FAMILIES["llama"]), tmp_path / "in"))
    state = list(merged_state(loaded.module))
    limit = max(tensor.nbytes for _, tensor in state)
    save_hf(iter(state), tmp_path / "out", source_config={}, max_shard_bytes=limit)
    names = []
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= limit
        names += sizes
    assert sorted(names) == sorted(name for name, _ in state)
