"""RL runs from recipe to weights, in small: what they leave behind, and that they go on exactly."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import runs, tiny_rl

from homeostat.config import RunConfig
from homeostat.config.algorithm import AnyPolicyGradient
from homeostat.errors import DataError
from homeostat.observe.completions import read_completions
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.journal import Journal
from homeostat.rollout.sampled_with import require_same_sampling
from homeostat.train.build import local_trainer
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import Role

ALGORITHMS = [cls.model_fields["type"].annotation.__args__[0] for cls in AnyPolicyGradient.__args__]
# What a clock or another process decides.
MEASURED = ("time", "throughput/", "memory/", "engine/", "rollout/replayed_rounds")


def records(config: RunConfig) -> list[dict[str, Any]]:
    return list(read_metrics(config.run_dir / "metrics.jsonl"))


def values(config: RunConfig, name: str) -> list[float]:
    return [record[name] for record in records(config) if name in record]


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in records(config)
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(tmp_path: Path, algorithm: str) -> None:
    config = tiny_rl.config(
        tmp_path,
        algorithm={
            "type": algorithm,
            "kl": {"coefficient": 0.01, "place": "reward" if algorithm == "rloo" else "loss"},
            "overlong": {"type": "shape", "buffer_tokens": 2},
        },
    )
    result = runs.train(config)
    assert result.step == 4
    found = records(config)
    assert len(found) == 4
    for record in found:
        assert np.isfinite(record["train/loss"])
        assert record["grad_norm"] > 0
        # Two updates: the ratio of the first is exactly 1, and the mean stays near it.
        assert record["policy/ratio_mean"] == pytest.approx(1.0, abs=0.2)
        assert record["sampling/sampling_logp_difference/max"] < 1e-5
        assert 0 < record["entropy"] < 3
        assert "kl" in record
    # Nobody has moved away from the reference before the first update.
    assert found[0]["kl"] < found[-1]["kl"]


def test_a_run_leaves_its_rollouts_behind(tmp_path: Path) -> None:
    config = tiny_rl.config(
        tmp_path,
        "data.validation_share=0.25",
        eval={"interval_steps": 2, "sampling": {"samples_per_prompt": 4}},
    )
    runs.train(config)
    assert Journal(config.run_dir / "journal").steps() == [3, 4]
    rows = read_completions(config.run_dir / "completions", 4)
    assert len(rows) == 16
    assert {row["policy_version"] for row in rows} == {3}
    mean = np.mean([row["reward"] for row in rows])
    assert records(config)[-1]["reward"] == pytest.approx(mean)
    differences = [np.array(row["logp_difference"]) for row in rows if row["logp_difference"]]
    assert [len(found) for found in differences] == [row["num_tokens"] for row in rows]
    assert [len(row["token_ids"]) for row in rows] == [row["num_tokens"] for row in rows]
    found = np.abs(np.concatenate(differences))
    wanted = records(config)[-1]["sampling/sampling_logp_difference/max"]
    assert np.nanmax(found) == pytest.approx(wanted, rel=1e-3, abs=1e-7)
    assert 0 <= values(config, "eval/pass@1")[-1] <= values(config, "eval/pass@4")[-1] <= 1
    assert values(config, "eval/reward")[-1] == pytest.approx(values(config, "eval/pass@1")[-1])


# Where a run is interrupted: before which call, counted from 1, of which function.
MOMENTS = {
    "between updates": ("homeostat.train.local", "LocalTrainer.apply", 4),
    "while sampling": ("homeostat.rollout.native.engine", "NativeEngine._step", 9),
    "while scoring": ("homeostat.rewards.pool", "RewardPool.submit", 10),
    "while the journal is written": ("homeostat.rollout.journal", "Journal.append", 15),
    "before the journal's barrier": ("homeostat.rollout.journal", "Journal.barrier", 4),
    "before the fourth round": ("homeostat.rollout.collect", "Collector.collect", 4),
}


def at(moment: str, action: str) -> str:
    """Python that does something at a moment of a run."""
    place, name, count = MOMENTS[moment]
    return runs.before(place, name, action, only_if=f"call == {count}")


DIES = "os._exit(9)"


@pytest.mark.parametrize(
    "moment",
    [
        "between updates",
        pytest.param("while sampling", marks=pytest.mark.slow),
        pytest.param("while scoring", marks=pytest.mark.slow),
        pytest.param("while the journal is written", marks=pytest.mark.slow),
        pytest.param("before the journal's barrier", marks=pytest.mark.slow),
    ],
)
def test_a_crash_costs_nothing_and_changes_nothing(tmp_path: Path, moment: str) -> None:
    raw = tiny_rl.recipe(tmp_path)
    whole = tiny_rl.config(tmp_path, "name=whole")
    runs.train(whole)
    process = runs.start(raw, tmp_path, prelude=at(moment, DIES))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 9, output
    config = tiny_rl.config(tmp_path)
    assert runs.events(config, "run_finished") == []
    runs.train(config)
    assert runs.final_tensors(config) == runs.final_tensors(whole)
    for mine, theirs in zip(comparable(config), comparable(whole), strict=True):
        assert mine == theirs


def test_sigterm_finishes_the_step_and_the_run_goes_on(tmp_path: Path) -> None:
    raw = tiny_rl.recipe(tmp_path)
    whole, config = tiny_rl.config(tmp_path, "name=whole"), tiny_rl.config(tmp_path)
    runs.train(whole)
    # In the midst of the fourth update, which belongs to step 2 or 3.
    asked_to_stop = at("between updates", "os.kill(os.getpid(), signal.SIGTERM)")
    process = runs.start(raw, tmp_path, prelude=asked_to_stop)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    done = [record["step"] for record in records(config)]
    assert done in ([1, 2], [1, 2, 3])
    assert CheckpointStore(config.run_dir / "checkpoints").steps()[-1] == done[-1]
    runs.train(config)
    assert runs.final_tensors(config) == runs.final_tensors(whole)


@pytest.mark.slow
def test_rollouts_of_other_settings_are_not_replayed(tmp_path: Path) -> None:
    """What was sampled after the checkpoint is of weights that no longer come to be."""
    raw = tiny_rl.recipe(tmp_path)
    process = runs.start(raw, tmp_path, prelude=at("before the fourth round", DIES))
    process.communicate(timeout=120)
    assert process.returncode == 9
    same, other = tiny_rl.config(tmp_path), tiny_rl.config(tmp_path, "trainer.lr=0.001")
    assert Journal(same.run_dir / "journal").steps() == [3]
    runs.train(other)
    assert values(other, "rollout/replayed_rounds")[2:] == [0, 0]


def test_debug_modes_split_a_run_into_its_halves(tmp_path: Path) -> None:
    whole = tiny_rl.config(tmp_path, "name=whole", "trainer.max_steps=1")
    runs.train(whole)
    sampled = tiny_rl.config(tmp_path, "name=sampled", "trainer.max_steps=1",
                             "debug={mode: rollout_only}")  # fmt: skip
    runs.train(sampled)
    assert not list((sampled.run_dir / "checkpoints").glob("step_*"))
    assert values(sampled, "reward") == values(whole, "reward")
    for mode in ("train_only", "replay"):
        trained = tiny_rl.config(
            tmp_path,
            f"name={mode}",
            "trainer.max_steps=1",
            f"debug={{mode: {mode}, rollouts: {json.dumps(str(sampled.run_dir))}}}",
        )
        runs.train(trained)
        assert runs.final_tensors(trained) == runs.final_tensors(whole)
        differences = values(trained, "replay/logp_difference/max")
        assert len(differences) == (mode == "replay")
        assert all(difference < 1e-5 for difference in differences)


def test_saved_rollouts_are_refused_where_they_were_sampled_in_another_way(tmp_path: Path) -> None:
    sampled = tiny_rl.config(tmp_path, "name=sampled", "trainer.max_steps=1",
                             debug={"mode": "rollout_only"})  # fmt: skip
    runs.train(sampled)
    saved = {"mode": "train_only", "rollouts": str(sampled.run_dir)}
    for override, why in (
        ("rollout.temperature=0.5", r"another temperature \(1.0 then, 0.5 now\)"),
        ("rollout.max_new_tokens=5", r"another max_new_tokens \(6 then, 5 now\)"),
        ("rollout.stop_token_ids=[10]", "rollout.stop_token_ids"),
        ("rollout.stop=['>']", "Set rollout.stop to"),
    ):
        config = tiny_rl.config(tmp_path, "name=other", override, debug=saved)
        with pytest.raises(DataError, match=why):
            runs.train(config)
    with pytest.raises(DataError, match=r"another vocabulary, .* Set model.tokenizer"):
        require_same_sampling({"vocabulary": "a"}, {"vocabulary": "b"}, folder=tmp_path)
    with pytest.raises(DataError, match="an earlier version wrote them"):
        require_same_sampling(None, {"temperature": 1.0}, folder=tmp_path)


@pytest.mark.parametrize("kind", ["initial", "checkpoint", "adapter_off"])
def test_references_agree_where_they_are_the_same_model(tmp_path: Path, kind: str) -> None:
    base = tiny_rl.config(tmp_path, "name=base", "trainer.max_steps=1", "trainer.lr=0",
                          "checkpoint.export=final")  # fmt: skip
    folder = runs.train(base).export
    reference = {"type": kind} | ({"path": str(folder)} if kind == "checkpoint" else {})
    config = tiny_rl.config(
        tmp_path,
        model={"path": str(folder), "init": "pretrained"},
        algorithm={"type": "grpo", "kl": {"coefficient": 0.1}},
        reference=reference,
        lora={"rank": 4} if kind == "adapter_off" else None,
        trainer={**tiny_rl.recipe(tmp_path)["trainer"], "updates_per_step": 1},
    )
    runs.train(config)
    found = values(config, "kl")
    assert found[0] == pytest.approx(0.0, abs=1e-10)
    assert found[-1] > 1e-6


def test_the_default_reference_includes_the_adapter_that_the_run_starts_from(
    tmp_path: Path,
) -> None:
    base = tiny_rl.config(tmp_path, "name=base", "trainer.max_steps=1", "checkpoint.export=final")
    model = {"path": str(runs.train(base).export), "init": "pretrained"}
    first = tiny_rl.config(
        tmp_path, "name=first", "trainer.max_steps=2", "checkpoint.export=final",
        model=model, lora={"rank": 4},
    )  # fmt: skip
    adapter = str(runs.train(first).export)
    keys = {
        "model": model,
        "lora": {"rank": 4, "path": adapter},
        "algorithm": {"type": "grpo", "kl": {"coefficient": 0.1}},
    }
    config = tiny_rl.config(tmp_path, "trainer.updates_per_step=1", **keys)
    runs.train(config)
    found = values(config, "kl")
    assert found[0] == pytest.approx(0.0, abs=1e-10)
    assert found[-1] > 1e-6
    bare = tiny_rl.config(
        tmp_path, "name=bare", "trainer.updates_per_step=1", "trainer.max_steps=1",
        reference={"type": "adapter_off"}, **keys,
    )  # fmt: skip
    runs.train(bare)
    assert values(bare, "kl")[0] > 1e-4
    # A resumed run measures against the same policy: all of its records are those of one run.
    halves = tiny_rl.config(tmp_path, "name=halves", "trainer.updates_per_step=1", **keys)
    for overrides in (["trainer.max_steps=2"], []):
        schedule = "trainer.schedule={type: constant}"
        runs.train(tiny_rl.config(tmp_path, "name=halves", "trainer.updates_per_step=1", schedule,
                                  *overrides, **keys))  # fmt: skip
    constant = tiny_rl.config(
        tmp_path, "name=constant", "trainer.updates_per_step=1", schedule, **keys
    )
    runs.train(constant)
    assert values(halves, "kl") == values(constant, "kl")
    trainer = local_trainer(config.for_trainer, resolve_runtime(config))
    shared = {
        p.data_ptr() for p in trainer.roles[Role.POLICY].model.parameters() if not p.requires_grad
    }
    copied = [
        p for p in trainer.roles[Role.REFERENCE].model.parameters() if p.data_ptr() not in shared
    ]
    assert len(copied) == len(trainer.roles[Role.POLICY].training.optimizer.params)


def test_a_refreshed_reference_is_the_policy_again(tmp_path: Path) -> None:
    config = tiny_rl.config(
        tmp_path,
        "trainer.updates_per_step=1",
        "trainer.max_steps=6",
        "checkpoint.interval_steps=1",
        algorithm={"type": "grpo", "kl": {"coefficient": 0.1}},
        reference={"type": "initial", "refresh_steps": 3},
    )
    runs.train(config)
    found = values(config, "kl")
    assert found[0] == pytest.approx(0.0, abs=1e-10)
    assert found[3] == pytest.approx(0.0, abs=1e-10)
    assert min(found[2], found[5]) > 1e-6


OF_ALL_ROWS = (
    "entropy",
    "policy/ratio_mean",
    "policy/ratio_max",
    "policy/ratio_min",
    "policy/update_kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "correction/factor_mean",
)


@pytest.mark.parametrize(("kind", "updates"), [("grpo", 1), ("grpo", 2), ("cispo", 2)])
def test_rows_without_advantage_can_be_left_out(tmp_path: Path, kind: str, updates: int) -> None:
    """The same updates for less work, to rounding: sums run over other rows. What is measured of
    the policy covers them all the same: here an update leaves out no more than are looked at."""
    made = {}
    for skip in (True, False):
        config = tiny_rl.config(
            tmp_path,
            f"name=skip_{skip}",
            "trainer.max_steps=1",
            f"trainer.updates_per_step={updates}",
            # An update without any signal would still decay the weights.
            "trainer.optimizer.weight_decay=0.0",
            "rollout.samples_per_prompt=2",
            algorithm={"type": kind, "clip_high": 0.01, "skip_zero_advantage": skip},
        )
        runs.train(config)
        made[skip] = records(config)[0]
    assert made[True]["advantages/zero_share"] > 0
    tokens = [made[skip]["data/trained_rows"] for skip in (True, False)]
    assert tokens[0] < tokens[1] == 8
    # With several updates these are means over those that were made.
    for name in ("train/loss", "grad_norm") if updates == 1 else ():
        assert made[True][name] == pytest.approx(made[False][name], abs=1e-6)
    for name in OF_ALL_ROWS:
        assert made[True][name] == pytest.approx(made[False][name], rel=1e-4, abs=1e-6), name


def test_the_entropy_of_a_step_without_any_signal_is_measured(tmp_path: Path) -> None:
    nothing = {"functions": [{"type": "exact_match", "column": "n", "extract": "[A-Z]{9}"}]}
    config = tiny_rl.config(tmp_path, "trainer.max_steps=1", rewards=nothing)
    runs.train(config)
    (record,) = records(config)
    assert record["train/updates_without_signal"] == 2
    assert "train/loss" not in record
    assert record["entropy"] > 1.0
    assert record["policy/ratio_mean"] == 1.0


def test_dynamic_sampling_replaces_groups_without_signal(tmp_path: Path) -> None:
    config = tiny_rl.config(
        tmp_path, algorithm={"type": "grpo", "dynamic_sampling": {"max_rounds": 4}}
    )
    runs.train(config)
    assert max(values(config, "rollout/rounds")) > 1
    assert sum(values(config, "rollout/groups_passed_over")) > 0
    assert values(config, "advantages/zero_share")[0] == 0


CORRECTIONS = {
    "default": None,
    "all": "{weight: {type: sequence, outside: mask}, reject: {type: geometric}, veto: 0.1, "
    "off_policy_mask: 9.0, normalise: true}",
}


@pytest.mark.parametrize("correction", ["all", pytest.param("default", marks=pytest.mark.slow)])
def test_invariant_numerics_have_no_difference_at_all(tmp_path: Path, correction: str) -> None:
    """So that a correction changes not a bit of the weights, in any of the updates."""
    set_to = CORRECTIONS[correction]
    more = () if set_to is None else (f"algorithm.correction={set_to}",)
    config = tiny_rl.config(tmp_path, "model.numerics=invariant", *more)
    off = tiny_rl.config(
        tmp_path, "model.numerics=invariant", "name=off", "algorithm.correction=null"
    )
    for each in (config, off):
        runs.train(each)
        assert values(each, "sampling/sampling_logp_difference/max") == [0.0] * 4
        assert values(each, "sampling/importance_sampling_ratio/min") == [1.0] * 4
        assert values(each, "sampling/ess_sequence") == [1.0] * 4
    assert values(config, "correction/factor_mean") == [1.0] * 4
    assert values(off, "correction/factor_mean") == []
    assert runs.final_tensors(config) == runs.final_tensors(off)


def test_tokens_of_later_updates_are_staler(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path, "algorithm.skip_zero_advantage=false")
    runs.train(config)
    # Two updates a step: none lies between sampling and the first, one before the second.
    assert values(config, "stale/steps/max") == [0] * 4
    assert values(config, "stale/updates/max") == [1] * 4
    assert all(0.2 < mean < 0.8 for mean in values(config, "stale/updates/mean"))
    assert values(config, "sampling/by_age/0/share") == [1] * 4
    assert runs.events(config, "worst_tokens") == []
