"""Group-relative policy optimisation in one flat file, without abstractions.

It imports nothing from homeostat and serves as its oracle: from the same model, prompts and seed
the library samples the same tokens, earns the same rewards and follows the losses printed here.
The whole algorithm, in the order of this file:

    prompts with answers -> tokens; each step takes the next `prompts_per_step` of them
    a Llama / Qwen2 / Qwen3 decoder, read from an HF folder's safetensors
    sampling: `samples_per_prompt` completions of each prompt, one uniform number per token, which
    is a pure function of (seed, request id, position)
    reward: 1 where the completion is the answer (spaces around it aside), else 0
    advantage: the reward less the mean of its group, over the group's deviation or not
    `updates_per_step` updates, each on its own share of the groups: clipped policy gradient,
    normalised over the *whole* update, gradient clipping, AdamW at the scheduled learning rate

Every step prints one JSON object:
    step           steps so far
    reward         mean reward of the step's samples
    zero_groups    share of groups whose samples all earned the same: they teach nothing
    length         mean tokens of a completion, its end-of-sequence token included
    entropy        mean entropy (nats) of the policy at the trained tokens, before the updates
    losses         of each update, before it
    grad_norms     of each update, before clipping
    clip_ratio     share of tokens whose ratio was clipped, mean of the updates
    learning_rate  of the step's last update

Shapes: _B rows, _T tokens, _S cache slots, _G samples of a group, _V vocabulary, _D model dim,
_H head dim.

    python examples/grpo_one_file.py --model path/to/hf_folder --data prompts.jsonl --max_steps 20
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
    data: str  # JSONL of {"prompt": ..., "answer": ...}
    max_steps: int = 20
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_new_tokens: int = 16
    temperature: float = 1.0
    updates_per_step: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    scale: str = "group"  # group: advantages over the group's deviation; none: not
    normalise: str = "sequence"  # token, sequence, fixed
    entropy_bonus: float = 0.0
    lr: float = 1e-5
    schedule: str = "cosine"  # cosine, linear, constant
    warmup_share: float = 0.03
    min_lr_share: float = 0.1
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    answer: str


@dataclass(frozen=True)
class Sample:
    """A completion as it was sampled; `old_logp` has the policy's log-prob of each token."""

    prompt: list[int]
    completion: list[int]
    old_logp: list[float]


# ---- data ------------------------------------------------------------------------------------


def read_prompts(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Prompt(tokenizer(row["prompt"])["input_ids"], row["answer"]) for row in rows]


def prompts_of_step(settings: Settings, *, step: int, num_prompts: int) -> list[int]:
    """Return the prompts that step `step` (from 1) samples."""
    numbers = np.arange(settings.prompts_per_step) + (step - 1) * settings.prompts_per_step
    epochs, places = np.divmod(numbers, num_prompts)
    orders = {}
    for epoch in set(epochs.tolist()):
        generator = np.random.Philox(np.random.SeedSequence((settings.seed, epoch)))
        orders[epoch] = np.argsort(generator.random_raw(num_prompts), kind="stable")
    return [int(orders[e][p]) for e, p in zip(epochs.tolist(), places.tolist(), strict=True)]


# ---- model -----------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Cache:
    """Keys and values of one layer; slot s holds those of the row's token at position s."""

    def __init__(self) -> None:
        self.k_BSH: Tensor | None = None
        self.v_BSH: Tensor | None = None

    def update(self, k: Tensor, v: Tensor, positions_BT: Tensor, size: int) -> tuple[Tensor, ...]:
        if self.k_BSH is None or self.v_BSH is None:
            shape = (*k.shape[:2], size, k.shape[3])
            self.k_BSH, self.v_BSH = k.new_zeros(shape), v.new_zeros(shape)
        slots = positions_BT[:, None, :, None].expand_as(k)
        self.k_BSH.scatter_(2, slots, k)
        self.v_BSH.scatter_(2, slots, v)
        return self.k_BSH, self.v_BSH


