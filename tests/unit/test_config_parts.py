"""The bundles of settings that parts are given: what they hold is what the recipe says."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path

import pytest

from homeostat.config import load_config
from homeostat.config.run import RunConfig

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
BUNDLES = [name for name in vars(RunConfig) if name.startswith("for_")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_bundle_holds_the_settings_of_the_recipe_under_their_own_names(recipe: Path) -> None:
    config = load_config(recipe)
    for name in BUNDLES:
        bundle = getattr(config, name)
        for field in fields(bundle):
            assert getattr(bundle, field.name) == getattr(config, field.name), (name, field.name)
        # Workers are sent them.
        assert pickle.loads(pickle.dumps(bundle)) == bundle
    assert len(BUNDLES) > 5
