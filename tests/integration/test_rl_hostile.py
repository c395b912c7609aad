"""RL runs that are lied to: files that change between two calls, memory that is gone, bad names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support import runs, tiny_rl
from tests.support.old_journal import rewrite_as_rounds

from homeostat.config import RunConfig
from homeostat.data.prompts import prepare_prompts
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import CheckpointError, ConfigError, DataError, TrainingHaltedError
from homeostat.observe.completions import completion_steps
from homeostat.observe.jsonl import read_metrics
from homeostat.rewards.functions import source_of
from homeostat.rollout.journal import Journal
from homeostat.run import rl
from homeostat.run.learning.learn import Learner
from homeostat.run.preflight.check import Preflight
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.types import Role

NO_SAVE = {"interval_steps": 100, "export": "off"}
SAVE_ALL = {"interval_steps": 2, "export": "off", "keep_last": 9}
KEEP = {"rollout": {**tiny_rl.ROLLOUT, "keep_journal": True}}
# The first digit is the smallest one, or the row's number is odd and nothing is said of it.
REWARD = """
def first(completions, first, n, log_metric, **columns):
    log_metric("n", float(n[0]))
    return [None if i % 2 else {offset} + float(text[:1] == wanted)
            for text, wanted, i in zip(completions, first, n)]
