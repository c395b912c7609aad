"""The compiled way of decoding draws what the plain one draws, whatever the batch or threads."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_native_compact import CASES, CPU, random_decoder

from homeostat.clinic.faults.engine import part_ways
from homeostat.config.model import LoraConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError, PolicyNotFiniteError
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.lora import adapter_state, apply_lora
from homeostat.observe.durable import sha256_of
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.cpu import library, prompts
from homeostat.rollout.native.cpu.bursts import CpuBursts
from homeostat.rollout.native.cpu.library import compiler, kept_library, load_library
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, StopReason

Drawn = tuple[list[int], np.ndarray]
# Prompts come a few tokens at a time.
PIECES = {"prefill_tokens": 5}


def engine_of(decoder: Decoder, way: str, **settings: Any) -> NativeEngine:
    place = {"in_rows": settings.pop("in_rows", None), "threads": settings.pop("threads", 1)}
    max_tokens = settings.pop("max_tokens", 200)
    return NativeEngine(
        decoder,
        NativeEngineConfig(decode=way, **settings),
        device=CPU,
        max_tokens=max_tokens,
        decode=lambda tokens: " ".join(map(str, tokens)),
        chunk_bytes=1 << 16,
        **place,
    )


def requests(decoder: Decoder, **sampling: Any) -> list[Request]:
    """Of different lengths, so that rows of a batch are at different places."""
    rng = np.random.default_rng(0)
    sizes = (3, 18, 16, 41, 1, 15, 33, 7, 90)
    return [
        Request(
            f"{number}",
            rng.integers(decoder.config.vocab_size, size=size),
            Sampling(**{"max_new_tokens": 30 + number, **sampling}),
            seed=1,
        )
        for number, size in enumerate(sizes)
    ]


def drawn(engine: NativeEngine, wanted: list[Request]) -> list[Drawn]:
    return [_drawn(one) for one in generate(engine, wanted, timeout_s=60)]


def _drawn(completion: Completion) -> Drawn:
    logps = [segment.engine_logp_T for segment in completion.segments]
    return completion.tokens_T.tolist(), np.concatenate(logps)


def wide_decoder() -> Decoder:
    """Sizes that fill no vector: heads of 20, an inner width of 50, a vocabulary of 1,237 words."""
    settings = {
        "model_type": "qwen3",
        "vocab_size": 1237,
        "hidden_size": 60,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
    }
    torch.manual_seed(0)
    decoder = Decoder(decoder_config(settings), kernel="sdpa")
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder.requires_grad_(False)


def same(left: list[Drawn], right: list[Drawn]) -> None:
    for (tokens, logps), (others, other_logps) in zip(left, right, strict=True):
        assert tokens == others
        np.testing.assert_allclose(logps, other_logps, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("family", "rope"), CASES)
def test_it_draws_what_the_plain_way_draws(family: str, rope: str | None) -> None:
    torch.manual_seed(0)
    decoder = random_decoder(family, rope)
    wanted = requests(decoder)
    same(drawn(engine_of(decoder, "compiled"), wanted), drawn(engine_of(decoder, "plain"), wanted))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.5])
def test_sizes_that_fill_no_vector(temperature: float) -> None:
    decoder = wide_decoder()
    wanted = requests(decoder, temperature=temperature)
    same(drawn(engine_of(decoder, "compiled"), wanted), drawn(engine_of(decoder, "plain"), wanted))


@pytest.mark.parametrize("way", ["compiled", "compact"])
@pytest.mark.parametrize("targets", [("all-linear",), ("k_proj", "up_proj", "o_proj")])
def test_adapters_are_part_of_it(way: str, targets: tuple[str, ...]) -> None:
    """Maps that end within a vector, some of them without an adapter."""
    decoder = wide_decoder()
    wanted = requests(decoder, max_new_tokens=6)[:4]
    plain = drawn(engine_of(decoder, "plain"), wanted)
    apply_lora(decoder, LoraConfig(rank=5, alpha=10.0, targets=targets), seed=0)
    for name, tensor in adapter_state(decoder):
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.2)
    decoder.requires_grad_(False)
    expected = drawn(engine_of(decoder, "plain"), wanted)
    engine = engine_of(decoder, way, threads=2)
    same(drawn(engine, wanted), expected)
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in plain]
    # The adapter is read as it is now.
    engine.begin_update(Quiesce.DRAIN)
    for _, tensor in adapter_state(decoder):
        tensor.zero_()
    engine.commit(1)
    same(drawn(engine, wanted), plain)


def test_an_engine_that_parts_ways_samples_with_its_own_copy() -> None:
    decoder = wide_decoder()
    engine = engine_of(decoder, "compiled")
    assert isinstance(engine.bursts, CpuBursts)
    before = drawn(engine, requests(decoder))
    own = part_ways(engine)
    same = drawn(engine, requests(decoder))
    with torch.no_grad():
        own.output_weight().normal_()
    other = drawn(engine, requests(decoder))
    assert [tokens for tokens, _ in same] == [tokens for tokens, _ in before]
    assert [tokens for tokens, _ in other] != [tokens for tokens, _ in before]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompts go through the compiled step on any processor: how many tokens at a time."""
    sizes: list[int] = []
    plain = prompts.CpuPrompts.hidden_in

    def noted(self: prompts.CpuPrompts, tokens_N: np.ndarray, *others: Any) -> torch.Tensor:
        sizes.append(len(tokens_N))
        return plain(self, tokens_N, *others)

    monkeypatch.setattr(prompts, "MIN_PANEL", 1)
    monkeypatch.setattr(prompts.CpuPrompts, "hidden_in", noted)
    return sizes


