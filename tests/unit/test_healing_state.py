"""The state of healing that a checkpoint saved is checked like any other file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from homeostat.errors import CheckpointError
from homeostat.run.healing.healer import Edit, Healing, Trial

TRIAL = Trial(
    code="LRN002", subject="", cause="lr-too-high", remedy="halve-lr", action="", path="trainer.lr",
    old=1e-3, new=5e-4, step=3, window=5, metric="train/loss", better="lower", before=2.0,
)  # fmt: skip


def test_what_was_saved_is_read_back():
    healing = Healing({"trainer.lr": Edit(1e-3, 5e-4)}, TRIAL, {"x": 2}, {"y": 1}, 1, 7)
    saved = json.loads(json.dumps(healing.as_json()))
    assert Healing.from_json(saved, place="state.json") == healing


@pytest.mark.parametrize("value", [math.inf, math.nan, 1.5, "many", None, True, -1, [], 2**70])
@pytest.mark.parametrize("name", ["roll_backs", "tried", "trial"])
def test_a_count_that_is_none_is_refused_with_its_name(name, value):
    fields = {
        "roll_backs": value,
        "tried": {"LRN002": value},
        "trial": {**asdict(TRIAL), "step": value},
    }
    with pytest.raises(CheckpointError, match=f"healing cannot be read: {name}"):
        Healing.from_json({name: fields[name]}, place="state.json")
