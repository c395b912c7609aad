"""Faults of models with experts: routers, the order of experts, and the replay of routes.

Runs replay the engine's routes unless a fault says otherwise. `_E` are experts, `_D` the model dim.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from homeostat.clinic.around_step import around_step
from homeostat.clinic.faults.engine import part_ways
from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.health.finding import Family
from homeostat.models.blocks import MoeBlock
from homeostat.models.decoder import Decoder
from homeostat.models.moe import Router
from homeostat.models.routing import Routing
from homeostat.rollout.engine import Request
from homeostat.run.session.session import Session
from homeostat.types import Role

REPLAY: Raw = {"model.moe.router_replay": "ids"}
# The engine computes with its own module, which a fault can alter.
PLAIN: Raw = {"engine": {"type": "native", "decode": "plain"}}
SOFTMAX = Body("sort", family="qwen3_moe", steps=30, changes=REPLAY)
SIGMOID = Body("sort", family="dots1", steps=30, changes=REPLAY)


def policy(parts: Any) -> Decoder:
    """Return the model that is trained."""
    return parts.trainer.roles[Role.POLICY].model


def blocks(model: Decoder) -> list[MoeBlock]:
    """Return the blocks of experts, in the order of their layers."""
    return [module for module in model.modules() if isinstance(module, MoeBlock)]


class ReplayDropsLayer(Injector):
    """One layer of the trained model no longer reads the recorded routes: it chooses freely."""

    name, family, body = "replay_drops_layer", Family.MOE, SOFTMAX
    expects = ("routing-replay-incomplete",)
    is_fatal = True

    def started(self, parts: Any, session: Session) -> None:
        gate = blocks(policy(parts))[-1].gate
        forward = gate.forward

        def own_choice(x_ND: Tensor, layer: int, routing: Routing) -> tuple[Tensor, Tensor]:
            ill = self.is_ill(parts.state.step + 1) and routing.replayed_NLK is not None
            return forward(x_ND, layer, Routing() if ill else routing)

        gate.forward = own_choice


class ReplayNeverComes(Injector):
    """The engine is no longer asked for routes, and records none."""

    name, family, body = "replay_never_comes", Family.MOE, SOFTMAX
    expects = ("routing-replay-data-missing",)
    is_fatal = True

    def started(self, parts: Any, session: Session) -> None:
        engine, submit = parts.engine, parts.engine.submit

        def without_routes(request: Request) -> None:
            if self.is_ill(parts.state.step + 1):
                request = replace(request, routed_experts=False)
            submit(request)

        engine.submit = without_routes


class ExpertsPermuted(Injector):
    """The engine numbers its experts differently: the same function, other numbers."""

    name, family = "experts_permuted", Family.MOE
    expects = ("experts-permuted",)
    body = Body("sort", family="qwen3_moe", steps=30, changes=REPLAY | PLAIN)
    strength = (1.0, 3.0)

    def before_step(self, step: int, parts: Any) -> None:
        if not self.is_ill(step):
            return
        if self.strikes(step):
            self.model = part_ways(parts.engine)
        published = dict(policy(parts).causal_lm.named_parameters())
        with torch.no_grad():
            for name, param in self.model.causal_lm.named_parameters():
                is_expert = ".mlp.experts." in name or ".mlp.gate." in name
                shift = round(self.dose.strength) if is_expert else 0
                param.copy_(published[name].roll(shift, dims=0))


class EngineRoutesApart(Injector):
    """The engine's routers compute with rounded weights, and nothing is replayed."""

    name, family = "engine_routes_apart", Family.MOE
    expects = ("moe-routing-mismatch", "engine-logprob-mismatch")
    body = Body("sort", family="qwen3_moe", steps=30, changes=PLAIN)
    strength = (0.3, 0.6)

    def before_step(self, step: int, parts: Any) -> None:
        if not self.is_ill(step):
            return
        if self.strikes(step):
            self.model = part_ways(parts.engine)
        published = dict(policy(parts).causal_lm.named_parameters())
        torch.manual_seed(self.dose.seed)
        with torch.no_grad():
            for name, param in self.model.causal_lm.named_parameters():
                param.copy_(published[name])
                if ".mlp.gate." in name:
                    param.add_(self.dose.strength * param.std() * torch.randn_like(param))


