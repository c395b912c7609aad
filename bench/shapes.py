"""The shapes of the GPU benchmarks: Qwen2's 0.5 B and 1.5 B, layers of a Qwen3-MoE, and some for a
CPU.

A shape knows the sizes that a floor is computed from. Models have random weights, drawn on the
device they are for, either as a decoder of ours (`random_decoder`) or as a folder in Hugging Face
format with a tokenizer and prompts (`write_folder`), which every side of a comparison reads.

The tokenizer's end token can never be sampled (`_silence_end`), so that each completion has the
same length on every side, without a setting that would cost one side time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from homeostat.models.decoder import Decoder
from homeostat.models.families import DecoderConfig, decoder_config
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.ops.attention import resolve_kernel
from homeostat.ops.linear import Numerics

SPECIAL_TOKENS = ["<|pad|>", "<|end|>"]
END_ID = 1
INIT_STD = 0.02
# The residual channel that carries the sign against the end token, and the size of both ends.
_CHANNEL, _SIGN, _AGAINST_END = 0, 0.5, -100.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 with tied embeddings; with experts a Qwen3-MoE, whose experts are `intermediate` wide
    each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 151_936
    experts: int = 0
    active_experts: int = 0

    @property
    def body_params(self) -> int:
        """Weights that every token is multiplied with, without the head."""
        return self._body_params(self.active_experts if self.experts else 1)

    def _body_params(self, num_blocks: float) -> int:
        """With so many gated blocks a layer."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * width + 2 * kv_width) + self.hidden * self.experts
        return round(self.layers * (attention + 3 * self.hidden * self.intermediate * num_blocks))

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize

    def weight_bytes(self, dtype: torch.dtype, *, experts_hit: float | None = None) -> int:
        """Return the bytes of weights that a decoding step reads: all, with the tied head once.

        `experts_hit`: of how many experts a layer; of a batch of one, where it is not given.
        """
        body = self.body_params if experts_hit is None else self._body_params(experts_hit)
        return (body + self.head_params) * dtype.itemsize

    def hf_config(self, dtype: torch.dtype) -> dict[str, Any]:
        return self._dense_config(dtype) | (self._expert_config() if self.experts else {})

    def _expert_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.active_experts,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
        }

    def _dense_config(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "initializer_range": INIT_STD,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": END_ID,
            # With one, transformers would give that token's embedding no gradient.
            "pad_token_id": None,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def decoder(self, dtype: torch.dtype) -> DecoderConfig:
        return decoder_config(self.hf_config(dtype))


SHAPES = {
    "0.5b": Shape(24, 896, 14, 2, 64, 4864),
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960),
    # Llama 3's, with tied embeddings.
    "8b": Shape(32, 4096, 32, 8, 128, 14336, vocab=128_256),
    # Eight layers of Qwen3-30B-A3B.
    "30b-a3b/6": Shape(8, 2048, 32, 4, 128, 768, experts=128, active_experts=8),
    # SmolLM2's.
    "135m": Shape(30, 576, 9, 3, 64, 1536, vocab=49_152),
    "small": Shape(4, 256, 4, 2, 64, 1024, vocab=8192),
    "tiny": Shape(2, 64, 4, 2, 16, 128, vocab=512),
    "tiny-moe": Shape(2, 64, 4, 2, 16, 32, vocab=512, experts=8, active_experts=2),
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def random_decoder(
    shape: Shape, *, device: torch.device, dtype: torch.dtype, numerics: Numerics = "fast"
) -> Decoder:
    config = shape.decoder(dtype)
    kernel = resolve_kernel("auto", device_type=device.type, dtype=dtype, head_dim=config.head_dim)
    with torch.device("meta"):
        model = Decoder(config, kernel=kernel, gradient_checkpointing=False, numerics=numerics)
    model = model.to(dtype).to_empty(device=device)
    lay_side_by_side(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in random_tensors(model, device=device, dtype=dtype):
            parameters[name].copy_(tensor)
    return model.eval()


def random_tensors(
    model: Decoder, *, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Weights ~ N(0, 0.02), norms 1, biases 0, drawn on the device; the end token is silent."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        tensor = torch.zeros(parameter.shape, dtype=dtype, device=device)
        if parameter.ndim > 1:
            tensor.normal_(0.0, INIT_STD, generator=generator)
            _silence_end(name, tensor)
        elif not name.endswith("bias"):
            tensor.fill_(1.0)
        yield name, tensor


def _silence_end(name: str, tensor: Tensor) -> None:
    """One channel of the residual stream is the same for all tokens, written by no layer; the end
    token's row of the output matrix points against it."""
    if "embed_tokens" in name:
        tensor[:, _CHANNEL] = _SIGN
        tensor[END_ID, _CHANNEL] = _AGAINST_END
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        tensor[_CHANNEL] = 0.0
    elif name.endswith("experts.down_proj"):
        tensor[:, _CHANNEL] = 0.0


def write_folder(
    shape: Shape,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_prompts: int,
    prompt_tokens: int,
) -> None:
    """Weights, config, tokenizer and prompts.jsonl."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    with torch.device("meta"):
        empty = Decoder(
            shape.decoder(dtype), kernel="sdpa", gradient_checkpointing=False, numerics="fast"
        )
    drawn = random_tensors(empty, device=device, dtype=dtype)
    tensors = {name: tensor.cpu() for name, tensor in drawn}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(shape.hf_config(dtype), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    _write_tokenizer(folder, vocab=shape.vocab)
    rng = random.Random(0)
    lines = [json.dumps({"prompt": _prompt(rng, prompt_tokens)}) + "\n" for _ in range(num_prompts)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def _write_tokenizer(folder: Path, *, vocab: int) -> None:
    """One token per byte, then made-up words, so that every token of the vocabulary is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{number}" for number in range(vocab - len(words))]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    pad, end = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=pad)
    tokenizer.save_pretrained(folder)


def _prompt(rng: random.Random, num_tokens: int) -> str:
    """Text of about so many bytes, each a token; lengths differ a little, as prompts' do."""
    length = num_tokens + rng.randint(-num_tokens // 8, num_tokens // 8)
    text = "What is " + " + ".join(str(rng.randint(1, 999)) for _ in range(num_tokens))
    return text[: max(1, length - 2)] + "? "
