"""Cases of keys that belong to the surrogate of one algorithm."""

from __future__ import annotations

from functools import partial

import pytest
from tests.support.every_key.rl_algorithm import UPDATES, learned, refused
from tests.support.every_key.rl_workshop import only
from tests.support.every_key.workshop import Case, Workshop, weight_bytes


def a_drift_holds_back(workshop: Workshop, kind: str) -> None:
    weights = ("algorithm.drift=0.0", "algorithm.drift=50.0")
    free, held = (learned(workshop, kind, *UPDATES, weight) for weight in weights)
    assert weight_bytes(free) != weight_bytes(held)
    # In the first update nothing has moved yet, and the drift has no gradient.
    once = [only("grad_norm", learned(workshop, kind, weight)) for weight in weights]
    assert once[0] == pytest.approx(once[1], rel=1e-4)


def a_drift_has_a_slope(workshop: Workshop, kind: str) -> None:
    strong = (*UPDATES, "algorithm.drift=50.0")
    wide, tight = (
        learned(workshop, kind, *strong, f"algorithm.drift_clip={bound}") for bound in (5.0, 1e-4)
    )
    assert weight_bytes(wide) != weight_bytes(tight)
    refused(workshop, kind, "algorithm={type: cpgd, drift: 0.0, drift_clip: 0.1}", "no drift term")


def a_gate_closes(workshop: Workshop, kind: str, *, side: str) -> None:
    slow, fast = (
        learned(workshop, kind, *UPDATES, f"algorithm.tau_{side}={tau}") for tau in (1.0, 50.0)
    )
    assert weight_bytes(slow) != weight_bytes(fast)


CASES: dict[str, Case] = {
    "algorithm.drift (cpgd)": partial(a_drift_holds_back, kind="cpgd"),
    "algorithm.drift_clip (cpgd)": partial(a_drift_has_a_slope, kind="cpgd"),
    "algorithm.tau_pos (sapo)": partial(a_gate_closes, kind="sapo", side="pos"),
    "algorithm.tau_neg (sapo)": partial(a_gate_closes, kind="sapo", side="neg"),
}
