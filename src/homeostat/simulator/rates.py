"""Measured rates of a machine: seconds for each unit of work, by name.

The seconds of a stage are a sum of products, rate x units. Sums and not maxima: a decoding step of
0.5 B or 1.5 B on an H200 is within 15 % of launch + weights + cache + arithmetic at batch 1 to 256,
and a training pass within 10 % of launch + arithmetic at 8 thousand to 32 thousand tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

# Units of work by the name of their rate.
Work = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds per unit."""

    # Decoding: a step, a layer of it; bytes of weights, of cached keys and values; arithmetic;
    # the drawing of a token.
    decode_step: float
    decode_layer: float
    weight_byte: float
    cache_byte: float
    decode_flop: float
    decode_token: float
    # Prompts; a completion's share of the host's time while it is sampled.
    prefill_flop: float
    request: float
    # A call of the rewards beyond what they compute; text and journal of a token.
    reward_call: float
    answer_token: float
    # Passes of the trainer: a layer of one micro-batch; a number of the residual stream, with all
    # that is computed of it besides matrix products; arithmetic with and without gradients.
    pass_layer: float
    pass_element: float
    train_flop: float
    score_flop: float
    # An optimizer update, and a parameter of it.
    update: float
    update_param: float
    # A publication, and a byte of it.
    publication: float
    publish_byte: float
    # The rest of a step: metrics, health, journal.
    step: float
    row: float

    def seconds(self, work: Work) -> float:
        """Return the seconds of this work."""
        return sum(getattr(self, name) * units for name, units in work.items())

    def as_dict(self) -> dict[str, float]:
        """Return the rates by name."""
        return asdict(self)

    def scaled(self, *, bandwidth: float, arithmetic: float) -> Rates:
        """Return the rates of a device with so many times the bandwidth and the FLOP/s."""
        changes = {name: getattr(self, name) / bandwidth for name in BY_BANDWIDTH}
        changes |= {name: getattr(self, name) / arithmetic for name in BY_ARITHMETIC}
        return replace(self, **changes)


RATE_NAMES = tuple(field.name for field in fields(Rates))
BY_BANDWIDTH = ("weight_byte", "cache_byte", "update_param", "pass_element")
BY_ARITHMETIC = ("decode_flop", "prefill_flop", "train_flop", "score_flop")
# A pass without gradients has a third of the operations of one with them.
FORWARD_SHARE = 1 / 3


def added(*works: Work) -> dict[str, float]:
    """Return the sum of several pieces of work."""
    found: dict[str, float] = {}
    for work in works:
        for name, units in work.items():
            found[name] = found.get(name, 0.0) + units
    return found
