"""Check the sets that tokens were drawn from, and measure how much of the distributions remained.

groups -> require_kept: every token that was drawn from a cut distribution has its set samples of a
step -> kept_metrics
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.errors import ReplayError
from homeostat.types import Author, RolloutGroup, Sample, Segment


def require_kept(groups: Sequence[RolloutGroup]) -> None:
    """Raise ReplayError if a token was drawn from a cut distribution and its set is not known.

    Which ids the set has is checked when it is replayed (ops/kept_sets.py).
    """
    for group in groups:
        for sample in group.samples:
            if any(KEPT_IDS not in segment.columns for segment in _cut_segments(sample)):
                raise ReplayError(
                    f"{sample.completion.request_id}: its tokens were drawn from a part of the "
                    "vocabulary that the engine did not record, so the trainer's log-probs would "
                    "belong to another distribution. The step was stopped. Sample again with "
                    "engine.type=native, or without rollout.top_p, rollout.top_k and "
                    "rollout.min_p."
                )


def kept_metrics(samples: Sequence[Sample], *, vocabulary: int) -> dict[str, float]:
    """Return how much remained after the cuts, in ids and in probability; nothing without cuts."""
    segments = [segment for sample in samples for segment in _cut_segments(sample)]
    if not segments:
        return {}
    sizes, masses = [], []
    for segment in segments:
        kept, sampled_logp_T = segment.columns[KEPT_IDS], segment.sampled_logp_T
        assert isinstance(kept, Ragged), "columns.py declares it ragged"
        assert sampled_logp_T is not None, "the segment is cut"
        # A token that was drawn from the whole vocabulary has no set.
        sizes.append(np.where(kept.sizes_T == 0, vocabulary, kept.sizes_T))
        masses.append(np.exp(segment.engine_logp_T.astype(np.float64) - sampled_logp_T))
    return {
        "sampling/kept_share": float(np.concatenate(sizes).mean() / vocabulary),
        "sampling/kept_mass": float(np.concatenate(masses).mean()),
    }


def _cut_segments(sample: Sample) -> list[Segment]:
    """Return the segments whose tokens the policy drew from cut distributions."""
    return [
        segment
        for segment in sample.completion.segments
        if segment.author is Author.ENGINE
        and segment.sampled_logp_T is not None
        and len(segment.tokens_T)
    ]
