"""Adapters travel between homeostat and peft, both ways, with equal outputs."""

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tests.support.rounding import assert_right_to_rounding
from tiny_models import FAMILIES, random_model, save
from transformers import AutoModelForCausalLM

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.models.adapter_files import save_adapter
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.models.lora import adapter_state, merged_state
from homeostat.ops.attention import PackedLayout

CPU = torch.device("cpu")
TARGETS = ("q_proj", "v_proj", "down_proj")


def load(folder, adapter, **settings):
    return load_model(
        ModelConfig(path=str(folder), **settings),
        adapter,
        dtype=torch.float32,
        device=CPU,
        seed=3,
        gradient_checkpointing=False,
    )


def logits(module, tokens):
    layout = PackedLayout.of([len(tokens)], CPU)
    with torch.no_grad():
        hidden = module.hidden(tokens, torch.arange(len(tokens)), layout)
        return hidden @ module.output_weight().t()


def logits_of_peer(model):
    """(in fp32, in float64). The model is float64 afterwards."""
    with torch.no_grad():
        return [
            model.to(dtype)(tokens()[None]).logits[0] for dtype in (torch.float32, torch.double)
        ]


def tokens(seed=0):
    return torch.randint(0, 97, (11,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_peft_reads_what_we_write(implementation, tmp_path):
    base = save(random_model(FAMILIES["qwen2"], seed=1), tmp_path / "base")
    adapter = LoraConfig(rank=3, alpha=5.0, dropout=0.1, targets=TARGETS)
    loaded = load(base, adapter, implementation=implementation)
    with torch.no_grad():
        for name, tensor in adapter_state(loaded.module):
            if "lora_B" in name:
                tensor.normal_(0, 0.5)
    save_adapter(loaded.module, tmp_path / "adapter", adapter, base=ModelConfig(path=str(base)))
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = reference(tokens()[None]).logits[0].detach()
    theirs = PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    want, exact = logits_of_peer(theirs)
    ours = logits(loaded.module.eval(), tokens())
    assert (want - plain).abs().max() > 0.1
    assert_right_to_rounding(ours, want, exact=exact)


@pytest.mark.parametrize("targets", [TARGETS, ("all-linear",)])
def test_we_read_what_peft_writes(targets, tmp_path):
    base = save(random_model(FAMILIES["llama"], seed=2), tmp_path / "base")
    modules = list(targets) if len(targets) > 1 else "all-linear"
    settings = PeftConfig(r=2, lora_alpha=7, target_modules=modules, task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = get_peft_model(model, settings).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    theirs.save_pretrained(tmp_path / "adapter")
    want, exact = logits_of_peer(theirs)
    adapter = LoraConfig(rank=2, alpha=7.0, targets=targets, path=str(tmp_path / "adapter"))
    ours = logits(load(base, adapter).module, tokens())
    assert_right_to_rounding(ours, want, exact=exact)


def test_the_merged_export_is_the_adapted_model(tmp_path):
    base = save(random_model(FAMILIES["qwen3"], seed=4), tmp_path / "base")
    loaded = load(base, LoraConfig(rank=2, alpha=3.0, targets=TARGETS))
    with torch.no_grad():
        for name, tensor in adapter_state(loaded.module):
            if "lora_B" in name:
                tensor.normal_(0, 0.5)
    out = tmp_path / "merged"
    save_hf(merged_state(loaded.module), out, source_config=loaded.sheet.source_config)
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    want, exact = logits_of_peer(merged)
    # What is merged is rounded once more than what is applied.
    assert_right_to_rounding(logits(loaded.module, tokens()), want, exact=exact)


KINDS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "both": {"use_rslora": True, "use_dora": True},
}


def peer_of(base, kind, *, dropout=0.0):
    """peft's model of a kind of adapter whose B and lengths have moved."""
    settings = PeftConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=dropout,
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
        **KINDS[kind],
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
    return theirs


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_adapters_have_pefts_logits_and_step(kind, tmp_path):
    base = save(random_model(FAMILIES["qwen2"], seed=5), tmp_path / "base")
    theirs = peer_of(base, kind)
    theirs.save_pretrained(tmp_path / "adapter")
    kinds = {name.removeprefix("use_"): value for name, value in KINDS[kind].items()}
    adapter = LoraConfig(
        rank=4, alpha=6.0, targets=TARGETS, path=str(tmp_path / "adapter"), **kinds
    )
    ours = load(base, adapter).module.train()
    layout = PackedLayout.of([11], CPU)
    hidden = ours.hidden(tokens(), torch.arange(11), layout)
    found = hidden @ ours.output_weight().t()
    wanted = theirs(tokens()[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # One step of gradient descent.
    own = dict(adapter_state(ours))
    peer = {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace("magnitude_vector.weight", "magnitude_vector"): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert own.keys() == peer.keys()
    for out in (found, wanted):
        torch.nn.functional.cross_entropy(out[:-1], tokens()[1:]).backward()
    for name, parameter in own.items():
        torch.testing.assert_close(
            parameter.detach() - 0.1 * parameter.grad,
            peer[name].detach() - 0.1 * peer[name].grad,
            rtol=1e-4,
            atol=1e-5,
        )
        assert parameter.grad.abs().max() > 1e-5, name
    # What we write is what peft reads, merged or not.
    save_adapter(ours, tmp_path / "again", adapter, base=ModelConfig(path=str(base)))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = PeftModel.from_pretrained(model, tmp_path / "again").eval()
    torch.testing.assert_close(again(tokens()[None]).logits[0], wanted, rtol=1e-5, atol=1e-5)
    merged = again.merge_and_unload().state_dict()
    for name, tensor in merged_state(ours):
        torch.testing.assert_close(tensor.detach(), merged[name], rtol=1e-4, atol=1e-5)
