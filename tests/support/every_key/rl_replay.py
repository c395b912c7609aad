"""Keys of routing replay. The model is `routed`, a tiny Qwen3-MoE."""

from __future__ import annotations

from unittest.mock import patch

from tests.support.every_key.workshop import (
    Case,
    Run,
    Workshop,
    all_of,
    alters,
    assert_same,
    metric,
    shows,
)

from homeostat.rollout.route_buffer import RouteBuffer

ROUTED = ("model.path=routed", "engine.decode=plain")
REPLAYED = (*ROUTED, "model.moe.router_replay=ids")
KEPT = (*REPLAYED, "rollout.keep_journal=true")
# By the second step the policy has moved away from the reference, whose routes are others then.
MOVED = (*REPLAYED, "algorithm.kl={coefficient: 0.1}", "trainer.max_steps=2", "trainer.lr=0.05")


def replays(run: Run) -> bool:
    return bool(run.metric("moe/replayed_share"))


def weighs(run: Run) -> bool:
    """Return whether the journal holds the weights of experts."""
    files = [path for path in (run.dir / "journal").rglob("*") if path.is_file()]
    return any(b"routed_weights" in path.read_bytes() for path in files)


def routes_beyond_the_bound_are_read_back(workshop: Workshop) -> None:
    held = workshop.run(*REPLAYED)
    read = RouteBuffer._read
    places = []

    def counted(self: RouteBuffer, *args: object) -> object:
        places.append(args)
        return read(self, *args)

    with patch.object(RouteBuffer, "_read", counted):
        spilled = workshop.again(*REPLAYED, "model.moe.replay_buffer_bytes=0")
        assert places, "nothing was read back from the journal"
        places.clear()
        workshop.again(*REPLAYED)
    assert not places
    assert_same(held, spilled)


CASES: dict[str, Case] = {
    "model.moe.router_replay": all_of(
        shows("model.moe.router_replay=ids", replays, was=False, now=True, base=ROUTED),
        shows("model.moe.router_replay=weights", weighs, was=False, now=True, base=KEPT),
    ),
    "model.moe.replay_reference": alters(
        "model.moe.replay_reference=true", metric("kl"), base=MOVED
    ),
    "model.moe.replay_buffer_bytes": routes_beyond_the_bound_are_read_back,
}
