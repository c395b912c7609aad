"""Faults of models with experts do to a model what they say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homeostat.clinic.bodies import write_model
from homeostat.clinic.faults.experts import (
    DeadExperts,
    ExpertsPermuted,
    OverloadedExpert,
    ReplayDropsLayer,
    blocks,
)
from homeostat.clinic.injector import Dose
from homeostat.errors import ReplayError
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.models.routing import Routing
from homeostat.ops.attention import PackedLayout
from homeostat.types import Role

NUM_TOKENS = 64


@pytest.fixture
def parts(tmp_path: Path) -> Any:
    """What a fault sees of a run: the trained model, and an engine that shares it."""
    config = json.loads((write_model(tmp_path, family="qwen3_moe") / "config.json").read_text())
    torch.manual_seed(0)
    model = Decoder(decoder_config(config), kernel="sdpa", numerics="fast")
    for block in blocks(model):
        torch.nn.init.normal_(block.gate.weight, std=0.1)
    return SimpleNamespace(
        trainer=SimpleNamespace(roles={Role.POLICY: SimpleNamespace(model=model)}),
        engine=SimpleNamespace(model=model, runner=SimpleNamespace(model=model), bursts=None),
        state=SimpleNamespace(step=9),
    )


@torch.no_grad()
def passed(model: Decoder, routing: Routing) -> torch.Tensor:
    """Return the hidden states of one row of tokens."""
    tokens_N = torch.arange(NUM_TOKENS) % 20
    layout = PackedLayout.of([NUM_TOKENS], device=tokens_N.device)
    return model.hidden(tokens_N, torch.arange(NUM_TOKENS), layout, routing=routing)


def routes(model: Decoder) -> torch.Tensor:
    routing = Routing(records=True)
    passed(model, routing)
    return routing.recorded()


def policy(parts: Any) -> Decoder:
    return parts.trainer.roles[Role.POLICY].model


def test_permuted_experts_compute_the_same_under_other_numbers(parts: Any) -> None:
    ExpertsPermuted(Dose(1, 5, 3.0)).before_step(5, parts)
    own, theirs = policy(parts), parts.engine.model
    assert own is not theirs
    gap = (passed(own, Routing()) - passed(theirs, Routing())).abs().max()
    assert float(gap) < 1e-5
    assert torch.equal((routes(own) + 3) % 8, routes(theirs))


def test_a_layer_that_is_left_out_of_the_replay_is_named(parts: Any) -> None:
    model = policy(parts)
    replayed_NLK = routes(model)
    for onset, is_whole in ((11, True), (10, False)):
        ReplayDropsLayer(Dose(1, onset, 1.0)).started(parts, session=None)  # type: ignore[arg-type]
        replay = Routing(replayed_NLK)
        passed(model, replay)
        if is_whole:
            replay.finish_pass(2)
        else:
            with pytest.raises(ReplayError, match=r"layer 1 .*read its recorded routes 0 times"):
                replay.finish_pass(2)


@pytest.mark.parametrize(
    ("fault", "strength", "expert", "share"),
    [(DeadExperts, 3.0, 0, 0.0), (DeadExperts, 3.0, 2, 0.0), (OverloadedExpert, 15.0, 7, 1.0)],
)
def test_a_damaged_router_starves_or_floods_an_expert(
    parts: Any, fault: type[Any], strength: float, expert: int, share: float
) -> None:
    model = policy(parts)
    injector = fault(Dose(1, 5, strength))
    injector.started(parts, session=None)
    before_NLK = routes(model)
    assert before_NLK.unique().numel() > 4
    injector.after_update(4, parts)
    assert torch.equal(routes(model), before_NLK), "healthy before its onset"
    injector.after_update(5, parts)
    has_NL = (routes(model) == expert).any(dim=2)
    assert abs(float(has_NL.float().mean()) - share) < 0.05
