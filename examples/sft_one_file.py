"""Supervised fine-tuning in one flat file, without abstractions.

It imports nothing from homeostat and serves as its oracle: the library's losses follow the ones
printed here. The whole algorithm, in the order of this file:

    rows of chat -> text -> tokens, with the assistant's tokens marked as trained
    a Llama / Qwen2 / Qwen3 decoder, read from an HF folder's safetensors
    for each update: sum the loss of its rows, one row at a time, divide by the trained tokens of
    the *whole* update, clip the gradient, take an AdamW step at the scheduled learning rate

Every step prints one JSON object:
    step           optimizer updates so far
    loss           mean negative log-likelihood (nats) of the update's trained tokens, before it
    grad_norm      norm of the gradient before clipping; if it rises, expect instability
    learning_rate  of this step, from the schedule
    num_tokens     trained tokens of the update

Shapes: _T tokens of a row, _D model dim, _H head dim, _V vocabulary.

    python examples/sft_one_file.py --model path/to/hf_folder --data rows.jsonl --max_steps 20
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Settings:
    model: str  # HF folder: config.json, *.safetensors, tokenizer
    data: str  # JSONL of {"messages": [...]} or {"prompt": ..., "completion": ...}
    max_steps: int = 20
    batch_rows: int = 32  # rows of one optimizer update
    max_length: int = 2048  # longer rows are dropped
    lr: float = 1e-5
    warmup_share: float = 0.03
    min_lr_share: float = 0.1
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    seed: int = 0


# ---- data ------------------------------------------------------------------------------------


def tokenize(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Tokens of a chat, and for each whether the assistant wrote it (and so it is trained)."""
    messages = row.get("messages") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]

    def render(count: int, *, open_turn: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=open_turn
        )

    text = render(len(messages), open_turn=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(index, open_turn=True))
            end = len(render(index + 1, open_turn=False))
            assert text.startswith(render(index, open_turn=True)), "the template rewrites history"
            # What a template puts after the end of a turn (a newline) is not the assistant's.
            end -= len(text[start:end]) - len(text[start:end].rstrip("\n"))
            spans.append((start, end))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = [
        any(start <= left and right <= end for start, end in spans)
        for left, right in encoded["offset_mapping"]
    ]
    return torch.tensor(encoded["input_ids"]), torch.tensor(trained)


def rows_of_step(settings: Settings, *, step: int, num_rows: int) -> list[int]:
    """Return the rows on which update `step` (from 1) trains."""
    steps_per_epoch = math.ceil(num_rows / settings.batch_rows)
    epoch, index = divmod(step - 1, steps_per_epoch)
    generator = np.random.Philox(np.random.SeedSequence((settings.seed, epoch)))
    order = np.argsort(generator.random_raw(num_rows), kind="stable")
    first = index * settings.batch_rows
    return order[first : first + settings.batch_rows].tolist()


# ---- model -----------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    """Causal attention over one row; several query heads share a key/value head."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or dim // heads
        kv_dim = config["num_key_value_heads"] * self.head_dim
        family = config["model_type"]
        bias = family == "qwen2" or config.get("attention_bias", False)
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=bias and family != "qwen2")
        if family == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, config["rms_norm_eps"])
            self.k_norm = RMSNorm(self.head_dim, config["rms_norm_eps"])

    def forward(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        # [T, heads * H] -> [heads, T, H]
        q, k, v = (
            project(x_TD).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos_TH, sin_TH), rotate(k, cos_TH, sin_TH)
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.head_dim)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.o_proj(mixed.transpose(0, 1).flatten(1))


def rotate(x: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary embedding: the halves of each head are the two axes that are turned."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(dim, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp = MLP(dim, config["intermediate_size"])

    def forward(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TH, sin_TH)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Decoder(nn.Module):
    """Names follow the checkpoint's, so that loading needs no table."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        dim, vocab = config["hidden_size"], config["vocab_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, dim)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = RMSNorm(dim, config["rms_norm_eps"])
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if config.get("tie_word_embeddings", False):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Logits [T, V]: row t predicts token t + 1."""
        head_dim = self.model.layers[0].self_attn.head_dim
        cos_TH, sin_TH = rope(self.config, head_dim=head_dim, length=len(tokens_T))
        x_TD = self.model.embed_tokens(tokens_T)
        for layer in self.model.layers:
            x_TD = layer(x_TD, cos_TH, sin_TH)
        return self.lm_head(self.model.norm(x_TD))


def rope(config: dict[str, Any], *, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle by which each pair of a head's axes is turned at a position."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "default")
    assert kind == "default", f"rope_type {kind!r}: this file knows plain RoPE only"
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    frequency = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(length).float(), frequency)
    angle_TH = torch.cat((angle, angle), dim=-1)
    return angle_TH.cos(), angle_TH.sin()


def load_model(folder: Path) -> Decoder:
    config = json.loads((folder / "config.json").read_text())
    model = Decoder(config)
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    missing, unknown = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings", False) else set()
    assert not unknown, f"{folder} holds weights this file does not know: {unknown}"
    assert set(missing) <= tied, f"{folder} lacks {missing}"
    return model.float()


# ---- training --------------------------------------------------------------------------------


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then half a cosine from the peak down to `min_lr_share`; steps from 1."""
    warmup = math.ceil(settings.warmup_share * settings.max_steps)
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - warmup - 1) / (settings.max_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_share + (1 - settings.min_lr_share) * cosine)


def row_loss(model: Decoder, tokens_T: Tensor, trained_T: Tensor) -> Tensor:
    """Summed negative log-likelihood of the trained tokens of one row."""
    logits_TV = model(tokens_T[:-1])
    nll_T = nn.functional.cross_entropy(logits_TV, tokens_T[1:], reduction="none")
    return nll_T[trained_T[1:]].sum()


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no direction to shrink."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.999), eps=1e-8)


def train(settings: Settings) -> list[dict[str, float]]:
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    lines = Path(settings.data).read_text(encoding="utf-8").splitlines()
    rows = [tokenize(json.loads(line), tokenizer) for line in lines if line.strip()]
    rows = [row for row in rows if len(row[0]) <= settings.max_length]
    model = load_model(Path(settings.model))
    optimizer = make_optimizer(model, settings)

    history = []
    for step in range(1, settings.max_steps + 1):
        batch = [rows[i] for i in rows_of_step(settings, step=step, num_rows=len(rows))]
        num_tokens = sum(int(trained_T[1:].sum()) for _, trained_T in batch)
        loss = 0.0
        for tokens_T, trained_T in batch:
            share = row_loss(model, tokens_T, trained_T) / num_tokens
            share.backward()  # gradients add up over the rows
            loss += share.item()

        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        optimizer.zero_grad()

        record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm.item(),
            "learning_rate": learning_rate(settings, step),
            "num_tokens": num_tokens,
        }
        print(json.dumps(record), flush=True)
        history.append(record)
    return history


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning in one file.")
    kinds = {"str": str, "int": int, "float": float}
    for field in fields(Settings):
        needed = field.name in ("model", "data")
        default = None if needed else field.default
        parser.add_argument(
            f"--{field.name}", type=kinds[str(field.type)], required=needed, default=default
        )
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_settings())
