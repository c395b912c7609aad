"""What works beside rollout.max_staleness: each part gives a resumed run the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_rl_async import (
    SAVES,
    STALE,
    assert_equal,
    config_of,
    crash_in_step,
    values,
)
from tests.integration.test_rl_replay import moe_config
from tests.support import runs, tiny_rl

from homeostat.config import RunConfig

PARTS: dict[str, dict[str, Any]] = {
    # Further rounds share the engine with other steps, so their bits must not depend on a batch.
    "filters": {
        "algorithm": {"type": "grpo", "dynamic_sampling": {"max_rounds": 3}},
        "model": {"numerics": "invariant"},
    },
    "curriculum": {
        "rollout": {
            **tiny_rl.ROLLOUT,
            "curriculum": {"difficulty": {}, "replay": {"share": 0.5, "max_age_steps": 9}},
        }
    },
    "critic": {
        "algorithm": {"type": "ppo", "kl": {"coefficient": 0.01, "place": "reward"}},
        "critic": {"lr": 1e-2, "warmup_steps": 2},
    },
    "energies": {"algorithm": {"type": "ebft"}, "rewards": None, "ebft": {"whitening": False}},
    "refreshed reference": {
        "algorithm": {"type": "grpo", "kl": {"coefficient": 0.05}},
        "reference": {"type": "initial", "refresh_steps": 2},
    },
}
# The others are slower variants of the same check.
QUICK = ("critic",)


@pytest.mark.parametrize(
    "part",
    [
        *QUICK,
        *(pytest.param(one, marks=pytest.mark.slow) for one in PARTS if one not in QUICK),
    ],
)
def test_a_part_keeps_its_state_over_a_resume(tmp_path: Path, part: str) -> None:
    def config(name: str) -> RunConfig:
        return config_of(tmp_path, name, STALE, SAVES, "trainer.max_steps=6", **PARTS[part])

    whole, cut = config("whole"), config("cut")
    runs.train(whole)
    crash_in_step(cut, 4)
    runs.train(cut)
    assert_equal(cut, whole)
    first = 2 if part == "critic" else 0
    assert values(whole, "stale/steps/max")[first:] == [0, 1, 2, 2, 2, 2][: 6 - first]


@pytest.mark.slow
def test_routes_are_replayed_in_completions_of_several_versions(tmp_path: Path) -> None:
    """The engine returns the experts of every token, also of those before it was cut off."""
    config = moe_config(
        tmp_path,
        "engine.own_process=true", "engine.max_concurrency=4", "rollout.max_new_tokens=60",
        "trainer.max_tokens_per_device=512", STALE, "rollout.partial=true",
    )  # fmt: skip
    runs.train(config)
    assert max(values(config, "stale/mixed_share")) > 0
    # All tokens but the last of each row.
    assert all(0.7 < share < 1 for share in values(config, "moe/replayed_share"))
