"""FP8 engines: the native one on a CPU, its cache, and what other engines are sent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, random_model, save
from tests.support import tiny

from homeostat.config.fp8 import Fp8Config
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineError, ModelError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.ops.attention import PackedLayout
from homeostat.precision.fp8 import Quantised, dequantise, quantise
from homeostat.precision.fp8_model import fp8_choices, rewrite_fp8
from homeostat.precision.recipe import Fp8Recipe
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.cache import Fp8Cache, KVCache, token_bytes
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.vllm.core import quantised_arguments
from homeostat.run.publication.fp8_checkpoint import Fp8Checkpoint
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.types import TokenRow

CPU = torch.device("cpu")
FP8 = Fp8Config()


def decoder(tmp_path: Path, family: str = "qwen2", numerics: str = "fast") -> Decoder:
    folder = save(random_model(FAMILIES[family]), tmp_path / family)
    config = ModelConfig(path=str(folder), numerics=numerics)
    how = {"dtype": torch.float32, "device": CPU, "seed": 0, "gradient_checkpointing": False}
    loaded = load_model(config, None, **how).module
    assert isinstance(loaded, Decoder)
    return loaded


def engine(model: Decoder, fp8: Fp8Config | None = None, **settings: object) -> NativeEngine:
    return NativeEngine(
        model,
        NativeEngineConfig(max_concurrency=4, **settings),
        device=CPU,
        max_tokens=40,
        decode=None,
        chunk_bytes=1 << 20,
        fp8=fp8,
    )


def sampled(made: NativeEngine) -> list[TokenRow]:
    """Completions as rows that carry the engine's log-probs."""
    requests = [
        Request(str(n), np.arange(3 + n), Sampling(max_new_tokens=5), seed=0) for n in range(3)
    ]
    rows = []
    for n, completion in enumerate(generate(made, requests, timeout_s=60)):
        tokens_T = np.concatenate([np.arange(3 + n), completion.tokens_T])
        is_new_T = (np.arange(len(tokens_T)) >= 3 + n).astype(np.float32)
        logp_T = np.zeros(len(tokens_T), dtype=np.float32)
        logp_T[3 + n :] = completion.engine_logp_T
        rows.append(TokenRow(n, tokens_T, is_new_T, {"engine_logp": logp_T}))
    return rows


def gap(rows: list[TokenRow], by: NativeEngine) -> float:
    """The largest difference between the log-probs of sampling and those of scoring."""
    scored = by.score(rows, temperature=1.0)
    found = [row.columns["engine_logp"][row.weights_T > 0] for row in rows]
    return float(np.abs(np.concatenate(found) - np.concatenate(scored)).max())


def hidden(model: Decoder) -> torch.Tensor:
    layout = PackedLayout.of([6], CPU)
    with torch.no_grad():
        return model.hidden(torch.arange(6), torch.arange(6), layout)


