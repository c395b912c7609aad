"""Compares the settings that saved rollouts were sampled with to those of a run.

A saved log-prob is valid only for one temperature and one vocabulary. Where a completion was cut
off depends on its length limit and its stop conditions. A journal notes these beside every group. A
run that takes its rollouts from another one (debug.rollouts) must agree with them: at another
temperature the trainer's log-probs would be compared with numbers that mean something else.

The weights may differ: the difference between the trainer and the sampled log-probs is measured in
every step (sampling/*) and corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.rollout.engine import Sampling

# Name of the fact -> the setting to change.
_SETTINGS = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "max_new_tokens": "rollout.max_new_tokens",
    "stop_ids": "rollout.stop_token_ids and the tokenizer's end of turn",
    "stop_strings": "rollout.stop",
    "vocabulary": "model.tokenizer",
}


def sampled_with(sampling: Sampling, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the settings in the form that JSON stores."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_ids": sorted(sampling.stop_ids),
        "stop_strings": list(sampling.stop_strings),
        "vocabulary": tokenizer.vocabulary_digest(),
    }


def require_same_sampling(
    stored: Mapping[str, Any] | None, now: Mapping[str, Any], *, folder: Path
) -> None:
    """Raise DataError if rollouts were sampled with other settings than those of this run."""
    if stored is None:
        raise DataError(
            f"debug.rollouts: the rollouts in {folder} do not say at which temperature and with "
            "which tokenizer they were sampled: an earlier version wrote them. Sample them anew "
            "(debug.mode=rollout_only)."
        )
    # Journals of earlier versions were sampled without min_p.
    stored = {"min_p": 0.0, **stored}
    other = [name for name in now if stored.get(name) != now[name]]
    if not other:
        return
    name = other[0]
    values = f" ({stored.get(name)} then, {now[name]} now)" if name != "vocabulary" else ""
    raise DataError(
        f"debug.rollouts: the rollouts in {folder} were sampled with another {name}{values}, so "
        "that their log-probs and ends do not mean here what they meant there. Set "
        f"{_SETTINGS[name]} to what that run had, or sample anew."
    )