@pytest.mark.usefixtures("computed")
def test_bits_depend_on_neither_threads_nor_neighbours_nor_blocks() -> None:
    decoder = wide_decoder()
    wanted = requests(decoder)
    first = drawn(engine_of(decoder, "compiled"), wanted)
    for settings in ({"threads": 3}, {"max_concurrency": 2}, {"in_rows": True}, PIECES):
        again = drawn(engine_of(decoder, "compiled", **settings), wanted)
        for (tokens, logps), (others, other_logps) in zip(first, again, strict=True):
            assert tokens == others, settings
            # Of the first token logits are torch's, whose sums may depend on the batch.
            np.testing.assert_array_equal(logps[1:], other_logps[1:])


@pytest.mark.parametrize("settings", [{}, PIECES, {"in_rows": True, "threads": 3}])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 400])
def test_prompts_are_computed_as_by_the_decoder(
    size: int, settings: dict[str, Any], computed: list[int]
) -> None:
    decoder = random_decoder("qwen3")
    rng = np.random.default_rng(size)
    wanted = [
        Request(f"{n}", rng.integers(decoder.config.vocab_size, size=length), Sampling(3), seed=n)
        for n, length in enumerate((size, 9, max(size - 3, 1), 6))
    ]
    compiled = engine_of(decoder, "compiled", max_tokens=404, **settings)
    same(drawn(compiled, wanted), drawn(engine_of(decoder, "plain", max_tokens=404), wanted))
    assert sum(computed) == sum(len(one.tokens_T) for one in wanted)


def test_long_prompts_are_left_to_the_decoder(computed: list[int]) -> None:
    decoder = random_decoder("llama")
    long = Request("a", np.ones(prompts.MAX_TOKENS + 1, np.int64), Sampling(1), seed=0)
    drawn(engine_of(decoder, "compiled", max_tokens=600), [long])
    assert computed == []


