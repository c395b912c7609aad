"""RL runs that sample from cut distributions: what is kept travels with the tokens, everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.integration.test_rl_run import values
from tests.support import runs, tiny_rl

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.errors import ConfigError, DataError, ReplayError
from homeostat.run.evaluation.rl_eval import _sampling as eval_sampling
from homeostat.run.learning.kept import kept_metrics, require_kept
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, Segment, StopReason

CUT = ("rollout.top_p=0.8", "rollout.top_k=9", "rollout.min_p=0.02", "trainer.max_steps=2")
# Every log-prob that there is: of the step's beginning, of each update, and of the reference.
ALL = ("algorithm.kl={coefficient: 0.1}", "algorithm.entropy_bonus=0.01")


def test_invariant_numerics_have_no_difference_over_kept_sets(tmp_path: Path) -> None:
    """Neither in the trainer's process nor in the engine's own, from which the sets are sent."""
    found = []
    for own in (False, True):
        config = tiny_rl.config(
            tmp_path, f"name=own_{own}", "model.numerics=invariant",
            f"engine={{type: native, own_process: {json.dumps(own)}}}", *CUT, *ALL,
        )  # fmt: skip
        runs.train(config)
        assert values(config, "sampling/sampling_logp_difference/max") == [0.0] * 2
        assert values(config, "sampling/importance_sampling_ratio/min") == [1.0] * 2
        assert all(0 < share < 0.9 for share in values(config, "sampling/kept_share"))
        assert all(0.3 < mass < 0.99 for mass in values(config, "sampling/kept_mass"))
        found.append(runs.final_tensors(config))
    assert found[0] == found[1]


def test_saved_rollouts_are_replayed_over_their_sets(tmp_path: Path) -> None:
    """The journal holds the sets: training on it gives the weights of the run that sampled."""
    whole = tiny_rl.config(tmp_path, "name=whole", *CUT, *ALL, "rollout.keep_journal=true")
    runs.train(whole)
    saved = json.dumps(str(whole.run_dir))
    replayed = tiny_rl.config(
        tmp_path, "name=replayed", *CUT, *ALL, f"debug={{mode: replay, rollouts: {saved}}}"
    )
    runs.train(replayed)
    assert runs.final_tensors(replayed) == runs.final_tensors(whole)
    assert all(gap < 1e-5 for gap in values(replayed, "replay/logp_difference/max"))
    other = tiny_rl.config(
        tmp_path, "name=other", *CUT, "rollout.min_p=0.5",
        f"debug={{mode: train_only, rollouts: {saved}}}",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"another min_p \(0.02 then, 0.5 now\)"):
        runs.train(other)


def test_an_evaluation_has_its_own_cut(tmp_path: Path) -> None:
    config = tiny_rl.config(
        tmp_path, *CUT, "data.validation_share=0.25",
        "eval.sampling={temperature: 1.0, top_p: 0.5, samples_per_prompt: 2}",
    )  # fmt: skip
    tokenizer = SimpleNamespace(stop_ids=frozenset({1}))
    found = eval_sampling(SimpleNamespace(config=config, tokenizer=tokenizer))
    assert (found.top_p, found.top_k, found.min_p) == (0.5, None, 0.0)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=50", "min_p=0.1"])
def test_an_engine_that_returns_no_sets_is_refused(tmp_path: Path, cut: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout.{cut.partition('=')[0]}.*engine.type=native"):
        tiny_rl.config(tmp_path, f"rollout.{cut}", "engine={type: vllm}")
    tiny_rl.config(tmp_path, "engine={type: vllm}")


def sample(columns: dict) -> Sample:
    logp_T = np.log(np.array([0.1, 0.2, 0.4], dtype=np.float32))
    segment = Segment(
        np.array([1, 2, 3]), logp_T, 0, sampled_logp_T=np.log(2 * np.exp(logp_T)), columns=columns
    )
    completion = Completion("train/1/0/0/0", (segment,), StopReason.LENGTH)
    return Sample(completion, "", {}, 0.0)


def test_how_much_was_kept_is_measured_and_what_is_missing_refused() -> None:
    kept = sample({KEPT_IDS: Ragged.of([[1, 5], [2], []], np.int32)})
    metrics = kept_metrics([kept], vocabulary=10)
    # The last token was drawn from all ten.
    assert metrics["sampling/kept_share"] == pytest.approx((2 + 1 + 10) / 3 / 10)
    assert metrics["sampling/kept_mass"] == pytest.approx(0.5)
    prompt = Prompt(0, np.array([0]), "", {})
    require_kept([RolloutGroup(prompt, (kept,))])
    with pytest.raises(ReplayError, match=r"train/1/0/0/0.*did not record"):
        require_kept([RolloutGroup(prompt, (kept, sample({})))])
