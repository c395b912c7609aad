"""One case per config key: what a real run shows that only this key explains."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "workshop",
            "inputs",
            "trainer",
            "cluster",
            "outputs",
            "preference",
            "rl_workshop",
            "rl_algorithm",
            "rl_async",
            "rl_correction",
            "rl_ebft",
            "rl_sampling",
            "rl_rewards",
            "rl_sources",
            "rl_sync",
            "rl_health",
            "curriculum",
            "engine_sglang",
            "engine_vllm",
        )
    )
)
