"""Find settings of routing replay (R3) that cannot work together or have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.algorithm import PolicyGradientConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

_ON = "Set model.moe.router_replay to ids or weights, or remove it."


def find_replay_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of model.moe.router_replay and the keys beside it."""
    moe = config.model.moe
    if moe.router_replay == "off":
        for name in ("replay_reference", "replay_buffer_bytes"):
            if name in moe.model_fields_set and getattr(moe, name) is not False:
                yield Problem(
                    f"model.moe.{name}",
                    "no routes are recorded, so this key would have no effect.",
                    _ON,
                )
        return
    if not isinstance(config.algorithm, PolicyGradientConfig):
        yield Problem(
            "model.moe.router_replay",
            f"algorithm.type={config.algorithm.type} samples nothing, so no engine records routes.",
            "Set it to off, or use an RL algorithm.",
        )
        return
    if config.model.implementation != "native":
        yield Problem(
            "model.moe.router_replay",
            f"a {config.model.implementation} model chooses its experts itself.",
            "Set it to off, or model.implementation=native.",
        )
    if moe.replay_reference and config.algorithm.kl is None:
        yield Problem(
            "model.moe.replay_reference",
            "there is no reference: algorithm.kl is not set.",
            "Set algorithm.kl, or remove it.",
        )