def test_a_burst_ends_with_the_first_sequence_that_ends() -> None:
    decoder = random_decoder("llama")
    engine = engine_of(decoder, "compiled")
    assert isinstance(engine.bursts, CpuBursts)
    wanted = [
        Request("a", np.arange(4), Sampling(max_new_tokens=3), seed=0),
        Request("b", np.arange(4), Sampling(max_new_tokens=60), seed=0),
    ]
    engine.bursts._step_s = 1e-9
    lengths = [len(one.tokens_T) for one in generate(engine, wanted, timeout_s=60)]
    assert lengths == [3, 60]
    # The first token of each came with the prompts; none was computed in vain.
    assert engine.bursts.num_steps == 59


def test_stop_tokens_stop_strings_and_cuts() -> None:
    decoder = random_decoder("qwen2")
    free = drawn(engine_of(decoder, "plain"), requests(decoder))
    stop = free[3][0][10]
    for sampling in (
        {"stop_ids": frozenset({stop})},
        {"stop_strings": (f" {stop} ",)},
        {"top_k": 5},
        {"top_p": 0.7},
    ):
        wanted = requests(decoder, **sampling)
        engines = [engine_of(decoder, way) for way in ("compiled", "plain")]
        same(*(drawn(engine, wanted) for engine in engines))
    wanted = requests(decoder, stop_ids=frozenset({stop}))
    found = generate(engine_of(decoder, "compiled"), wanted, timeout_s=60)
    assert found[3].stop_reason is StopReason.STOP


def test_many_rows_are_cut_into_parts_of_which_each_ends_by_itself() -> None:
    decoder = random_decoder("qwen2")
    stop = frozenset({3, 50, 70})
    wanted = [
        Request(f"{n}", np.arange(2 + n % 5), Sampling(60, stop_ids=stop), seed=n)
        for n in range(43)
    ]
    plain = drawn(engine_of(decoder, "plain"), wanted)
    assert len({len(tokens) for tokens, _ in plain}) > 5
    for threads in (1, 5, 2, 9):
        same(drawn(engine_of(decoder, "compiled", threads=threads), wanted), plain)


def test_it_follows_every_write_to_a_weight() -> None:
    decoder = random_decoder("qwen3")
    engine, plain = (engine_of(decoder, way) for way in ("compiled", "plain"))
    before = drawn(engine, requests(decoder))
    decoder.model.layers[1].mlp.up_proj.weight.mul_(2)
    same(drawn(engine, requests(decoder)), drawn(plain, requests(decoder)))
    engine.begin_update(Quiesce.DRAIN)
    weights = [weight.requires_grad_(True) for weight in decoder.parameters()]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    torch.optim.AdamW(weights, lr=0.1, fused=True).step()
    engine.commit(1)
    after = drawn(engine, requests(decoder))
    same(after, drawn(plain, requests(decoder)))
    assert [tokens for tokens, _ in after] != [tokens for tokens, _ in before]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    decoder = random_decoder("llama")
    decoder.model.norm.weight[3] = bad
    engine = engine_of(decoder, "compiled")
    wanted = requests(decoder)
    with pytest.raises(PolicyNotFiniteError):
        generate(engine, wanted, timeout_s=60)


def test_a_word_that_cannot_be_is_never_drawn() -> None:
    """Weights of zero at the end of the vocabulary, where rounding could lead."""
    decoder = random_decoder("llama")
    decoder.lm_head.weight[5:] = 0
    decoder.lm_head.weight[5:, 0] = -1e30
    decoder.model.norm.weight.fill_(1.0)
    decoder.model.embed_tokens.weight[:, 0] = 50.0
    for tokens, _ in drawn(engine_of(decoder, "compiled"), requests(decoder)):
        assert max(tokens) < 5