class Attention(nn.Module):
    """Causal attention; several query heads share a key/value head."""

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

    def forward(self, x_BTD: Tensor, place: Place, cache: Cache | None) -> Tensor:
        # [B, T, heads * H] -> [B, heads, T, H]
        q, k, v = (
            project(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, place), rotate(k, place)
        if cache is not None:
            k, v = cache.update(k, v, place.positions_BT, place.num_slots)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        mixed = scores.masked_fill(place.future_BTS, -math.inf).softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Place:
    """The positions of the tokens of a forward pass: what attention needs besides the tokens."""

    positions_BT: Tensor
    num_slots: int
    cos_BTH: Tensor
    sin_BTH: Tensor
    future_BTS: Tensor  # True where the slot's token comes after the query's

    @classmethod
    def of(cls, config: dict[str, Any], head_dim: int, positions_BT: Tensor, size: int) -> Place:
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", "default")
        assert kind == "default", f"rope_type {kind!r}: this file knows plain RoPE only"
        theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
        frequency = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angle = positions_BT[..., None].float() * frequency
        angle_BTH = torch.cat((angle, angle), dim=-1)[:, None]
        future_BTS = torch.arange(size) > positions_BT[..., None]
        return cls(positions_BT, size, angle_BTH.cos(), angle_BTH.sin(), future_BTS[:, None])


def rotate(x: Tensor, place: Place) -> Tensor:
    """Rotary embedding: the halves of each head are the two axes that are turned."""
    first, second = x.chunk(2, dim=-1)
    return x * place.cos_BTH + torch.cat((-second, first), dim=-1) * place.sin_BTH


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

    def forward(self, x_BTD: Tensor, place: Place, cache: Cache | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), place, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


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

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of whole rows: those at t predict token t + 1.

        Rows are padded at their end, where no earlier token can see it.
        """
        length = tokens_BT.shape[1]
        positions_BT = torch.arange(length).expand_as(tokens_BT)
        return self.extend(tokens_BT, positions_BT, [None] * len(self.model.layers), size=length)

    def extend(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        caches: list[Cache | None],
        *,
        size: int,
    ) -> Tensor:
        """Logits of these tokens, which see what the caches hold of earlier positions."""
        head_dim = self.model.layers[0].self_attn.head_dim
        place = Place.of(self.config, head_dim, positions_BT, size)
        x_BTD = self.model.embed_tokens(tokens_BT)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x_BTD = layer(x_BTD, place, cache)
        return self.lm_head(self.model.norm(x_BTD))


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


# ---- sampling --------------------------------------------------------------------------------


def noise_keys(seed: int, request_ids: list[str]) -> np.ndarray:
    """The stream of each request: 8 bytes of a hash of the run's seed and the request's name."""
    digests = [hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8) for name in request_ids]
    return np.array([int.from_bytes(d.digest(), "little") for d in digests], dtype=np.uint64)


def uniforms(keys_B: np.ndarray, position: int) -> Tensor:
    """A number in [0, 1) per stream for its token at `position`: splitmix64, modulo 2^64."""
    x = keys_B + np.uint64((position + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(logits_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first token at which the cumulated probability exceeds u."""
    cdf_BV = logits_BV.softmax(-1).double().cumsum(-1)
    target_B1 = (u_B * cdf_BV[:, -1])[:, None]
    return torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0]


