"""Recipes with rollout.max_staleness: what cannot work beside it is refused, with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import tiny_rl

from homeostat.config.loading.live import editable_keys
from homeostat.errors import ConfigError

OWN = "engine.own_process=true"
AHEAD = (OWN, "rollout.max_staleness=1")
FILTERED = "algorithm.dynamic_sampling={max_rounds: 2}"
REFUSED = {
    "an engine that shares the weights": (("rollout.max_staleness=1",), "take turns"),
    "partial completions without staleness": ((OWN, "rollout.partial=true"), "no completion"),
    "partial completions at staleness 0": (
        (OWN, "rollout.max_staleness=0", "rollout.partial=true"),
        "no completion",
    ),
    "an evaluation beside a loop that takes turns": (
        ("data.validation_share=0.2", "eval.sampling.blocking=false"),
        "take turns",
    ),
    "the best of evaluations that are known too late": (
        (*AHEAD, "data.validation_share=0.2", "eval.sampling.blocking=false"),
        "can no longer be saved",
    ),
    "two evaluations of a step": (
        (
            *AHEAD,
            "data.validation_share=0.2",
            "eval={interval_steps: 1, keep_best: false}",
            "eval.sampling.blocking=false",
        ),
        "would have an evaluation of its own",
    ),
    "versions that are not published": (
        (*AHEAD, "sync.interval=4"),
        "the weights of every step are published",
    ),
    "an engine that sleeps": ((*AHEAD, "engine.sleep=true"), "it never sleeps"),
    "sampling alone": ((*AHEAD, "debug={mode: rollout_only}"), "the two cannot overlap"),
    "a deadline of what continues": (
        (*AHEAD, "rollout.partial=true", "rollout.deadline_s=5"),
        "restart the time limit",
    ),
    "a second round by difficulty": (
        (*AHEAD, FILTERED, "rollout.curriculum={difficulty: {}}"),
        "after later steps have already drawn theirs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    overrides, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        tiny_rl.config(tmp_path, *overrides)


def test_remedies_do_not_edit_what_admitted_groups_depend_on(tmp_path: Path) -> None:
    ahead, sync = (editable_keys(tiny_rl.config(tmp_path, *more)) for more in (AHEAD, (OWN,)))
    assert sync - ahead == {"rollout.temperature", "sync.interval"}