def test_an_engine_in_fp8_leaves_the_trainers_module_as_it_is(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    before = hidden(model)
    served = engine(model, FP8)
    assert torch.equal(hidden(model), before)
    assert not torch.equal(hidden(served.model), before)
    ours = dict(model.named_parameters())
    assert all(theirs is ours[name] for name, theirs in served.model.named_parameters())


def test_an_fp8_engine_computes_what_a_trainer_in_fp8_computes(tmp_path: Path) -> None:
    """Also where the trainer's own module is rewritten already, and after its weights changed."""
    model = decoder(tmp_path)
    trained = rewrite_fp8(model, FP8, device=CPU)
    served = engine(model, FP8)
    for version in (1, 2):
        assert torch.equal(hidden(served.model), hidden(model))
        served.begin_update(Quiesce.DRAIN)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        trained.weights_changed()
        served.commit(version)
    assert gap(sampled(served), served) < 1e-4


def test_an_engine_follows_the_trainer_into_fp8(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    served = engine(model, Fp8Config(start_step=3))
    for version, is_fp8 in ((1, False), (2, True), (3, True)):
        served.begin_update(Quiesce.DRAIN)
        served.commit(version)
        assert torch.equal(hidden(served.model), hidden(model)) is not is_fp8
        assert gap(sampled(served), served) < 1e-4


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_in_invariant_numerics_fp8_engine_and_trainer_have_the_same_bits(
    tmp_path: Path, recipe: str
) -> None:
    model = decoder(tmp_path, numerics="invariant")
    config = Fp8Config(recipe=recipe)
    rewrite_fp8(model, config, device=CPU)
    rows = sampled(engine(model, config))
    trainer = engine(model)
    for packed in (rows, rows[::-1], rows[1:2]):
        assert gap(packed, trainer) == 0


@pytest.mark.parametrize(
    "fp8", [{"recipe": "tensorwise"}, {"recipe": "tensorwise", "scaling": "delayed"}]
)
def test_scales_of_more_than_a_row_are_no_invariant_numerics(
    tmp_path: Path, fp8: dict[str, str]
) -> None:
    model = decoder(tmp_path, numerics="invariant")
    with pytest.raises(ModelError, match=r"numerics is invariant.*blockwise or rowwise"):
        rewrite_fp8(model, Fp8Config(**fp8), device=CPU)


def test_fp8_on_a_cpu_is_the_plain_path_and_says_so(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    assert engine(model, FP8).bursts is None
    with pytest.raises(EngineError, match=r"engine\.decode is compact.*emulated on a CPU"):
        engine(model, FP8, decode="compact")


def test_an_fp8_cache_holds_what_a_plain_one_does_to_rounding(tmp_path: Path) -> None:
    config = decoder(tmp_path).config
    how = {"block_tokens": 16, "max_blocks": 4, "dtype": torch.float32, "device": CPU}
    plain, small = KVCache(config, **how), Fp8Cache(config, **how)
    k_NHd, v_NHd = torch.randn(2, 20, config.num_kv_heads, config.head_dim)
    v_NHd[3] = 0
    slots = plain.slots(torch.arange(20) // 16, torch.arange(20) % 16)
    for cache in (plain, small):
        cache.reserve(2)
        cache.write(0, slots, k_NHd, v_NHd)
    tables = plain.tables(torch.tensor([[1, 0]]))
    for found, wanted in zip(small.gather(0, tables), plain.gather(0, tables), strict=True):
        error = (found - wanted).abs()
        assert (error <= 2.0**-4 * wanted.abs() + wanted.abs().amax(-1, keepdim=True) / 448).all()
        assert error.max() > 0
    each = token_bytes(config, torch.float32, is_fp8=True)
    assert small.num_bytes == 32 * each
    assert each < token_bytes(config, torch.bfloat16)


def test_an_engine_with_an_fp8_cache_samples_from_it(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    small = engine(model, kv_cache_dtype="fp8")
    rows = sampled(small)
    assert 1e-6 < gap(rows, engine(model)) < 0.3
    assert small.stats().cache_bytes < engine_bytes(engine(model))


def engine_bytes(made: NativeEngine) -> int:
    sampled(made)
    return made.stats().cache_bytes


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_weights_are_sent_as_an_fp8_checkpoint_has_them(tmp_path: Path, recipe: str) -> None:
    """Names, dtypes, scales and dequantised values, through a transport."""
    model = decoder(tmp_path, "qwen3")
    config = Fp8Config(recipe=recipe, skip_layers=("lm_head", "embed", "layers.0.mlp"))
    choices = fp8_choices(model, config)
    # A tiny model's heads fill no block: readable, if vLLM reads by rows.
    if recipe == "blockwise":
        with pytest.raises(ModelError, match="multiples of 128"):
            Fp8Checkpoint.of(choices, config, moe=None)
        return
    checkpoint = Fp8Checkpoint.of(choices, config, moe=None)
    weights = dict(model.causal_lm.named_parameters())
    transport = SharedMemoryTransport(f"homeostat-fp8-{recipe}", 1 << 16)
    halves = closing(checkpoint.packer(transport.packer())), closing(transport.receiver(0, 1))
    with halves[0] as packer, halves[1] as receiver:
        sent = {
            name: tensor.clone()
            for bucket in packer.pack(weights.items())
            for name, tensor in receiver.unpack(bucket)
        }
    quantised = {name for name in weights if name.endswith("_proj.weight")}
    quantised -= {name for name in weights if "layers.0.mlp" in name}
    assert set(sent) == {*weights, *(f"{name}_scale" for name in quantised)}
    for name, weight in weights.items():
        if name not in quantised:
            assert torch.equal(sent[name], weight)
            continue
        assert sent[name].dtype == torch.float8_e4m3fn
        assert sent[f"{name}_scale"].shape == (len(weight), 1)
        block = (1, None) if recipe == "rowwise" else (None, None)
        wanted = dequantise(quantise(weight.detach(), block=block))
        found = dequantise(Quantised(sent[name], sent[f"{name}_scale"], (1, None)))
        assert torch.equal(found, wanted)
    assert checkpoint.settings["quant_method"] == "compressed-tensors"
    assert "model.layers.0.mlp.up_proj" in checkpoint.settings["ignore"]


def test_blocks_are_sent_with_the_inverse_scales_of_their_name() -> None:
    weight = torch.randn(256, 384)
    checkpoint = Fp8Checkpoint(Fp8Recipe.of(FP8), frozenset({"a.weight"}), ("lm_head",))
    sent = dict(checkpoint.tensors([("a.weight", weight), ("norm.weight", weight[0])]))
    assert list(sent) == ["a.weight", "a.weight_scale_inv", "norm.weight"]
    assert sent["a.weight_scale_inv"].shape == (2, 3)
    for row in range(2):
        for column in range(3):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale = sent["a.weight_scale_inv"][row, column]
            assert scale == weight[block].abs().max() / 448
            error = (sent["a.weight"][block].float() * scale - weight[block]).abs()
            assert (error <= 2.0**-4 * weight[block].abs() + scale * 2.0**-9).all()
    assert checkpoint.settings["weight_block_size"] == [128, 128]
    assert checkpoint.settings["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize(("kind", "block"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")])
def test_routers_and_skipped_experts_are_left_out_by_their_names_on_the_hub(
    tmp_path: Path, kind: str, block: str
) -> None:
    """vLLM would cast a router that is not listed to FP8, without a scale."""
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    tiny.write_model(tmp_path, model_type=kind, moe_intermediate_size=16, **sizes)
    config = ModelConfig(path=str(tmp_path), init="random")
    how = {"dtype": torch.float32, "device": CPU, "seed": 0, "gradient_checkpointing": False}
    model = load_model(config, None, **how).module
    routers = {f"model.layers.{n}.{block}.gate" for n in range(2)}
    experts = {f"model.layers.{n}.{block}.experts" for n in range(2)}
    for skip, wanted in (((), routers), (("experts",), routers | experts)):
        fp8 = Fp8Config(recipe="rowwise", skip_layers=("lm_head", "embed", *skip))
        found = Fp8Checkpoint.of(fp8_choices(model, fp8), fp8, moe=model.hub_experts)
        assert set(found.settings["ignore"]) - {"lm_head"} == wanted


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("w1", "w3")])
def test_experts_are_sent_with_the_scales_of_the_trainers_copies(names: tuple[str, str]) -> None:
    """Gate and up of an expert are one matrix there, and have one scale if a tensor has."""
    gate, up = torch.randn(32, 48), 9 * torch.randn(32, 48)
    prefix = "model.layers.0.mlp.experts.1"
    sent_as = dict(zip((f"{prefix}.{name}.weight" for name in names), (gate, up), strict=True))
    for scaling, block in (("tensorwise", (None, None)), ("rowwise", (1, None))):
        checkpoint = Fp8Checkpoint(Fp8Recipe(scaling=scaling), frozenset(sent_as), ())
        sent = dict(checkpoint.tensors(sent_as.items()))
        found = [
            dequantise(Quantised(sent[name], sent[f"{name}_scale"], (1, None))) for name in sent_as
        ]
        wanted = dequantise(quantise(torch.cat([gate, up]), block=block))
        assert torch.equal(torch.cat(found), wanted)


def test_maps_that_vllm_multiplies_by_as_one_have_one_precision(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    config = Fp8Config(recipe="rowwise", skip_layers=("lm_head", "embed", "k_proj"))
    with pytest.raises(ModelError, match=r"k_proj but not .*q_proj"):
        Fp8Checkpoint.of(fp8_choices(model, config), config, moe=None)


def test_vllm_is_told_of_quantised_weights_and_caches() -> None:
    plain = VllmEngineConfig(type="vllm")
    assert quantised_arguments(plain, None) == {}
    config = VllmEngineConfig(
        type="vllm", kv_cache_dtype="fp8", options={"hf_overrides": {"rope_theta": 2.0}}
    )
    found = quantised_arguments(config, {"quant_method": "fp8"})
    assert found == {
        "kv_cache_dtype": "fp8",
        "hf_overrides": {"rope_theta": 2.0, "quantization_config": {"quant_method": "fp8"}},
        "load_format": "dummy",
    }
