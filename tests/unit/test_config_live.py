"""The live config: edits of a running run, what may be edited, and who hears of it."""

from __future__ import annotations

import pytest
from tests.support import tiny_rl

from homeostat.config import RunConfig
from homeostat.config.loading.live import Edit, LiveConfig, editable_keys
from homeostat.errors import ConfigError


@pytest.fixture
def recipe(tmp_path) -> RunConfig:
    return tiny_rl.config(tmp_path)


def test_an_edit_is_in_force_until_it_is_reverted(recipe: RunConfig) -> None:
    live, heard = LiveConfig(recipe), []
    live.on_change(lambda: heard.append(live.now.rollout.temperature))
    live.edit("rollout.temperature", 0.5, step=3)
    assert live.now.rollout.temperature == 0.5
    assert live.recipe_value("rollout.temperature") == recipe.rollout.temperature
    live.revert("rollout.temperature")
    assert live.now == recipe
    assert heard == [0.5, recipe.rollout.temperature]


def test_a_value_that_a_key_cannot_have_changes_nothing(recipe: RunConfig) -> None:
    live, heard = LiveConfig(recipe), []
    live.on_change(lambda: heard.append(live.now))
    with pytest.raises(ConfigError, match="temperature"):
        live.edit("rollout.temperature", -1.0, step=3)
    assert (live.now, live.edits, heard) == (recipe, {}, [])


def test_edits_of_a_checkpoint_are_adopted_and_shared_with_it(recipe: RunConfig) -> None:
    live, saved = LiveConfig(recipe), {"trainer.lr": Edit(1e-9, 2)}
    live.adopt(saved)
    assert live.now.trainer.lr == 1e-9
    live.edit("rollout.temperature", 0.5, step=4)
    assert saved["rollout.temperature"] == Edit(0.5, 4)


def test_rollouts_under_an_edit_have_another_origin(recipe: RunConfig) -> None:
    live = LiveConfig(recipe)
    assert live.origin("abc") == "abc"
    live.edit("trainer.lr", 1e-9, step=2)
    edited = live.origin("abc")
    assert edited != "abc"
    live.edit("trainer.lr", 1e-9, step=3)
    assert live.origin("abc") != edited
    live.revert("trainer.lr")
    assert live.origin("abc") == "abc"


def test_what_a_run_cannot_change_is_not_editable(recipe: RunConfig) -> None:
    assert "rollout.temperature" in editable_keys(recipe)
    # Shared weights are never sent, and this recipe has no KL term.
    assert not {"sync.interval", "algorithm.kl.coefficient", "seed"} & editable_keys(recipe)
    sent = recipe.model_copy(
        update={"engine": recipe.engine.model_copy(update={"own_process": True})}
    )
    assert "sync.interval" in editable_keys(sent)