@torch.no_grad()
def sample(
    model: Decoder,
    prompts: list[list[int]],
    request_ids: list[str],
    settings: Settings,
    *,
    stop_id: int,
) -> list[Sample]:
    """One completion of each prompt, up to and with the stop token."""
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    size = int(lengths_B.max()) + settings.max_new_tokens
    caches: list[Cache | None] = [Cache() for _ in model.model.layers]
    tokens_BT = pad([torch.tensor(prompt) for prompt in prompts])
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    logits_BTV = model.extend(tokens_BT, positions_BT, caches, size=size)
    logits_BV = logits_BTV[torch.arange(len(prompts)), lengths_B - 1]

    keys_B = noise_keys(settings.seed, request_ids)
    tokens, logps = [], []
    running_B = torch.ones(len(prompts), dtype=torch.bool)
    for position in range(settings.max_new_tokens):
        logits_BV = logits_BV / settings.temperature
        token_B = draw(logits_BV, uniforms(keys_B, position))
        tokens.append(token_B)
        logps.append(logits_BV.log_softmax(-1).gather(-1, token_B[:, None])[:, 0])
        running_B &= token_B != stop_id
        if not running_B.any():
            break
        # A row that has stopped continues with the others; what it samples then is cut off below.
        logits_BV = model.extend(
            token_B[:, None], (lengths_B + position)[:, None], caches, size=size
        )[:, 0]

    samples = []
    for prompt, row, logp in zip(
        prompts, torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist(), strict=True
    ):
        end = row.index(stop_id) + 1 if stop_id in row else len(row)
        samples.append(Sample(prompt, row[:end], logp[:end]))
    return samples


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


# ---- learning --------------------------------------------------------------------------------


def advantages(rewards: list[float], settings: Settings) -> list[float]:
    """Return how much better each sample of one group is than the group."""
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    advantages_G = rewards_G - rewards_G.mean()
    if settings.scale == "group":
        advantages_G = advantages_G / (rewards_G.std() + 1e-4)
    return advantages_G.tolist()


def token_weights(mask_BT: Tensor, settings: Settings) -> Tensor:
    """Return how much each token counts in the update's loss."""
    num_rows, lengths_B1 = len(mask_BT), mask_BT.sum(1, keepdim=True)
    if settings.normalise == "token":
        return mask_BT / mask_BT.sum()
    if settings.normalise == "sequence":
        return mask_BT / lengths_B1 / num_rows
    return mask_BT / (num_rows * settings.max_new_tokens)


def policy_loss(
    model: Decoder, batch: list[tuple[Sample, float]], settings: Settings
) -> tuple[Tensor, dict[str, float]]:
    """Clipped policy gradient of the update's samples, less the entropy bonus.

        loss = sum over tokens of weight * (-min(ratio A, clip(ratio) A) - entropy_bonus * entropy)

    where ratio is the new over the old probability of the token. Log-probs and entropy are those
    of the distribution that was sampled from: at the temperature.
    """
    rows = [torch.tensor(s.prompt + s.completion) for s, _ in batch]
    trained = [torch.tensor([False] * len(s.prompt) + [True] * len(s.completion)) for s, _ in batch]
    old_logp = [torch.tensor([0.0] * len(s.prompt) + s.old_logp) for s, _ in batch]
    tokens_BT, mask_BT, old_logp_BT = pad(rows), pad(trained)[:, 1:], pad(old_logp)[:, 1:]
    advantage_B1 = torch.tensor([advantage for _, advantage in batch])[:, None]

    logp_BTV = (model(tokens_BT[:, :-1]) / settings.temperature).log_softmax(-1)
    logp_BT = logp_BTV.gather(-1, tokens_BT[:, 1:, None])[..., 0]
    entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
    # Outside the completions the ratio is 1: it has no weight there, but must stay finite.
    ratio_BT = torch.where(mask_BT, logp_BT - old_logp_BT, 0.0).exp()
    clipped_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain_BT = torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    gain_BT = gain_BT + settings.entropy_bonus * entropy_BT
    loss = -(token_weights(mask_BT, settings) * gain_BT).sum()

    cut_BT = clipped_BT * advantage_B1 < ratio_BT * advantage_B1
    facts = {
        "entropy": entropy_BT[mask_BT].mean().item(),
        "clip_ratio": cut_BT[mask_BT].float().mean().item(),
    }
    return loss, facts


