"""Draws the next token of each sequence, with both its log-probs.

    z = logits / temperature;   token = first v with cdf(v) > u * cdf(V)

`u` is the request's own noise. The sum is float64 over fp32 weights exp(z - max), so a token with
weight zero is never drawn. Temperature 0 takes the likeliest token; log-probs are then at
temperature 1. Top-k, top-p and min-p (ops/cut.py) set the weights of the words that they cut to
zero. The engine's log-prob is computed before that, the sampled log-prob after it. In invariant
numerics the trainer's own function computes both, so that they are bitwise equal to the trainer's.

Suffixes: `_B` sequences, `_V` vocabulary, `_D` model dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from homeostat.arrays import FloatArray, IntArray
from homeostat.columns import Ragged
from homeostat.models.build import Model
from homeostat.ops.cut import Cut, kept_mask
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.linear import tiled_product
from homeostat.ops.logit_tiles import capped_logits
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.native.memory import to_device
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.noise import uniforms


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sampled tokens, on the host. `sampled_logp_B` equals `engine_logp_B` where nothing was
    cut; `kept_B` has the sets that tokens were drawn from, for the rows that ask for them."""

    tokens_B: IntArray
    engine_logp_B: FloatArray
    sampled_logp_B: FloatArray
    kept_B: Ragged | None = None


def draw(model: Model, hidden_BD: Tensor, sequences: list[Sequence], *, chunk_bytes: int) -> Drawn:
    """Draw one token per sequence, with a single copy to the host."""
    temperature_B = np.array([s.request.sampling.temperature for s in sequences])
    logp_temperature_B = np.where(temperature_B > 0, temperature_B, 1.0)
    z_BV = _scaled_logits(model, hidden_BD, logp_temperature_B)
    z_BV -= z_BV.amax(1, keepdim=True)
    weight_BV = z_BV.exp()
    cdf_BV = kept_cdf_BV = weight_BV.cumsum(1, dtype=torch.float64)
    kept_BV = _kept(z_BV, sequences)
    if kept_BV is not None:
        weight_BV.masked_fill_(~kept_BV, 0.0)
        kept_cdf_BV = weight_BV.cumsum(1, dtype=torch.float64)
    tokens_B1 = _inverse_cdf(kept_cdf_BV, to_device(noise_of(sequences)[0], z_BV.device))
    if (temperature_B == 0).any():
        greedy_B1 = to_device(temperature_B == 0, z_BV.device)[:, None]
        tokens_B1 = torch.where(greedy_B1, z_BV.argmax(1, keepdim=True), tokens_B1)
    columns = [tokens_B1, z_BV.gather(1, tokens_B1), cdf_BV[:, -1:], kept_cdf_BV[:, -1:]]
    scored = (model, hidden_BD, tokens_B1[:, 0], logp_temperature_B)
    is_invariant = model.numerics == "invariant"
    if is_invariant:
        columns.append(_trainer_logp(*scored, chunk_bytes=chunk_bytes)[:, None])
    # Every vocabulary fits into float64: one copy to the host holds all.
    found_B = torch.cat(columns, 1).cpu().numpy().T
    tokens_B, z_B, total_B, kept_total_B, *trainer_logp = found_B
    engine_logp_B = trainer_logp[0] if trainer_logp else z_B - np.log(total_B)
    sampled_logp_B = z_B - np.log(kept_total_B)
    tokens_B, kept_B = tokens_B.astype(np.int64), None
    if kept_BV is not None:
        kept_B = _sets(kept_BV, sequences)
        if is_invariant:
            logp_B = _trainer_logp(*scored, chunk_bytes=chunk_bytes, kept_B=kept_B).cpu().numpy()
            # A row without a cut already has the trainer's log-prob.
            is_whole_B = kept_total_B == total_B
            sampled_logp_B = np.where(is_whole_B, engine_logp_B, sampled_logp_B)
            sampled_logp_B = np.where(kept_B.sizes_T > 0, logp_B, sampled_logp_B)
    return Drawn(
        tokens_B, engine_logp_B.astype(np.float32), sampled_logp_B.astype(np.float32), kept_B
    )


