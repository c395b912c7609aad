"""The float64 decoder gives the log-probs of transformers, to fp32 rounding and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, ROPES, SIZES, random_model, save

from homeostat.models import hf
from homeostat.models.families import decoder_config
from homeostat.models.float64 import reference_logprobs

MODELS = FAMILIES | {
    f"rope_{name}": {"model_type": "llama", "rope_parameters": rope} for name, rope in ROPES.items()
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_log_probs_are_those_of_transformers(name: str, temperature: float, tmp_path: Path) -> None:
    theirs = random_model(MODELS[name], seed=3)
    folder = save(theirs, tmp_path)
    weights = dict(hf.read_tensors(folder))
    tokens_T = np.random.default_rng(5).integers(0, SIZES["vocab_size"], 37)
    found = reference_logprobs(
        decoder_config(hf.read_config(folder)), weights, tokens_T, temperature=temperature
    )
    with torch.no_grad():
        logits_TV = theirs.double()(torch.from_numpy(tokens_T)[None]).logits[0, :-1]
    logp_TV = (logits_TV / temperature).log_softmax(dim=-1)
    wanted = logp_TV.gather(1, torch.from_numpy(tokens_T)[1:, None])[:, 0].numpy()
    assert found.dtype == np.float64
    assert np.abs(found - wanted).max() < 1e-5
