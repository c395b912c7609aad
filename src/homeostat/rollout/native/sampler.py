"""Draws the next token of each sequence, with both its log-probs.

    z = logits / temperature;   token = first v with cdf(v) > u * cdf(V)

`u` is the request's own noise. The sum is float64 over fp32 weights exp(z - max): the token always
has a weight above zero. Temperature 0 takes the likeliest; log-probs are then at temperature 1.
Top-k and top-p set the weights of what they cut to zero; the engine's log-prob is taken before.
In invariant numerics the trainer's own function computes it, so that both are bitwise equal.

Suffixes: `_B` sequences, `_V` vocabulary, `_D` model dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from homeostat.models.decoder import Decoder
from homeostat.ops.linear import tiled_product
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.noise import uniforms
from homeostat.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the host. `sampled_logp_B` is `engine_logp_B` where nothing was cut."""

    tokens_B: IntArray
    engine_logp_B: FloatArray
    sampled_logp_B: FloatArray


def draw(
    model: Decoder, hidden_BD: Tensor, sequences: list[Sequence], *, chunk_bytes: int
) -> Drawn:
    """One token per sequence; one copy to the host."""
    temperature_B = np.array([s.request.sampling.temperature for s in sequences])
    logp_temperature_B = np.where(temperature_B > 0, temperature_B, 1.0)
    z_BV = _scaled_logits(model, hidden_BD, logp_temperature_B)
    z_BV -= z_BV.amax(1, keepdim=True)
    weight_BV = z_BV.exp()
    cdf_BV = kept_cdf_BV = weight_BV.cumsum(1, dtype=torch.float64)
    if any(sequence.is_cut for sequence in sequences):
        weight_BV.masked_fill_(~_kept(weight_BV, sequences), 0.0)
        kept_cdf_BV = weight_BV.cumsum(1, dtype=torch.float64)
    tokens_B1 = _inverse_cdf(kept_cdf_BV, to_device(noise_of(sequences)[0], z_BV.device))
    if (temperature_B == 0).any():
        greedy_B1 = to_device(temperature_B == 0, z_BV.device)[:, None]
        tokens_B1 = torch.where(greedy_B1, z_BV.argmax(1, keepdim=True), tokens_B1)
    columns = [tokens_B1, z_BV.gather(1, tokens_B1), cdf_BV[:, -1:], kept_cdf_BV[:, -1:]]
    if model.numerics == "invariant":
        at = (model, hidden_BD, tokens_B1[:, 0], logp_temperature_B)
        columns.append(_trainer_logp(*at, chunk_bytes=chunk_bytes)[:, None])
    # Every vocabulary fits into float64: one copy to the host holds all.
    tokens_B, z_B, total_B, kept_B, *trainer_logp = torch.cat(columns, 1).cpu().numpy().T
    engine_logp_B = trainer_logp[0] if trainer_logp else z_B - np.log(total_B)
    sampled_logp_B = z_B - np.log(kept_B)
    return Drawn(
        tokens_B.astype(np.int64),
        engine_logp_B.astype(np.float32),
        sampled_logp_B.astype(np.float32),
    )


def _scaled_logits(model: Decoder, hidden_BD: Tensor, temperature_B: np.ndarray) -> Tensor:
    """fp32 [B, V], summed in fp32 as the trainer's are."""
    weight_VD = model.output_weight()
    if model.numerics == "invariant":
        z_BV = tiled_product(hidden_BD, weight_VD, out_dtype=torch.float32)
    elif hidden_BD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16):
        z_BV = torch.mm(hidden_BD, weight_VD.t(), out_dtype=torch.float32)
    else:
        z_BV = functional.linear(hidden_BD.float(), weight_VD.float())
    if (temperature_B != 1.0).any():
        z_BV *= to_device((1.0 / temperature_B).astype(np.float32), z_BV.device)[:, None]
    return z_BV


def _trainer_logp(
    model: Decoder,
    hidden_BD: Tensor,
    tokens_B: Tensor,
    temperature_B: np.ndarray,
    *,
    chunk_bytes: int,
) -> Tensor:
    """fp32 [B], from the function that the trainer calls, once per temperature."""
    logp_B = hidden_BD.new_empty(len(tokens_B), dtype=torch.float32)
    for temperature in np.unique(temperature_B):
        rows = to_device(np.flatnonzero(temperature_B == temperature), hidden_BD.device)
        logp_B[rows] = token_logprobs(
            hidden_BD[rows],
            model.output_weight(),
            tokens_B[rows],
            temperature=float(temperature),
            chunk_bytes=chunk_bytes,
            numerics=model.numerics,
        )
    return logp_B


def noise_of(sequences: list[Sequence], *, num_steps: int = 1) -> np.ndarray:
    """float64 [S, B]: of each one's next tokens."""
    keys_B = np.array([sequence.noise_key for sequence in sequences], dtype=np.uint64)
    first_B = np.array([sequence.num_new for sequence in sequences], dtype=np.uint64)
    positions_SB = first_B + np.arange(num_steps, dtype=np.uint64)[:, None]
    # The largest number below 1 times a total may round up to the total, which no entry is above;
    # the one before it never does.
    return np.minimum(uniforms(keys_B, positions_SB), 1.0 - 2.0**-52)


def _inverse_cdf(cdf_BV: Tensor, noise_B: Tensor) -> Tensor:
    """[B, 1]: the first entry above the share `noise` of the total, which is its own step up."""
    found_B1 = torch.searchsorted(cdf_BV, noise_B[:, None] * cdf_BV[:, -1:], right=True)
    # Only a total that is not a number leads outside; the engine refuses its log-prob.
    return found_B1.clamp_(max=cdf_BV.shape[1] - 1)


def _kept(weight_BV: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return bool [B, V]: the likeliest top_k, and of these the fewest that hold a share top_p."""
    vocabulary = weight_BV.shape[1]
    cuts = [(s.request.sampling.top_k, s.request.sampling.top_p, s.is_cut) for s in sequences]
    top_k_B = np.array([min(k or vocabulary, vocabulary) if c else vocabulary for k, _, c in cuts])
    top_p_B = np.array([p if c else 1.0 for _, p, c in cuts])
    sorted_BV, order_BV = weight_BV.sort(dim=1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=weight_BV.device)
    kept_BV = rank_V < to_device(top_k_B, weight_BV.device)[:, None]
    share_BV = (sorted_BV * kept_BV).cumsum(1, dtype=torch.float64)
    before_BV = share_BV - sorted_BV
    limit_B1 = to_device(top_p_B, weight_BV.device)[:, None] * share_BV[:, -1:]
    kept_BV &= (before_BV < limit_B1) | (to_device(top_p_B, weight_BV.device)[:, None] >= 1.0)
    return torch.zeros_like(kept_BV).scatter_(1, order_BV, kept_BV)
