"""Find settings of algorithm.correction that cannot work together."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.algorithm import AnyPolicyGradient, GspoConfig
from homeostat.config.correction import AnyReject, AnyWeight, CorrectionConfig
from homeostat.errors import Problem

_PLACE = "algorithm.correction"
# Such a geometric mean would need every token of a completion to be off by about half on average.
# Bounds beyond it were meant for tokens or products, and would never have an effect.
_GEOMETRIC = (1 / 1.5, 1.5)


def find_correction_conflicts(algorithm: AnyPolicyGradient) -> Iterator[Problem]:
    """Yield every conflict within algorithm.correction, with its reason and remedy."""
    correction = algorithm.correction
    if correction is None:
        return
    yield from _parts(correction)
    for name in ("weight", "reject"):
        band = getattr(correction, name)
        if band is not None:
            yield from _bounds(band, f"{_PLACE}.{name}")
            yield from _geometric(band, f"{_PLACE}.{name}")
    if isinstance(algorithm, GspoConfig):
        yield from _gspo(correction)


def _parts(correction: CorrectionConfig) -> Iterator[Problem]:
    rest = (correction.reject, correction.veto, correction.off_policy_mask)
    if correction.weight is not None:
        return
    if correction.normalise:
        yield Problem(
            f"{_PLACE}.normalise",
            "it divides the weights by their mean, and algorithm.correction.weight is not set.",
            "Set algorithm.correction.weight, or remove it.",
        )
    if all(part is None for part in rest):
        yield Problem(
            _PLACE,
            "none of its parts is set, so it would correct nothing.",
            "Set algorithm.correction=null to switch it off, or set one of weight, reject, veto "
            "and off_policy_mask.",
        )


def _bounds(band: AnyWeight | AnyReject, place: str) -> Iterator[Problem]:
    if band.low is not None and band.low >= band.high:
        yield Problem(
            f"{place}.low", f"{band.low} is not below high={band.high}.", "Lower it, or raise high."
        )
    elif band.high < 1 or (band.low is not None and band.low > 1):
        name = "high" if band.high < 1 else "low"
        yield Problem(
            f"{place}.{name}",
            "the ratio is 1 where engine and trainer agree, and 1 is outside these bounds.",
            "Choose bounds that include 1.",
        )


def _geometric(band: AnyWeight | AnyReject, place: str) -> Iterator[Problem]:
    if band.type != "geometric":
        return
    lowest, highest = _GEOMETRIC
    for name, beyond in (
        ("low", band.low is not None and band.low < lowest),
        ("high", band.high > highest),
    ):
        if beyond:
            yield Problem(
                f"{place}.{name}",
                f"{getattr(band, name)} is a bound for single tokens: the geometric mean over a "
                "completion stays within a few percent of 1, so it would never reach this bound.",
                "Use for example 0.99 to 1.01, or type: token.",
            )


def _gspo(correction: CorrectionConfig) -> Iterator[Problem]:
    weight, reject = correction.weight, correction.reject
    for name, band in (("weight", weight), ("reject", reject)):
        if band is not None and band.type == "token":
            yield Problem(
                f"{_PLACE}.{name}.type",
                "gspo has one ratio per completion, through which every token gets a gradient, "
                "including tokens that the correction leaves out.",
                "Use type: geometric, or sequence.",
            )
