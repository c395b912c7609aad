"""Parse `--map NAME=METRIC`, with which the user states what a name in the log means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from homeostat.errors import HomeostatError
from homeostat.health.names import FOREIGN
from homeostat.observe.names import CATALOGUE, describe

# The metrics that most rules read.
MOST_READ = (
    "train/loss", "eval/loss", "grad_norm", "learning_rate", "reward", "reward_std", "kl",
    "entropy", "completions/mean_length",
)  # fmt: skip


def given_names(words: Sequence[str]) -> dict[str, str]:
    """Return the log's name -> our name, from words such as "policy_obj=train/loss".

    Raises HomeostatError if a word has another form, or names no metric of ours.
    """
    found: dict[str, str] = {}
    for word in words:
        # A name in a log may contain an equals sign; none of ours does.
        name, sign, ours = (part.strip() for part in word.rpartition("="))
        if not (name and sign and ours):
            raise HomeostatError(
                f"--map {word}: give the log's name, an equals sign and the name of a metric, "
                "such as policy_obj=train/loss."
            )
        if describe(ours) is None and ours not in FOREIGN:
            raise HomeostatError(f"--map {word}: {_unknown(ours)}")
        if ours in found.values():
            raise HomeostatError(f"--map {word}: another name is mapped to {ours} already.")
        if name in found:
            raise HomeostatError(f"--map {word}: {name} is mapped to {found[name]} already.")
        found[name] = ours
    return found


def _unknown(ours: str) -> str:
    known = [*(info.name for info in CATALOGUE), *FOREIGN]
    near = difflib.get_close_matches(ours, known, n=3)
    meant = f"Did you mean {' or '.join(near)}?" if near else f"Some are {', '.join(MOST_READ)}."
    return f"no metric is called {ours!r}. {meant} docs/reference/metrics.md lists all of them."
