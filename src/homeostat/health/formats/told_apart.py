"""Put the differential into sentences, with the names of the run's framework."""

from __future__ import annotations

from homeostat.health.differential.answer import Differential
from homeostat.health.differential.deciding import Decider
from homeostat.health.frameworks import Framework
from homeostat.health.frameworks.telling import in_their_words


def shares_line(found: Differential) -> str:
    """Return the illnesses with their probabilities in one line; "" if there are none."""
    return ", ".join(f"{one.name} {_percent(one.probability)}" for one in found.illnesses)


def decider_line(decider: Decider, framework: Framework) -> str:
    """Return how to distinguish two illnesses."""
    how = in_their_words(decider.how, framework)
    return f"To tell {decider.one} from {decider.other}: {how}."


def _percent(share: float) -> str:
    return f"{min(99, max(1, round(100 * share)))} %"
