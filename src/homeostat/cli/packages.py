"""The packages of `homeostat[train]`: doctor, explain, rules, env and import work without them."""

from __future__ import annotations

from importlib.util import find_spec

from homeostat.errors import MissingDependencyError

TRAINING = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "jinja2")


def missing_for_training() -> MissingDependencyError | None:
    """Return the error of the first package that training lacks; None if it has all of them."""
    name = next((name for name in TRAINING if find_spec(name) is None), None)
    return None if name is None else missing(name, needed_for="Checking them")


def missing(module: str | None, *, needed_for: str) -> MissingDependencyError | None:
    """Return the error for a module of these packages; None if it belongs to none of them."""
    package = (module or "").partition(".")[0]
    if package not in TRAINING:
        return None
    return MissingDependencyError.of(package, extra="train", needed_for=needed_for)
