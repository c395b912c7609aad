"""Families with a block of their own are the transformers model: packed, sampled, scored, exported.

One tiny random model per family is written once; every test compares the native decoder with it.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.parity.tiny_families import BLOCKS, LONG, random_family
from tests.parity.tiny_models import SIZES, edit_config, random_model, save
from transformers import AutoConfig, AutoModelForCausalLM

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError, ModelError
from homeostat.models.build import load_model
from homeostat.models.families import decoder_config
from homeostat.models.float64 import reference_logprobs
from homeostat.models.hf import read_config, save_hf
from homeostat.models.lora import lora_modules, merged_state
from homeostat.ops.attention import PackedLayout
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import TokenRow

CPU = torch.device("cpu")
LENGTHS = (7, 3, 7, 1, 12)
TEMPERATURE = 0.7
SLOW = pytest.mark.slow
# Their blocks are parts of others'.
LIKE_OTHERS = ("qwen2_window", "phi3", "glm")


@dataclass
class Family:
    """A saved model, what transformers computes with it, and the documents it computes it of."""

    name: str
    folder: object
    reference: torch.nn.Module
    documents: list
    logits: torch.Tensor

    def load(self, lora=None, *, gradient_checkpointing=False, **settings):
        return load_model(
            ModelConfig(path=str(self.folder), **settings),
            lora,
            dtype=torch.float32,
            device=CPU,
            seed=0,
            gradient_checkpointing=gradient_checkpointing,
        )


def rows(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator) for length in lengths]


def reference_logits(model, documents):
    return torch.cat([model(input_ids=document[None]).logits[0] for document in documents])


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=SLOW) if n in LIKE_OTHERS else n for n in BLOCKS],
)
def family(request, tmp_path_factory):
    reference = random_family(request.param)
    folder = save(reference, tmp_path_factory.mktemp(request.param))
    documents = rows()
    with torch.no_grad():
        logits = reference_logits(reference, documents)
    return Family(request.param, folder, reference, documents, logits)


def hidden_of(module, documents):
    layout = PackedLayout.of([len(document) for document in documents], CPU)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return module.hidden(torch.cat(documents), positions, layout)


def logits_of(module, documents):
    logits = hidden_of(module, documents) @ module.output_weight().t()
    cap = module.logit_cap
    return logits if cap is None else (logits / cap).tanh() * cap


def assert_close(found, wanted, *, tolerance=1e-5):
    scale = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"attention": "eager"}, marks=SLOW),
        pytest.param({"numerics": "invariant"}, marks=SLOW),
    ],
)
def test_packed_logits_equal_transformers(family, how):
    loaded = family.load(**how)
    with torch.no_grad():
        assert_close(logits_of(loaded.module, family.documents), family.logits)
    assert loaded.sheet.num_params == family.reference.num_parameters()
    assert loaded.module.config.num_params == loaded.sheet.num_params


def losses(module, documents):
    tokens = torch.cat(documents)
    starts = torch.cat([torch.arange(len(document)) for document in documents])
    at = (starts > 0).nonzero().squeeze(1)
    inputs = (hidden_of(module, documents)[at - 1], module.output_weight(), tokens[at])
    how = {"chunk_bytes": 4000, "soft_cap": module.logit_cap, "temperature": TEMPERATURE}
    logp, entropy = token_logprobs_and_entropy(*inputs, entropy_grad=True, **how)
    return -logp.sum() - 0.3 * entropy.sum()


def reference_loss(model, documents):
    total = 0.0
    for document in documents:
        logp = (model(input_ids=document[None]).logits[0] / TEMPERATURE).log_softmax(-1)[:-1]
        total = total - logp.gather(1, document[1:, None]).sum()
        total = total + 0.3 * (logp.exp() * logp).sum()
    return total


@pytest.mark.parametrize("checkpointing", ["selective", pytest.param(False, marks=SLOW)])
def test_gradients_equal_transformers(family, checkpointing):
    module = family.load(gradient_checkpointing=checkpointing).module
    documents = [document for document in family.documents if len(document) > 1]
    ours, theirs = losses(module, documents), reference_loss(family.reference, documents)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-6)
    family.reference.zero_grad()
    ours.backward()
    theirs.backward()
    wanted = dict(family.reference.named_parameters())
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, wanted[name].grad, tolerance=2e-5)


def engine_of(module, **settings):
    how = {"in_rows": settings.pop("in_rows", None)}
    config = NativeEngineConfig(**settings)
    return NativeEngine(
        module, config, device=CPU, max_tokens=60, decode=None, chunk_bytes=1 << 16, **how
    )


def requests(documents, new=14):
    sampling = Sampling(new, temperature=TEMPERATURE)
    return [
        Request(f"{n}", document.numpy(), sampling, seed=3) for n, document in enumerate(documents)
    ]


def reference_logps(model, prompt, tokens_T):
    whole = torch.cat([prompt, torch.from_numpy(tokens_T)])
    with torch.no_grad():
        logits = model(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    return logp.gather(1, whole[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize(
    ("numerics", "settings"),
    [
        ("fast", {"prefill_tokens": 4}),
        pytest.param("fast", {"in_rows": False}, marks=SLOW),
        pytest.param("invariant", {}, marks=SLOW),
    ],
)
def test_the_engine_samples_from_the_transformers_distribution(family, numerics, settings):
    require_engine(family, numerics, settings)


def test_invariant_numerics_have_the_same_bits_in_engine_and_trainer(tmp_path):
    reference = random_family("gemma2")
    family = Family("gemma2", save(reference, tmp_path), reference, rows((9, 12)), None)
    require_engine(family, "invariant", {})


def require_engine(family, numerics, settings):
    engine = engine_of(family.load(numerics=numerics).module, **settings)
    wanted = requests(family.documents)
    for request, completion in zip(wanted, generate(engine, wanted, timeout_s=60), strict=True):
        assert len(completion.tokens_T) == 14
        prompt = torch.from_numpy(request.tokens_T)
        theirs = reference_logps(family.reference, prompt, completion.tokens_T)
        assert_close(torch.from_numpy(completion.engine_logp_T), theirs)
        row = np.concatenate([request.tokens_T, completion.tokens_T])
        weights = np.zeros(len(row), dtype=np.float32)
        weights[len(prompt) :] = 1
        scored = engine.score([TokenRow(0, row, weights)], temperature=TEMPERATURE)[0]
        if numerics == "invariant":
            assert scored.tolist() == completion.engine_logp_T.tolist()
        assert_close(torch.from_numpy(scored), theirs)


def test_float64_agrees(family):
    shape = decoder_config(read_config(family.folder))
    weights = dict(family.load().module.state_dict())
    document = family.documents[-1]
    found = reference_logprobs(shape, weights, document.numpy(), temperature=TEMPERATURE)
    theirs = reference_logps(family.reference, document[:1], document[1:].numpy())
    assert_close(torch.from_numpy(found).float(), theirs)


def test_an_export_is_the_same_model_in_transformers(family, tmp_path):
    loaded = family.load()
    save_hf(merged_state(loaded.module), tmp_path, source_config=loaded.sheet.source_config)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(reference_logits(again, family.documents), family.logits)


@SLOW
def test_an_adapter_on_the_default_targets_covers_every_linear_map(family):
    require_adapter(family)


def test_an_adapter_on_the_default_targets_covers_fused_maps(tmp_path):
    reference = random_family("phi3")
    documents = rows()
    with torch.no_grad():
        logits = reference_logits(reference, documents)
    require_adapter(Family("phi3", save(reference, tmp_path), reference, documents, logits))


def require_adapter(family):
    lora = LoraConfig(rank=2, alpha=4)
    module = family.load(lora).module
    everywhere = family.load(lora.model_copy(update={"targets": ("all-linear",)})).module
    names = [name for name, _ in lora_modules(module)]
    assert sorted(names) == sorted(name for name, _ in lora_modules(everywhere))
    with torch.no_grad():
        for _, adapted in lora_modules(module):
            adapted.lora_B.weight.normal_(std=0.1)
        changed = logits_of(module, family.documents)
        assert (changed - family.logits).abs().max() > 1e-3
        engine = engine_of(module)
        (request,) = requests(family.documents[:1])
        (completion,) = generate(engine, [request], timeout_s=60)
        row = np.concatenate([request.tokens_T, completion.tokens_T])
        weights = (np.arange(len(row)) >= len(request.tokens_T)).astype(np.float32)
        (scored,) = engine.score([TokenRow(0, row, weights)], temperature=TEMPERATURE)
    np.testing.assert_allclose(completion.engine_logp_T, scored, atol=1e-5)


@SLOW
def test_random_weights_are_drawn_as_the_family_starts(family):
    module = family.load(init="random").module
    with torch.no_grad():
        logits = logits_of(module, family.documents)
    # Norms that multiply by 1 + weight start at 0, all others at 1.
    norms = [p for n, p in module.named_parameters() if "norm" in n]
    start = 0.0 if module.config.block.centred_norms else 1.0
    assert all((norm == start).all() for norm in norms)
    assert logits.isfinite().all()


def test_old_spellings_of_gemma_3_rotations_are_read(tmp_path):
    reference = random_family("gemma3")
    folder = save(reference, tmp_path)
    new = decoder_config(read_config(folder))
    edit_config(
        folder,
        rope_parameters=None,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=None,
        sliding_window_pattern=2,
    )
    old = decoder_config(read_config(folder))
    assert (old.rope, old.block.local_rope) == (new.rope, new.block.local_rope)
    assert old.block.windows == (5, None, 5)


def test_a_cap_of_scores_that_gemma_3_never_applies_is_none_here_either(tmp_path):
    reference = random_model({**BLOCKS["gemma3"], "attn_logit_softcapping": 1.0}, seed=7)
    module = load_model(
        ModelConfig(path=str(save(reference, tmp_path))),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    ).module
    documents = rows()
    layout = PackedLayout.of(list(LENGTHS), CPU)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        hidden = module.hidden(torch.cat(documents), positions, layout)
        ours, theirs = hidden @ module.output_weight().t(), reference_logits(reference, documents)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_original_length_of_longrope_is_the_one_that_transformers_reads():
    """Beside the rotary settings or 4096, whatever they say themselves."""
    scaling = {**LONG, "factor": 4.0}
    for given in ({}, {"original_max_position_embeddings": 128}):
        raw = {**SIZES, "rope_scaling": scaling, "max_position_embeddings": 131072, **given}
        theirs = AutoConfig.for_model("phi3", **raw, pad_token_id=0).rope_parameters
        ours = decoder_config({**raw, "model_type": "phi3"}).rope
        assert ours.original_length == theirs["original_max_position_embeddings"]


def test_longrope_beyond_its_original_length_is_refused(tmp_path):
    family = Family("", save(random_family("phi4_mini"), tmp_path), None, [], None)
    module = family.load().module
    with pytest.raises(ModelError, match=r"65 tokens.*64.*data\.max_length"):
        hidden_of(module, rows(lengths=(65,)))
    with pytest.raises(EngineError, match=r"data\.max_length"):
        NativeEngine(
            module, NativeEngineConfig(), device=CPU, max_tokens=65, decode=None, chunk_bytes=4096
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma3"}, "gemma3_text"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "relu"}, "relu"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ],
)
def test_a_config_of_gemma_that_would_compute_something_else_is_refused(change, reason):
    config = {"model_type": "gemma3_text", "vocab_size": 97, "hidden_size": 32, "head_dim": 8}
    config |= {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    decoder_config(config)
    with pytest.raises(ModelError, match=reason):
        decoder_config({**config, **change})


def test_soft_caps_have_their_gradient_over_kept_sets_too():
    """The log-probs of capped logits, in a few lines of float64."""
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, dtype=torch.float64)
    weight = torch.randn(11, 8, dtype=torch.float64)
    targets = torch.tensor([1, 4, 0, 10, 3])
    wide = [x.clone().requires_grad_() for x in (hidden, weight)]
    logits = ((wide[0] @ wide[1].T) / 2.0).tanh() * 2.0 / 0.5
    want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    want.square().sum().backward()
    narrow = [x.float().requires_grad_() for x in (hidden, weight)]
    how = {"temperature": 0.5, "chunk_bytes": 100, "soft_cap": 2.0}
    for numerics in ("fast", "invariant"):
        found = token_logprobs(*narrow, targets, numerics=numerics, **how)
        assert_close(found.detach(), want.float().detach())
    found.square().sum().backward()
    for ours, theirs in zip(narrow, wide, strict=True):
        assert_close(ours.grad, theirs.grad.float(), tolerance=2e-5)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_of_gemma3_truncates_as_in_transformers(tmp_path, key, truncate):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    yarn |= {"truncate": truncate}
    local = {"rope_type": "default", "rope_theta": 1e4}
    nested = {"full_attention": {"rope_theta": 1e6, **yarn}, "sliding_attention": local}
    reference = random_model({**BLOCKS["gemma3"], "rope_parameters": nested}, seed=7)
    folder = save(reference, tmp_path / "model")
    if key == "rope_scaling":
        # The older spelling.
        edit_config(folder, rope_parameters=None, rope_theta=1e6, rope_scaling=yarn)
        reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    documents = rows((40, 7))
    with torch.no_grad():
        wanted = reference_logits(reference, documents)
        found = Family("gemma3", folder, reference, documents, wanted)
        assert_close(logits_of(found.load().module, documents), wanted)
