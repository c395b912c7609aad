"""What a checkpoint remembers of the run's health is used as it is, or refused by its place."""

from __future__ import annotations

import pytest

from homeostat.errors import CheckpointError
from homeostat.run.healing.watch import sound_state


def test_a_state_that_a_run_wrote_is_taken_as_it_is() -> None:
    state = {"quiet": [["H101", "loss", 3]], "allowed": ["H101"], "errors": []}
    assert sound_state(state, place="state.json") == state
    assert sound_state({}, place="state.json") == {}


@pytest.mark.parametrize(
    "state",
    [None, [], {"quiet": None}, {"quiet": ["x"]}, {"quiet": [[["H101"], "loss", 3]]},
     {"quiet": [["H101", "loss", "x"]]}, {"allowed": "H101"}, {"allowed": [["H101"]]},
     {"allowed": ["H101", 3]}],
)  # fmt: skip
def test_a_state_that_no_run_wrote_is_refused_by_its_place(state: object) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json: health\.monitor"):
        sound_state(state, place="state.json")
