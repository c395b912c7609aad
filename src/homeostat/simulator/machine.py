"""Machines that a plan can be made for: memory, links and rates, read from TOML files.

A file gives rates as they are measured (bytes or FLOP per second, seconds per call) and says where
each group of figures comes from. A file may name another as its `base` and the ratios of bandwidth
and arithmetic to it: then the rates are those measured on the base, scaled.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeostat.errors import PlanError
from homeostat.simulator.rates import RATE_NAMES, Rates

FOLDER = Path(__file__).parent / "machines"
_SIZES = (
    "memory_bytes",
    "host_bytes",
    "node_gpus",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "collective_s",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of GPU in nodes of `node_gpus`, and what was measured on it."""

    name: str
    memory_bytes: float
    # Host memory of a whole node.
    host_bytes: float
    node_gpus: int
    # Of one GPU in one direction: to GPUs of its node, and to other nodes.
    link_bytes_per_s: float
    network_bytes_per_s: float
    # Latency of one collective.
    collective_s: float
    rates: Rates
    # Where the figures come from, by group.
    sources: tuple[tuple[str, str], ...] = ()
    dtype_bytes: int = 2
    # How far a rate may be off, as a share of it, where that is not 1: for fits.
    uncertainty: tuple[tuple[str, float], ...] = ()


def machine_names() -> list[str]:
    """Return the names of the machines that come with homeostat."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load_machine(name: str) -> Machine:
    """Return a machine by its name, or from a TOML file."""
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not file.is_file():
        known = ", ".join(machine_names())
        raise PlanError(
            f"There is no machine {name!r}. Known are {known}; or give a .toml file with the same "
            "keys as theirs."
        )
    try:
        return _machine(tomllib.loads(file.read_text(encoding="utf-8")), name=file.stem)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise PlanError(f"{file.name} does not describe a machine: {error!r}.") from error


def _machine(raw: Mapping[str, Any], *, name: str) -> Machine:
    base = raw.get("base")
    if base is None:
        rates = read_rates(raw["rates"])
    else:
        factors = raw["scale"]
        measured = load_machine(base).rates
        rates = measured.scaled(bandwidth=factors["bandwidth"], arithmetic=factors["arithmetic"])
    sizes = {key: raw[key] for key in _SIZES}
    return Machine(
        name=name,
        rates=rates,
        sources=tuple(raw.get("sources", {}).items()),
        dtype_bytes=raw.get("dtype_bytes", 2),
        uncertainty=tuple(raw.get("uncertainty", {}).items()),
        **sizes,
    )


def read_rates(raw: Mapping[str, float]) -> Rates:
    """Return the rates of a table: `<name>_per_s` is inverted, `<name>_s` is taken as it is."""
    found: dict[str, float] = {}
    for key, value in raw.items():
        if key.endswith("s_per_s"):
            found[key.removesuffix("s_per_s")] = 1.0 / value
        else:
            found[key.removesuffix("_s")] = float(value)
    missing = sorted(set(RATE_NAMES) - found.keys())
    other = sorted(found.keys() - set(RATE_NAMES))
    if missing or other:
        raise KeyError(f"rates: missing {missing}, unknown {other}")
    return Rates(**found)