"""


class CrashError(Exception):
    """Ends a run where a test wants it to end."""


def values(config: RunConfig, name: str) -> list[Any]:
    return [record.get(name) for record in read_metrics(config.run_dir / "metrics.jsonl")]


def crash_in_step(config: RunConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill: nothing of the step is kept but what is in the journal."""
    plain = Learner.learn

    def learn(self: Learner, now: int, *args: Any, **named: Any) -> Any:
        if now == step:
            raise CrashError
        return plain(self, now, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", learn)
        with pytest.raises(CrashError):
            runs.train(config)


def save_weights(folder: Path, *, scale: float) -> None:
    """Weights on disk, in place of a random start."""
    config = tiny_rl.config(folder, "name=first", "trainer.max_steps=1", "checkpoint.export=final")
    file = folder / "model" / "model.safetensors"
    if not file.exists():
        export = runs.train(config).export
        assert export is not None
        file.write_bytes((export / "model.safetensors").read_bytes())
    save_file({name: tensor * scale for name, tensor in load_file(file).items()}, file)


def change_answers(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    text = "\n".join(json.dumps({**row, "first": "none"}) for row in rows)
    (folder / "prompts.jsonl").write_text(text)


CHANGES = {
    "answers": change_answers,
    "prompts": lambda folder: tiny_rl.write_prompts(folder / "prompts.jsonl", seed=9),
    "reward": lambda folder: (folder / "reward.py").write_text(REWARD.format(offset=5)),
    "weights": lambda folder: save_weights(folder, scale=1.5),
    "nothing": lambda folder: None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_run_begun_again_over_changed_files_replays_nothing(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(REWARD.format(offset=0))
    tiny_rl.recipe(tmp_path)
    save_weights(tmp_path, scale=1.0)
    sections: dict[str, Any] = {
        "checkpoint": NO_SAVE,
        "model": {"path": str(tmp_path / "model"), "init": "pretrained"},
        "rewards": {"functions": [{"type": "function", "path": f"{tmp_path / 'reward.py'}:first"}]},
    }
    crash_in_step(tiny_rl.config(tmp_path, **sections), 3, monkeypatch)
    CHANGES[what](tmp_path)
    again = tiny_rl.config(tmp_path, **sections)
    runs.train(again)
    fresh = tiny_rl.config(tmp_path, "name=fresh", **sections)
    runs.train(fresh)
    replayed = [1.0, 1.0, 1.0, 0.0] if what == "nothing" else [0.0] * 4
    assert values(again, "rollout/replayed_rounds") == replayed
    for name in ("reward", "grad_norm", "rewards/first/none", "rewards/first/logged/n"):
        assert values(again, name) == values(fresh, name)
    assert runs.final_tensors(again) == runs.final_tensors(fresh)


def test_a_run_goes_on_with_the_journal_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(REWARD.format(offset=0))
    sections: dict[str, Any] = {
        "checkpoint": {"interval_steps": 2, "export": "off"},
        "rewards": {
            "functions": [{"type": "function", "path": f"{tmp_path / 'reward.py'}:first"}],
            "normalise": "standardise",
        },
        "algorithm": {"type": "dapo", "dynamic_sampling": {"max_rounds": 3}},
    }
    config = tiny_rl.config(tmp_path, "trainer.max_steps=5", **sections)
    crash_in_step(config, 4, monkeypatch)
    prompts = prepare_prompts(config.data.train, load_tokenizer(config.model), config.data)
    written = rewrite_as_rounds(config.run_dir / "journal", prompts.__getitem__)
    assert len(written) >= 2
    runs.train(config)
    whole = tiny_rl.config(tmp_path, "name=whole", "trainer.max_steps=5", **sections)
    runs.train(whole)
    replayed = values(config, "rollout/replayed_rounds")
    assert replayed[2:4] == values(whole, "rollout/rounds")[2:4]
    assert replayed[4] == 0.0
    for name in ("reward", "grad_norm", "rewards/first/none", "rewards/first/logged/n"):
        assert values(config, name) == values(whole, name)
    assert runs.final_tensors(config) == runs.final_tensors(whole)
    # What the earlier version wrote is pruned like the rest.
    assert not any(file.exists() for file in written)


FLAKY = """
def right(completions, first, n, log_metric, **columns):
    log_metric("judged/by hand @ 100 %", 1.0)
    if n[0] % 3 == 0:
        raise TimeoutError("the judge does not answer")
    return [float(text[:1] == wanted) for text, wanted in zip(completions, first)]
"""


def test_a_run_with_failing_rewards_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed round leaves the same samples out, and a logged name may hold anything."""
    (tmp_path / "flaky.py").write_text(FLAKY)
    functions = [
        {"type": "function", "path": f"{tmp_path / 'flaky.py'}:right"},
        {"type": "regex_format", "pattern": "[0-4].*"},
    ]
    sections: dict[str, Any] = {
        "checkpoint": NO_SAVE,
        "rewards": {"functions": functions},
        "algorithm": {"type": "dapo"},
    }
    crash_in_step(tiny_rl.config(tmp_path, **sections), 3, monkeypatch)
    again = tiny_rl.config(tmp_path, **sections)
    runs.train(again)
    whole = tiny_rl.config(tmp_path, "name=whole", **sections)
    runs.train(whole)
    assert values(again, "rollout/replayed_rounds")[0] > 0
    for name in ("reward", "grad_norm", "rewards/right/failed", "rollout/failed_share"):
        assert values(again, name) == values(whole, name)
    assert sum(values(whole, "rewards/right/failed")) > 0
    # Groups that lost all their samples taught nothing, and others took their place.
    assert sum(values(whole, "rollout/groups_passed_over")) > 0
    assert values(whole, "rewards/right/logged/judged/by hand @ 100 %") == [1.0] * 4
    assert runs.final_tensors(again) == runs.final_tensors(whole)


NO_ANSWER = """
def right(completions, **columns):
    raise TimeoutError("the judge does not answer")
"""


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_step_in_which_no_row_is_trained_measures_no_kl(tmp_path: Path, place: str) -> None:
    """Nothing is scored under the reference, and a coefficient that adapts stays as it is."""
    (tmp_path / "silent.py").write_text(NO_ANSWER)
    functions = [{"type": "function", "path": f"{tmp_path / 'silent.py'}:right"}]
    kl = {"coefficient": 0.01, "place": place, "target": 0.1, "horizon": 10}
    config = tiny_rl.config(
        tmp_path,
        "trainer.max_steps=1",
        algorithm={"type": "grpo", "kl": kl},
        rewards={"functions": functions},
    )
    runs.train(config)
    assert values(config, "rollout/untrained_share") == [1.0]
    assert values(config, "kl") == [None]
    assert values(config, "kl_coefficient") == [0.01]


def test_rollouts_of_a_way_not_taken_are_gone(tmp_path: Path) -> None:
    """Back to step 2 with another rate, then on with the old one: step 7 was of another policy."""
    runs.train(tiny_rl.config(tmp_path, "trainer.max_steps=8", checkpoint=SAVE_ALL, **KEEP))
    aside = {**SAVE_ALL, "load_step": 2}
    other = tiny_rl.config(
        tmp_path, "trainer.max_steps=6", "trainer.lr=0.1", checkpoint=aside, **KEEP
    )
    runs.train(other)
    assert Journal(other.run_dir / "journal").steps() == [1, 2, 3, 4, 5, 6]
    assert completion_steps(other.run_dir / "completions") == [1, 2, 3, 4, 5, 6]
    config = tiny_rl.config(tmp_path, "trainer.max_steps=8", checkpoint=SAVE_ALL, **KEEP)
    runs.train(config)
    assert values(config, "rollout/replayed_rounds")[-2:] == [0.0, 0.0]
    differences = values(config, "sampling/sampling_logp_difference/max")
    # A step without any signal updates, and so measures, nothing.
    assert max(value for value in differences if value is not None) < 1e-4


def test_a_policy_does_not_go_on_beside_another_reference(tmp_path: Path) -> None:
    tiny_rl.recipe(tmp_path)
    save_weights(tmp_path, scale=1.0)
    sections: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model"), "init": "pretrained"},
        "algorithm": {"type": "grpo", "kl": {"coefficient": 0.1}},
    }
    runs.train(tiny_rl.config(tmp_path, "trainer.max_steps=2", **sections))
    save_weights(tmp_path, scale=1.3)
    with pytest.raises(CheckpointError, match="another reference"):
        runs.train(tiny_rl.config(tmp_path, **sections))


def test_a_reference_that_is_not_finite_halts_the_run(tmp_path: Path) -> None:
    raw = tiny_rl.recipe(tmp_path)
    save_weights(tmp_path, scale=1.0)
    broken = tiny_rl.write_model(tmp_path / "broken")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors")
    config = tiny_rl.config(
        tmp_path,
        model=raw["model"],
        algorithm={"type": "grpo", "kl": {"coefficient": 0.1, "place": "reward"}},
        reference={"type": "checkpoint", "path": str(broken)},
    )
    with pytest.raises(TrainingHaltedError, match=r"reference\.path"):
        runs.train(config)


def test_an_evaluation_does_not_count_in_a_steps_missing_values(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def none(completions, **rest):\n    return [None] * 4\n")
    config = tiny_rl.config(
        tmp_path,
        "data.validation_share=0.3",
        rewards={"functions": [{"type": "function", "path": f"{tmp_path / 'none.py'}:none"}]},
        eval={"interval_steps": 1, "at_start": True, "sampling": {"samples_per_prompt": 4}},
    )
    runs.train(config)
    assert values(config, "rewards/none/none") == [None, 16.0, 16.0, 16.0, 16.0]


def test_the_best_checkpoint_keeps_no_old_rollouts(tmp_path: Path) -> None:
    config = tiny_rl.config(
        tmp_path,
        "data.validation_share=0.3",
        "trainer.lr=0",
        "trainer.max_steps=8",
        checkpoint={"interval_steps": 2, "keep_last": 1, "export": "off"},
        eval={"interval_steps": 1},
    )
    runs.train(config)
    assert runs.events(config, "new_best")[-1]["step"] == 1
    assert Journal(config.run_dir / "journal").steps() == []


def test_saved_rollouts_without_a_rewards_values_are_refused(tmp_path: Path) -> None:
    saved = tiny_rl.config(tmp_path, "name=saved", "trainer.max_steps=1", **KEEP)
    runs.train(saved)
    config = tiny_rl.config(
        tmp_path,
        debug={"mode": "train_only", "rollouts": str(saved.run_dir)},
        rewards={"functions": [{"type": "length", "free_tokens": 1, "max_tokens": 5}]},
    )
    with pytest.raises(DataError, match="no values of the reward 'length'"):
        runs.train(config)


OUT_OF_MEMORY = {
    "compact": """
import torch
from homeostat.rollout.native.runner import Runner
def decode(self, sequences):
    torch.zeros(2**55, dtype=torch.uint8)
Runner.decode = decode
""",
    "compiled": """
from homeostat.rollout.native.cpu import weights
weights._most_floats = lambda tensor, panel: 2**46
""",
}


@pytest.mark.parametrize("way", ["compiled", pytest.param("compact", marks=pytest.mark.slow)])
def test_memory_that_runs_out_in_sampling_is_told_with_the_settings(
    tmp_path: Path, way: str
) -> None:
    recipe = tiny_rl.recipe(tmp_path, engine={"decode": way})
    process = runs.start(recipe, tmp_path, prelude=OUT_OF_MEMORY[way])
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert "engine.max_concurrency" in output


BAD = {
    "engine.memory_share": {"engine": {"memory_share": 1e-12}},
    "rollout.stop_token_ids": {"rollout": {**tiny_rl.ROLLOUT, "stop_token_ids": [99_999]}},
    "reference.path": {
        "algorithm": {"type": "grpo", "kl": {}},
        "reference": {"type": "checkpoint", "path": "/nowhere"},
    },
    "debug.rollouts": {"debug": {"mode": "train_only", "rollouts": "/nowhere"}},
}


@pytest.mark.parametrize("key", BAD)
def test_check_finds_what_training_would_refuse(tmp_path: Path, key: str) -> None:
    preflight = Preflight(tiny_rl.config(tmp_path, **BAD[key]), progress=lambda done, total: None)
    items = list(preflight.run())
    assert preflight.exit_code == 2
    (wrong,) = [item for item in items if item.level == "error"]
    assert key in wrong.text


def test_training_refuses_a_stop_token_that_the_model_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.stop_token_ids"):
        runs.train(tiny_rl.config(tmp_path, **BAD["rollout.stop_token_ids"]))


def test_the_source_of_a_reward_is_found_without_an_import() -> None:
    assert b"def load_reward" in source_of("homeostat.rewards.functions:load_reward")
    assert b"class HomeostatError" in source_of("homeostat.errors:x")
    package = Path(rl.__file__).parent.parent
    assert source_of("homeostat:x") == (package / "__init__.py").read_bytes()
    assert source_of("nowhere.to_be_found:x") == b""


def test_skipped_updates_of_one_step_count_towards_the_halt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(models: dict[Role, RoleModel], *args: Any, **kwargs: Any) -> LocalTrainer:
        norm = models[Role.POLICY].loaded.module.get_submodule("model.norm")
        norm.register_full_backward_pre_hook(lambda module, grads: (grads[0] * math.inf,))
        return LocalTrainer(models, *args, **kwargs)

    monkeypatch.setattr("homeostat.train.build.LocalTrainer", overflowing)
    config = tiny_rl.config(tmp_path, "trainer.epochs_per_step=4")
    with pytest.raises(TrainingHaltedError, match=r"^step 1: .* 3 updates in a row were skipped"):
        runs.train(config)
