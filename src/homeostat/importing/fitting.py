"""Make a recipe pass its own checks: leave out what they refuse, and say why."""

from __future__ import annotations

from dataclasses import replace

from homeostat.config.loading.load import build_config
from homeostat.config.loading.tree import has, parts, without
from homeostat.errors import ConfigError, Problem
from homeostat.importing.draft import Draft
from homeostat.importing.entries import Status

# Without these there is no recipe: a problem with one is the user's to solve.
_KEPT = ("name", "model", "model.path", "data", "data.train", "algorithm", "algorithm.type")
_MAX_ROUNDS = 12


def fit(draft: Draft) -> list[str]:
    """Leave out keys that cannot work; return the problems that are left."""
    for _ in range(_MAX_ROUNDS):
        try:
            build_config(draft.recipe, [], file=None)
        except ConfigError as error:
            refused = [one for one in error.problems if _may_go(draft, one)]
            if not refused:
                return [one.render() for one in error.problems]
            for problem in refused:
                _leave_out(draft, problem)
        else:
            return []
    return ["the recipe has settings that do not go together: see homeostat check"]


def _may_go(draft: Draft, problem: Problem) -> bool:
    place = problem.place
    is_kept = place in _KEPT or place.startswith("data.train.")
    return bool(place) and not is_kept and has(draft.recipe, place)


def _leave_out(draft: Draft, problem: Problem) -> None:
    """Remove a key, and turn the entries of its settings into approximations."""
    draft.recipe = without(draft.recipe, [parts(problem.place)])
    why = f"left out: {problem.message}"
    for index, entry in enumerate(draft.entries):
        is_it = entry.key == problem.place or entry.key.startswith(f"{problem.place}.")
        if is_it and entry.status in (Status.TAKEN, Status.APPROXIMATED):
            draft.entries[index] = replace(
                entry, status=Status.APPROXIMATED, value=None, key="", why=why
            )