def test_a_forked_process_has_threads_of_its_own() -> None:
    decoder = random_decoder("llama")
    engine = engine_of(decoder, "compiled", threads=2)
    expected = drawn(engine, requests(decoder)[:2])
    child = os.fork()
    if child == 0:
        found = drawn(engine, requests(decoder)[:2])
        os._exit(0 if [t for t, _ in found] == [t for t, _ in expected] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_copies_cannot_stand_for_is_refused_where_asked_for() -> None:
    hooked = random_decoder("llama")
    hooked.model.embed_tokens.register_forward_hook(lambda *_: None)
    assert engine_of(hooked, "auto").bursts is None
    with pytest.raises(EngineError, match="with hooks"):
        engine_of(hooked, "compiled")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache. Builds into it are not optimised, which takes a tenth of the time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", ("-O0", *library.FLAGS[1:]))
    load_library.cache_clear()
    yield tmp_path / "homeostat" / "compile" / "cpu"
    load_library.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its names of processors")
@pytest.mark.parametrize(("processor", "panel"), [("haswell", 16), ("x86-64", 8)])
def test_narrower_vectors_draw_the_same(
    processor: str, panel: int, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = wide_decoder()
    plain = drawn(engine_of(decoder, "plain"), requests(decoder))
    narrow = tmp_path / "narrow"
    narrow.write_text(f'#!/bin/sh\nexec {compiler()} "$@" -march={processor}\n')
    narrow.chmod(0o700)
    monkeypatch.setenv("CC", str(narrow))
    assert load_library().panel_width() == panel
    same(drawn(engine_of(decoder, "compiled"), requests(decoder)), plain)


def cut_short(file: Path) -> None:
    """As a power cut leaves a file that was renamed before its bytes were on the disk."""
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) // 4))


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        lambda file: file.write_bytes(b""),
        lambda file: file.chmod(0o777),
        lambda file: (file.unlink(), file.symlink_to("/dev/null")),
    ],
    ids=["cut short", "empty", "writable by others", "a link"],
)
def test_a_library_that_cannot_be_trusted_is_not_loaded(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    """Loading one that lost its end would end the process by SIGBUS."""
    file = tmp_path / f"digest-{hashlib.sha256(b'code').hexdigest()}.so"
    file.write_bytes(b"code")
    file.chmod(0o700)
    assert kept_library(tmp_path, "digest") == file
    damage(file)
    assert kept_library(tmp_path, "digest") is None
    assert not list(tmp_path.iterdir())


def test_it_is_built_once_and_again_where_damaged(own_cache: Path) -> None:
    assert load_library().panel_width() > 0
    (file,) = own_cache.iterdir()
    written = file.stat().st_mtime_ns
    load_library.cache_clear()
    load_library()
    assert file.stat().st_mtime_ns == written
    cut_short(file)
    load_library.cache_clear()
    assert load_library().panel_width() > 0
    (again,) = own_cache.iterdir()
    assert again.stem.endswith(sha256_of(again))


def test_a_library_that_does_not_load_leaves_the_plain_way(
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cache mounted noexec refuses in the same place: where the library is loaded."""
    useless = tmp_path / "cc"
    useless.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        'while [ "$1" != -o ]; do shift; done\necho text > "$2"\n'
    )
    useless.chmod(0o700)
    monkeypatch.setenv("CC", str(useless))
    decoder = random_decoder("llama")
    assert engine_of(decoder, "auto").bursts is None
    assert "temporary folder" in caplog.text
    with pytest.raises(EngineError, match=r"engine\.decode.*cannot be loaded"):
        engine_of(decoder, "compiled")


def test_a_folder_that_others_may_write_to_is_not_used(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    assert load_library().panel_width() > 0
    assert not list(own_cache.iterdir())


def test_without_a_compiler_it_goes_another_way(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    decoder = random_decoder("llama")
    assert engine_of(decoder, "auto").bursts is None
    with pytest.raises(EngineError, match=r"engine\.decode.*no C compiler"):
        engine_of(decoder, "compiled")
    broken = tmp_path / "cc"
    broken.write_text("no program")
    broken.chmod(0o700)
    with pytest.raises(EngineError, match="cannot be run"):
        engine_of(decoder, "compiled")
    broken.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(EngineError, match="no such header"):
        engine_of(decoder, "compiled")
