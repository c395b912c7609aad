"""Samples groups of completions from an engine, and yields each as soon as it is whole.

    Draw (a prompt and its name) ... -> requests -> engine -> (place, completions of one group) ...

The requests of all groups are submitted at once, so that the batch of the engine does not depend on
which groups finish first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from homeostat.config.moe import ReplayMode
from homeostat.rollout.engine import Engine, Request, Sampling, stream
from homeostat.types import Completion, Prompt

# Called with the number of completions that are finished and the number of all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt that a group of samples answers.

    `name` is the name of the group. Its requests are named `<name>/<sample>`, which is the key of
    their noise, and they share the computation of the prompt.
    """

    name: str
    prompt: Prompt


class Sampler:
    """Samples from one engine. `stall_s`: the longest time without a finished request."""

    def __init__(self, engine: Engine, *, seed: int, stall_s: float) -> None:
        self.engine = engine
        self.seed = seed
        self.stall_s = stall_s

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next group is sampled with."""
        return self.engine.policy_version

    def sample(
        self,
        draws: Sequence[Draw],
        *,
        sampling: Sampling,
        num_samples: int,
        deadline_s: float | None = None,
        progress: Progress = lambda done, total: None,
        router_replay: ReplayMode = "off",
        kept_ids: bool = False,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield the place of a group among `draws` and its completions, as groups are finished.

        `router_replay` selects what the engine records of the tokens' routes. With `kept_ids` it
        returns the sets that tokens were drawn from. Raises EngineError if the engine stalls or
        cannot continue.
        """
        requests = self.requests(
            draws,
            sampling=sampling,
            num_samples=num_samples,
            deadline_s=deadline_s,
            router_replay=router_replay,
            kept_ids=kept_ids,
        )
        groups = SampledGroups(draws, num_samples=num_samples)
        for done, completion in enumerate(self._stream(requests)):
            progress(done + 1, len(requests))
            whole = groups.take(completion)
            if whole is not None:
                yield whole

    def requests(
        self,
        draws: Sequence[Draw],
        *,
        sampling: Sampling,
        num_samples: int,
        deadline_s: float | None = None,
        router_replay: ReplayMode = "off",
        kept_ids: bool = False,
    ) -> list[Request]:
        """Return the requests of some groups, in the order of drawing."""
        return [
            Request(
                id=f"{draw.name}/{sample}",
                tokens_T=draw.prompt.tokens_T,
                sampling=sampling,
                seed=self.seed,
                session_key=draw.name,
                deadline_s=deadline_s,
                routed_experts=router_replay != "off",
                routed_weights=router_replay == "weights",
                kept_ids=kept_ids,
            )
            for draw in draws
            for sample in range(num_samples)
        ]

    def _stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        return stream(self.engine, requests, timeout_s=self.stall_s)


class SampledGroups:
    """Collects completions, which arrive in any order, into groups."""

    def __init__(self, draws: Sequence[Draw], *, num_samples: int) -> None:
        self.num_samples = num_samples
        self._places = {
            f"{draw.name}/{sample}": (place, sample)
            for place, draw in enumerate(draws)
            for sample in range(num_samples)
        }
        assert len(self._places) == len(draws) * num_samples, "two groups have the same name"
        self._groups: list[dict[int, Completion]] = [{} for _ in draws]

    def take(self, completion: Completion) -> tuple[int, list[Completion]] | None:
        """Add a completion. Returns the place and the completions of its group, if that is
        complete.
        """
        place, sample = self._places[completion.request_id]
        group = self._groups[place]
        group[sample] = completion
        if len(group) < self.num_samples:
            return None
        return place, [group[number] for number in range(self.num_samples)]

    def finished(self) -> Iterator[tuple[int, Completion]]:
        """Yield the completions so far, each with the place of its group."""
        for place, group in enumerate(self._groups):
            for completion in list(group.values()):
                yield place, completion