def _scaled_logits(model: Model, hidden_BD: Tensor, temperature_B: np.ndarray) -> Tensor:
    """Return logits over temperatures, fp32 [B, V], summed in fp32 as the trainer does."""
    weight_VD = model.output_weight()
    if model.numerics == "invariant":
        z_BV = tiled_product(hidden_BD, weight_VD, out_dtype=torch.float32)
    elif hidden_BD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16):
        z_BV = torch.mm(hidden_BD, weight_VD.t(), out_dtype=torch.float32)
    else:
        z_BV = functional.linear(hidden_BD.float(), weight_VD.float())
    if model.logit_cap is not None:
        z_BV = capped_logits(z_BV, model.logit_cap, numerics=model.numerics)
    if (temperature_B != 1.0).any():
        z_BV *= to_device((1.0 / temperature_B).astype(np.float32), z_BV.device)[:, None]
    return z_BV


def _trainer_logp(
    model: Model,
    hidden_BD: Tensor,
    tokens_B: Tensor,
    temperature_B: np.ndarray,
    *,
    chunk_bytes: int,
    kept_B: Ragged | None = None,
) -> Tensor:
    """Return log-probs, fp32 [B], by the trainer's function, called once per temperature.

    With `kept_B`, only for rows that have a kept set, and over that set.
    """
    logp_B = hidden_BD.new_zeros(len(tokens_B), dtype=torch.float32)
    is_scored_B = np.ones(len(tokens_B), dtype=bool) if kept_B is None else kept_B.sizes_T > 0
    weight_VD, device = model.output_weight(), hidden_BD.device
    for temperature in np.unique(temperature_B[is_scored_B]):
        chosen = np.flatnonzero((temperature_B == temperature) & is_scored_B)
        rows, kept = to_device(chosen, device), None
        if kept_B is not None:
            kept = KeptSets.of(
                kept_B,
                tokens_B.cpu().numpy(),
                chosen,
                vocabulary=weight_VD.shape[0],
                send=lambda array: to_device(array, device),
            )
        logp_B[rows] = token_logprobs(
            hidden_BD[rows],
            weight_VD,
            tokens_B[rows],
            temperature=float(temperature),
            chunk_bytes=chunk_bytes,
            numerics=model.numerics,
            kept=kept,
            soft_cap=model.logit_cap,
        )
    return logp_B


def noise_of(sequences: list[Sequence], *, num_steps: int = 1) -> np.ndarray:
    """Return the noise of the next tokens of each sequence, float64 [S, B]."""
    keys_B = np.array([sequence.noise_key for sequence in sequences], dtype=np.uint64)
    first_B = np.array([sequence.num_new for sequence in sequences], dtype=np.uint64)
    positions_SB = first_B + np.arange(num_steps, dtype=np.uint64)[:, None]
    # The largest number below 1, times a total, may round up to the total, and no entry exceeds it;
    # the one before it never does.
    return np.minimum(uniforms(keys_B, positions_SB), 1.0 - 2.0**-52)


def _inverse_cdf(cdf_BV: Tensor, noise_B: Tensor) -> Tensor:
    """Return the first entry of each row above the share `noise` of its total, [B, 1]."""
    found_B1 = torch.searchsorted(cdf_BV, noise_B[:, None] * cdf_BV[:, -1:], right=True)
    # Only a NaN total leads beyond the end; the engine then refuses the log-prob.
    return found_B1.clamp_(max=cdf_BV.shape[1] - 1)


def _kept(z_BV: Tensor, sequences: list[Sequence]) -> Tensor | None:
    """Return bool [B, V], True for what each row may draw; None where no row is cut."""
    if not any(sequence.is_cut for sequence in sequences):
        return None
    settings = [sequence.request.sampling for sequence in sequences]
    # Greedy rows have the settings of a cut that keeps everything.
    cuts = [Cut(s.top_k, s.top_p, s.min_p) if s.is_cut else Cut() for s in settings]
    return kept_mask(z_BV, cuts)


def _sets(kept_BV: Tensor, sequences: list[Sequence]) -> Ragged:
    """Return the sets of the rows that ask for them; none where the whole vocabulary was kept."""
    wants_B = np.array([sequence.kept is not None for sequence in sequences])
    wants_B &= ~kept_BV.all(1).cpu().numpy()
    wanted_BV = kept_BV & to_device(wants_B, kept_BV.device)[:, None]
    row_P, ids_P = wanted_BV.nonzero().cpu().numpy().T
    offsets_B = np.searchsorted(row_P, np.arange(len(sequences) + 1))
    return Ragged(ids_P.astype(np.int32), offsets_B)