class _DamagedRouter(Injector):
    """Rows of all routers give every token the same logit, whatever it is."""

    family, body = Family.MOE, SOFTMAX

    def started(self, parts: Any, session: Session) -> None:
        self.seen_ND: dict[Router, Tensor] = {}

        def remember(gate: Router, args: tuple[Any, ...]) -> None:
            self.seen_ND[gate] = args[0].detach().float()

        for block in blocks(policy(parts)):
            block.gate.register_forward_pre_hook(remember)

    def level(self, parts: Any, rows: slice, logit: float) -> None:
        """Set rows so that tokens like the newest ones have this logit there."""
        with torch.no_grad():
            for block in blocks(policy(parts)):
                x_ND = self.seen_ND[block.gate]
                # Least squares, with a little ridge because tokens are alike.
                ridge_DD = 1e-3 * torch.eye(x_ND.shape[1])
                row_D = torch.linalg.solve(x_ND.T @ x_ND / len(x_ND) + ridge_DD, x_ND.mean(dim=0))
                block.gate.weight[rows] = logit * row_D


class DeadExperts(_DamagedRouter):
    """The router's rows of some experts are damaged: no token chooses them any more."""

    name, strength = "dead_experts", (2.0, 5.0)
    expects = ("dead-experts", "expert-load-imbalance")

    def after_update(self, step: int, parts: Any) -> None:
        if self.is_ill(step):
            self.level(parts, slice(round(self.dose.strength)), -20.0)


class OverloadedExpert(_DamagedRouter):
    """The router's row of one expert is damaged: nearly every token goes there."""

    name, strength = "overloaded_expert", (10.0, 20.0)
    expects = ("expert-load-imbalance", "dead-experts")

    def after_update(self, step: int, parts: Any) -> None:
        if self.is_ill(step):
            self.level(parts, slice(-1, None), self.dose.strength)


class RouterTooFast(Injector):
    """Routers learn at many times the rate of the other weights."""

    name, family = "router_too_fast", Family.MOE
    expects = ("router-drift",)
    body = Body(
        "sort", family="qwen3_moe", steps=30, changes=REPLAY | {"trainer.updates_per_step": 4}
    )
    strength = (10.0, 40.0)

    def started(self, parts: Any, session: Session) -> None:
        named = parts.trainer.roles[Role.POLICY].training.optimizer.params.items()
        weights = [param for name, param in named if name.endswith(".gate.weight")]
        assert weights, "the model has routers"
        before: list[Tensor] = []

        def remember() -> None:
            before[:] = [weight.detach().clone() for weight in weights]

        def exaggerate() -> None:
            if self.is_ill(parts.state.step + 1):
                for weight, old in zip(weights, before, strict=True):
                    weight.data.copy_(old + self.dose.strength * (weight.data - old))

        around_step(parts, before=remember, after=exaggerate)


class _BalancingInRl(Injector):
    """Loads are kept even in RL: `balancing` says how, and the key of its strength."""

    family, expects, onset = Family.MOE, ("router-loss-in-rl",), FROM_START
    balancing: tuple[str, str]

    def prepare(self, raw: Raw, folder: Path) -> None:
        how, key = self.balancing
        put(raw, "model.moe.balancing", how)
        put(raw, f"model.moe.{key}", self.dose.strength)


class BalancingLossInRl(_BalancingInRl):
    """A load-balancing loss of pretraining's kind outweighs the reward."""

    name, body, strength = "balancing_loss_in_rl", SOFTMAX, (0.1, 1.0)
    balancing = "aux", "aux_loss_coefficient"


class BiasUpdatesInRl(_BalancingInRl):
    """The expert bias is moved towards even loads after each update of an RL run."""

    name, body, strength = "bias_updates_in_rl", SIGMOID, (0.01, 0.1)
    balancing = "bias", "router_bias_update_rate"


FAULTS: tuple[type[Injector], ...] = (
    ReplayDropsLayer,
    ReplayNeverComes,
    ExpertsPermuted,
    EngineRoutesApart,
    DeadExperts,
    OverloadedExpert,
    RouterTooFast,
    BalancingLossInRl,
    BiasUpdatesInRl,
)
