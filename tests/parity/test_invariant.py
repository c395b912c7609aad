"""Invariant numerics: a token's hidden state and log-prob have the same bits however computed.

The bits to meet are those of a training forward of the document alone. All comparisons are exact
but the last group, which holds values and gradients against the fast numerics.
"""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.properties import COSTLY
from tiny_models import random_model, save

from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.models.build import load_model
from homeostat.models.lora import lora_modules
from homeostat.ops.attention import PackedLayout
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.tiled_attention import KEY_TILE, TilePlan, tiled_attention

CPU = torch.device("cpu")
VOCAB = 97
# Widths that are no multiples of a vector's, so that loops have tails.
ODD = {"hidden_size": 36, "intermediate_size": 54, "head_dim": 12}
MODELS = {
    "llama_mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama_odd": {"model_type": "llama", **ODD},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3_qk_norm": {"model_type": "qwen3", "head_dim": 16},
    "llama_lora": {"model_type": "llama", "num_key_value_heads": 1},
}


def load(name, folder, *, numerics="invariant"):
    if not folder.joinpath("config.json").exists():
        save(random_model(MODELS[name], seed=3), folder)
    adapter = LoraConfig(rank=3, targets=("all-linear",)) if name == "llama_lora" else None
    module = load_model(
        ModelConfig(path=str(folder), numerics=numerics),
        adapter,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    ).module
    generator = torch.Generator().manual_seed(4)
    for _, adapted in lora_modules(module):
        torch.nn.init.normal_(adapted.lora_B.weight, std=0.1, generator=generator)
    return module


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[1, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(lengths, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def train_hidden(model, documents):
    layout = PackedLayout.of([len(document) for document in documents], CPU)
    positions_N = torch.cat([torch.arange(len(document)) for document in documents])
    return model.hidden(torch.cat(documents), positions_N, layout)


def logprobs(model, hidden, targets, *, temperature=0.9):
    how = {"temperature": temperature, "chunk_bytes": 2**20, "numerics": model.numerics}
    return token_logprobs(hidden, model.output_weight(), targets, **how)


def alone(model, document):
    """(hidden states, log-probs of the next tokens) of a training forward of one document."""
    hidden = train_hidden(model, [document])
    return hidden, logprobs(model, hidden[:-1], document[1:])


class Cache:
    """Keys and values in shuffled rows of a store, which holds NaN where nothing was written."""

    def __init__(self, config, documents, *, capacity, by_head, seed):
        self.heads = config.num_kv_heads
        num_rows = len(documents) * capacity
        shape = (config.num_layers, 2, num_rows * self.heads, config.head_dim)
        self.store = torch.full(shape, float("nan"))
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
        self.head_stride = num_rows if by_head else 1
        self.rows = order.view(len(documents), capacity) * (1 if by_head else self.heads)

    def context(self, chunks):
        return CacheContext(self, chunks)


class CacheContext:
    """Chunks (document, start, end) of one forward: an engine's prefill and decode in one."""

    def __init__(self, cache, chunks):
        self.cache = cache
        documents, starts, ends = (torch.tensor(column) for column in zip(*chunks, strict=True))
        rows = cache.rows[documents]
        layout = {"num_kv_heads": cache.heads, "head_stride": cache.head_stride}
        self.plan = TilePlan.of(ends - starts, ends, rows, **layout)
        written = [cache.rows[document, start:end] for document, start, end in chunks]
        heads = torch.arange(cache.heads) * cache.head_stride
        self.slots = (torch.cat(written)[:, None] + heads).flatten()

    def attend(self, layer, q_NHd, k_NHd, v_NHd, *, scale, limits):
        keys, values = self.cache.store[layer]
        keys[self.slots], values[self.slots] = k_NHd.flatten(0, 1), v_NHd.flatten(0, 1)
        return tiled_attention(q_NHd, keys, values, self.plan, scale=scale)


def serve(model, documents, schedule, *, capacity, by_head=False, seed=0):
    """Hidden states of each document, computed chunk by chunk. `schedule`: chunks per forward."""
    cache = Cache(model.config, documents, capacity=capacity, by_head=by_head, seed=seed)
    found = [[] for _ in documents]
    for chunks in schedule:
        tokens_N = torch.cat([documents[d][start:end] for d, start, end in chunks])
        positions_N = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        hidden_ND = model.hidden_in(tokens_N, positions_N, cache.context(chunks))
        sizes = [end - start for _, start, end in chunks]
        for (document, _, _), part in zip(chunks, hidden_ND.split(sizes), strict=True):
            found[document].append(part)
    return [torch.cat(parts) for parts in found]


def random_schedule(lengths, *, rng):
    """Forwards of random documents, in random order, by single tokens or longer chunks."""
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        waiting = [d for d, length in enumerate(lengths) if done[d] < length]
        chunks = []
        for document in rng.sample(waiting, rng.randint(1, len(waiting))):
            size = rng.choice([1, rng.randint(1, 20), rng.randint(1, 3 * KEY_TILE)])
            end = min(done[document] + size, lengths[document])
            chunks.append((document, done[document], end))
            done[document] = end
        yield chunks


lengths_of_documents = st.lists(st.integers(2, 150), min_size=1, max_size=5)


@torch.no_grad()
@COSTLY
@given(lengths=lengths_of_documents, seed=st.integers(0, 2**20))
def test_packing_changes_no_bit(model, num_threads, lengths, seed):
    documents = draw(lengths, seed=seed)
    together = train_hidden(model, documents).split(lengths)
    inputs = torch.cat([part[:-1] for part in together])
    targets = torch.cat([document[1:] for document in documents])
    logp = logprobs(model, inputs, targets).split([length - 1 for length in lengths])
    for document, hidden, logp_T in zip(documents, together, logp, strict=True):
        want_hidden, want_logp = alone(model, document)
        assert torch.equal(hidden, want_hidden)
        assert torch.equal(logp_T, want_logp)


@torch.no_grad()
@COSTLY
@given(
    lengths=lengths_of_documents,
    spare=st.integers(0, 90),
    by_head=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_an_engine_that_mixes_prefill_and_decode_changes_no_bit(
    model, num_threads, lengths, spare, by_head, seed
):
    documents = draw(lengths, seed=seed)
    schedule = random_schedule(lengths, rng=random.Random(seed))
    place = {"capacity": max(lengths) + spare, "by_head": by_head, "seed": seed}
    served = serve(model, documents, schedule, **place)
    for document, hidden in zip(documents, served, strict=True):
        want_hidden, want_logp = alone(model, document)
        assert torch.equal(hidden, want_hidden)
        assert torch.equal(logprobs(model, hidden[:-1], document[1:]), want_logp)


@torch.no_grad()
def test_token_by_token_decoding_changes_no_bit(model):
    documents = draw([70, 9], seed=1)
    steps = [[(0, at, at + 1)] + ([(1, at, at + 1)] if at < 9 else []) for at in range(70)]
    served = serve(model, documents, steps, capacity=70)
    for document, hidden in zip(documents, served, strict=True):
        assert torch.equal(hidden, alone(model, document)[0])


@torch.no_grad()
# One row, a few, and more than a tile of them; the sizes in between at night.
@pytest.mark.parametrize(
    "batch",
    [1, 7, 33, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 16, 31, 40))],
)
def test_the_size_of_a_decoding_batch_changes_no_bit(model, batch):
    rng = random.Random(batch)
    lengths = [rng.randint(2, 90) for _ in range(batch)]
    documents = draw(lengths, seed=batch)
    prefill = [(d, 0, length - 1) for d, length in enumerate(lengths)]
    decode = [(d, length - 1, length) for d, length in enumerate(lengths)]
    served = serve(model, documents, [prefill, decode], capacity=100)
    for document, hidden in zip(documents, served, strict=True):
        assert torch.equal(hidden, alone(model, document)[0])


@pytest.mark.parametrize("vocab", [5, 259, 20_001])
def test_logprobs_and_entropy_of_a_token_do_not_depend_on_the_others(num_threads, vocab):
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(101, 24, generator=generator)
    weight = torch.randn(vocab, 24, generator=generator)
    targets = torch.randint(0, vocab, (101,), generator=generator)

    def scores(rows, *, chunk_bytes=2**20):
        how = {"temperature": 0.7, "chunk_bytes": chunk_bytes, "numerics": "invariant"}
        logp = token_logprobs(hidden[rows], weight, targets[rows], **how)
        both = token_logprobs_and_entropy(
            hidden[rows], weight, targets[rows], entropy_grad=False, **how
        )
        assert torch.equal(both[0], logp)
        return torch.stack(both)

    whole = scores(torch.arange(101))
    assert torch.equal(scores(torch.arange(101), chunk_bytes=2**16), whole)
    for size in (1, 2, 31, 32, 33, 64, 90):
        rows = torch.randperm(101, generator=generator)[:size]
        assert torch.equal(scores(rows), whole[:, rows])


def test_the_fast_numerics_are_not_invariant(tmp_path):
    """What the other tests would miss if they compared a thing with itself."""
    model = load("llama_odd", tmp_path, numerics="fast")
    # A library has other products for one row and for a few: short documents alone show it.
    lengths = [1, 2, 3, 150]
    documents = draw(lengths, seed=0)
    with torch.no_grad():
        together = train_hidden(model, documents).split(lengths)
        equal = [
            torch.equal(part, alone(model, document)[0])
            for part, document in zip(together, documents, strict=True)
        ]
    assert not all(equal)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_equal_those_of_the_fast_numerics(name, tmp_path):
    documents = draw([5, 80, 33, 80, 1, 140], seed=2)
    targets = torch.cat(documents).roll(-1)
    results = []
    for numerics in ("fast", "invariant"):
        model = load(name, tmp_path, numerics=numerics)
        logp = logprobs(model, train_hidden(model, documents), targets)
        (logp * torch.arange(len(logp)).cos()).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        results.append((logp.detach(), gradients))
    (fast_logp, fast), (tiled_logp, tiled) = results
    torch.testing.assert_close(tiled_logp, fast_logp, atol=1e-5, rtol=1e-5)
    assert fast.keys() == tiled.keys()
    for parameter, want in fast.items():
        # With an adapter the invariant gradient is up to 2e-5 of the largest one off float64's.
        limit = 3e-5 * float(want.abs().max())
        torch.testing.assert_close(tiled[parameter], want, atol=limit, rtol=1e-5)
