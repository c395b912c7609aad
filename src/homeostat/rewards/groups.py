"""The groups that go into a RewardPool, and the scored groups that come out."""

from __future__ import annotations

from dataclasses import dataclass, field

from homeostat.types import Prompt

# Types that a table can show.
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class UnscoredGroup:
    """A prompt with its sampled completions, as text and as tokens."""

    prompt: Prompt
    texts: list[str]
    completion_ids: list[list[int]]

    def __post_init__(self) -> None:
        assert len(self.texts) == len(self.completion_ids), (
            f"prompt {self.prompt.prompt_id}: {len(self.texts)} texts, "
            f"{len(self.completion_ids)} lists of tokens"
        )


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The values that every reward gave to every sample of a group.

    `values[label]` has one entry per sample. None means that the reward does not apply to the
    sample or that it failed; `failed[label]` holds the indices of the samples on which it failed.
    Values that functions passed to TRL's log_metric and log_extra are under `<label>/<name>`.
    """

    values: dict[str, list[float | None]] = field(default_factory=dict)
    failed: dict[str, frozenset[int]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Scalar]] = field(default_factory=dict)

    def failed_on(self, sample: int) -> frozenset[str]:
        """Return the rewards that failed on a sample."""
        return frozenset(label for label, samples in self.failed.items() if sample in samples)
