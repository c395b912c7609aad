"""Settings of models with experts (mixture of experts)."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import ByteSize, Settings, key

ReplayMode = Literal["off", "ids", "weights"]


class MoeConfig(Settings):
    """Settings of a model with experts."""

    router_replay: ReplayMode = key(
        "off",
        help="Rollout routing replay (R3): train with the experts that the engine chose when it "
        "sampled. ids: the engine's experts, weighted by the trainer's router. weights: also the "
        "engine's weights; their gradient is that of the trainer's own. off: every pass chooses "
        "for itself.",
        resume="warn",
    )
    replay_reference: bool = key(
        False, help="The reference model replays the engine's routes, too.", resume="warn"
    )
    replay_buffer_bytes: ByteSize = key(
        2**30,
        ge=0,
        resume="free",
        help="Bytes of recorded routes that a step keeps in memory once its groups are in the "
        "journal. Routes of further groups are read back from there, micro-batch by micro-batch.",
    )