def learning_rate(settings: Settings, update: int) -> float:
    """Linear warm-up, then from the peak towards `min_lr_share` (or not).

    Updates count from 1 to the end of the run, those that were left out included.
    """
    num_updates = settings.max_steps * settings.updates_per_step
    warmup = math.ceil(settings.warmup_share * num_updates)
    if update <= warmup:
        return settings.lr * update / warmup
    progress = (update - warmup - 1) / (num_updates - warmup)
    left = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[settings.schedule]
    return settings.lr * (settings.min_lr_share + (1 - settings.min_lr_share) * left)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no direction to shrink."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.999), eps=1e-8)


def rollout(
    model: Decoder,
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    *,
    step: int,
) -> list[tuple[list[Sample], list[float]]]:
    """For each prompt its group: the samples and their rewards."""
    size = settings.samples_per_prompt
    members = [(group, member) for group in range(len(prompts)) for member in range(size)]
    # "0" is the round of sampling: a step may have more where groups are drawn again.
    names = [f"train/{step}/0/{group}/{member}" for group, member in members]
    tokens = [prompts[group].tokens for group, _ in members]
    samples = sample(model, tokens, names, settings, stop_id=tokenizer.eos_token_id)
    texts = tokenizer.batch_decode([s.completion for s in samples], skip_special_tokens=True)
    rewards = [
        float(text.strip() == prompts[group].answer.strip())
        for text, (group, _) in zip(texts, members, strict=True)
    ]
    cuts = [slice(start, start + size) for start in range(0, len(members), size)]
    return [(samples[cut], rewards[cut]) for cut in cuts]


def split(groups: list[Any], num_updates: int) -> list[list[Any]]:
    """The groups of each update: contiguous shares, a group is never torn."""
    borders = [update * len(groups) // num_updates for update in range(num_updates + 1)]
    return [groups[start:end] for start, end in itertools.pairwise(borders)]


def train_step(
    model: Decoder,
    optimizer: torch.optim.AdamW,
    groups: list[tuple[list[Sample], list[float]]],
    settings: Settings,
    *,
    step: int,
) -> dict[str, Any]:
    """The updates of one step; an update in which nothing has a gradient is left out."""
    losses, grad_norms, facts = [], [], []
    lr = 0.0
    for number, share in enumerate(split(groups, settings.updates_per_step)):
        lr = learning_rate(settings, (step - 1) * settings.updates_per_step + number + 1)
        batch = [
            (one, advantage)
            for samples, rewards in share
            for one, advantage in zip(samples, advantages(rewards, settings), strict=True)
        ]
        if settings.entropy_bonus == 0 and not any(advantage for _, advantage in batch):
            continue
        loss, found = policy_loss(model, batch, settings)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        grad_norms.append(grad_norm.item())
        facts.append(found)
    return {
        "entropy": facts[0]["entropy"] if facts else None,
        "losses": losses,
        "grad_norms": grad_norms,
        "clip_ratio": sum(f["clip_ratio"] for f in facts) / len(facts) if facts else None,
        "learning_rate": lr,
    }


def train(settings: Settings) -> tuple[list[dict[str, Any]], Decoder]:
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    prompts = read_prompts(Path(settings.data), tokenizer)
    model = load_model(Path(settings.model))
    optimizer = make_optimizer(model, settings)

    history = []
    for step in range(1, settings.max_steps + 1):
        chosen = prompts_of_step(settings, step=step, num_prompts=len(prompts))
        groups = rollout(model, [prompts[i] for i in chosen], tokenizer, settings, step=step)
        rewards = [reward for _, earned in groups for reward in earned]
        lengths = [len(one.completion) for samples, _ in groups for one in samples]
        record = {
            "step": step,
            "reward": sum(rewards) / len(rewards),
            "zero_groups": sum(len(set(earned)) == 1 for _, earned in groups) / len(groups),
            "length": sum(lengths) / len(lengths),
            **train_step(model, optimizer, groups, settings, step=step),
        }
        print(json.dumps(record), flush=True)
        history.append(record)
    return history, model


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description="GRPO in one file.")
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
