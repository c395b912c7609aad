"""Check before the first step that a run's model and engine can replay routes."""

from __future__ import annotations

from homeostat.config.moe import MoeConfig
from homeostat.errors import ConfigError, Problem
from homeostat.models.routing import smallest_dtype
from homeostat.ops.moe_shape import MoeShape
from homeostat.rollout.engine import Capabilities


def require_replay(config: MoeConfig, moe: MoeShape | None, engine: Capabilities | None) -> None:
    """Raise ConfigError where model.moe.router_replay cannot work with the model or the engine.

    `engine` is None where nothing is sampled: then rollouts come with routes, or are refused later.
    """
    mode = config.router_replay
    if mode == "off":
        return
    why, fix = "", "Set it to off."
    if moe is None:
        why = "the model has no experts, so there are no routes to replay."
    elif engine is not None and not engine.routed_experts:
        why = f"the {engine.name} engine records no routes: {engine.why_no_routes}."
        fix = "Set it to off, or engine.type=native."
    elif engine is not None and mode == "weights" and not engine.routed_weights:
        why = f"the {engine.name} engine records which experts it chose, but not their weights."
        fix = "Set it to ids."
    if why:
        raise ConfigError([Problem("model.moe.router_replay", why, fix)])


def route_bytes_per_token(moe: MoeShape, *, weights: bool) -> int:
    """Return the bytes of a token's routes in memory and in the journal."""
    each = smallest_dtype(moe.num_experts).itemsize + (4 if weights else 0)
    return len(moe.layers) * moe.top_k * each
