"""Gathers rollouts for asynchronous RL: groups of later steps are sampled while the trainer trains.

    admit(step + max_staleness) -> draw -> engine, in the background -> rewards -> buffer
    collect(step)               -> wait for the step's groups -> journal -> totals -> filters

After each trained step, the groups of one more step are admitted. Groups are admitted and trained
on in the order in which they were drawn. A step waits for the slowest of its groups; a slow group
is never dropped or overtaken. Therefore the training data do not depend on which group finished
first, and no token is more than max_staleness versions behind the weights that train on it.

If filters drop groups of a step, other groups are sampled for it when the step is collected, with
the newest weights.

A checkpoint holds the admitted groups that are not trained on yet (`save`), as they were when the
weights last changed: finished completions, and the tokens of interrupted ones (rollout.partial). A
resumed run scores the finished completions and continues the interrupted ones.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from homeostat.errors import CheckpointError
from homeostat.json_text import parse_json
from homeostat.rollout.background import Background
from homeostat.rollout.collect import Collector, StepRollouts, Tell
from homeostat.rollout.engine import Request
from homeostat.rollout.group_arrays import decode, encode
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.keys import GroupKey
from homeostat.rollout.sampler import Draw, SampledGroups, Sampler
from homeostat.rollout.scorer import PendingGroup, Scorer
from homeostat.types import Completion, RolloutGroup, Sample, StopReason

BUFFER = "buffer.safetensors"


class BackgroundSampler(Sampler):
    """Samples from an engine that is busy in the background."""

    def __init__(self, background: Background, *, seed: int) -> None:
        super().__init__(background.engine, seed=seed, stall_s=background.stall_s)
        self.background = background

    def _stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        finished: deque[Completion] = deque()
        self.background.submit(requests, finished.append)
        for _ in requests:
            self.background.wait(lambda: bool(finished))
            yield finished.popleft()


class Batch:
    """Groups that are sampled in the background; each is scored as soon as its samples are
    finished.

    `known` maps request ids to completions that an earlier process saved.
    """

    def __init__(
        self,
        draws: Sequence[Draw],
        requests: Sequence[Request],
        *,
        background: Background,
        scorer: Scorer,
        step: int,
        evaluates: bool = False,
        known: Mapping[str, Completion] | None = None,
    ) -> None:
        self.draws = draws
        self.requests = requests
        self.background = background
        self.scorer = scorer
        self.step = step
        self.evaluates = evaluates
        self._groups = SampledGroups(draws, num_samples=len(requests) // len(draws))
        self._pending: dict[int, PendingGroup] = {}
        known = known or {}
        whole = {id: one for id, one in known.items() if one.stop_reason is not StopReason.ABORTED}
        for request in requests:
            if request.id in whole:
                self._take(whole[request.id])
        left = [_continued(one, known) for one in requests if one.id not in whole]
        background.submit(left, self._take, whole=evaluates)

    @property
    def num_whole(self) -> int:
        """Return the number of groups whose samples are all finished."""
        return len(self._pending)

    def sampled(self) -> list[PendingGroup]:
        """Wait until all groups are sampled, and return them in the order of drawing."""
        self.background.wait(lambda: len(self._pending) == len(self.draws))
        return [self._pending[place] for place in range(len(self.draws))]

    def so_far(self) -> list[RolloutGroup]:
        """Return the completions so far, without scores. Unfinished ones have the stop reason
        ABORTED.
        """
        groups: dict[int, list[Completion]] = {}
        found = dict.fromkeys(one.request_id for _, one in self._groups.finished())
        for place, completion in self._groups.finished():
            groups.setdefault(place, []).append(completion)
        size = len(self.requests) // len(self.draws)
        for number, request in enumerate(self.requests):
            now = None if request.id in found else self.background.begun(request.id)
            if now is not None and now.begun:
                cut_off = Completion(now.id, now.begun, StopReason.ABORTED, now.prompt_columns)
                groups.setdefault(number // size, []).append(cut_off)
        return [
            RolloutGroup(self.draws[place].prompt, tuple(map(_unscored, groups[place])))
            for place in sorted(groups)
        ]

    def _take(self, completion: Completion) -> None:
        whole = self._groups.take(completion)
        if whole is not None:
            place, completions = whole
            prompt = self.draws[place].prompt
            self._pending[place] = self.scorer.begin(
                prompt, completions, step=self.step, evaluates=self.evaluates
            )


@dataclass(slots=True)
class Admitted:
    """The first round of a step that is not trained on yet, newly sampled or from the journal.

    `facts` holds what its sampling depends on: the weight version at admission, and the origin.
    """

    keys: dict[GroupKey, int]
    facts: dict[str, Any]
    batch: Batch | None = None
    records: list[GroupRecord] = field(default_factory=list)


class AheadCollector(Collector):
    """Gathers the groups of a step while those of later steps are being sampled.

    Its sampler is a BackgroundSampler.
    """

    # The content of a checkpoint about the admitted groups.
    _kept: Sequence[RolloutGroup] = ()

    @cached_property
    def admitted(self) -> dict[int, Admitted]:
        """Return the rounds that were admitted and not trained on yet, by their step."""
        return {}

    @property
    def background(self) -> Background:
        assert isinstance(self.sampler, BackgroundSampler), "sampling ahead needs a thread"
        return self.sampler.background

    def admit(self, step: int) -> None:
        """Draw the prompts of a step and submit them for sampling, unless this was done already."""
        if step in self.admitted:
            return
        count = self.rollout.prompts_per_step
        self._begin(step, Admitted(self._draw(step, 0, count), self._facts()), known={})

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Yield the engine without in-flight requests, for loading the next weights."""
        with self.background.quiesced():
            batches = [one.batch for one in self.admitted.values() if one.batch is not None]
            self._kept = [group for batch in batches for group in batch.so_far()]
            yield

    def fill(self) -> dict[str, float]:
        """Return how many groups are finished, and how many are still being sampled."""
        size = {step: len(one.keys) for step, one in self.admitted.items()}
        whole = sum(
            size[step] if one.batch is None else one.batch.num_whole
            for step, one in self.admitted.items()
        )
        return {
            "rollout/buffer_groups": float(whole),
            "rollout/groups_in_flight": float(sum(size.values()) - whole),
        }

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Return which groups are admitted, by the step that trains on them, as JSON."""
        return {
            str(step): {"prompts": list(one.keys.values()), "facts": one.facts}
            for step, one in self.admitted.items()
        }

    @property
    def state_bytes(self) -> int:
        return sum(array.nbytes for array in encode(self._kept)[1].values())

    def save(self, folder: Path) -> None:
        """Write the completions of the admitted groups into a checkpoint."""
        legend, arrays = encode(self._kept)
        save_file(arrays, folder / BUFFER, metadata={"legend": json.dumps(legend)})

    def restore(self, state: Mapping[str, Any], file: Path) -> None:
        """Admit the groups of a checkpoint again. Raises CheckpointError, DataError."""
        known = self._read(file)
        for text, one in state.items():
            try:
                step, prompts, facts = int(text), map(int, one["prompts"]), dict(one["facts"])
                keys = {GroupKey(step, 0, place): id for place, id in enumerate(prompts)}
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{file.parent}/state.json: the admitted groups cannot be read: {error}."
                ) from None
            self._begin(step, Admitted(keys, facts), known=known)
        # A checkpoint may be saved again before the weights change.
        batches = [one.batch for one in self.admitted.values() if one.batch is not None]
        self._kept = [group for batch in batches for group in batch.so_far()]

    def _read(self, file: Path) -> dict[str, Completion]:
        try:
            with safe_open(file, framework="np") as opened:
                legend = parse_json((opened.metadata() or {})["legend"])
            arrays = load_file(file)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}): it holds the sampled groups that the run had "
                "not trained on. Go back to another checkpoint by checkpoint.load_step."
            ) from None
        groups = decode(legend, arrays, self.prompts.asked, place=file)
        found = [sample.completion for group in groups for sample in group.samples]
        return {completion.request_id: completion for completion in found}

    # Rounds.

    def _begin(self, step: int, one: Admitted, *, known: Mapping[str, Completion]) -> None:
        replayed = self._replayed(one.keys, one.facts)
        if replayed is not None:
            one.records = replayed
        else:
            one.batch = self._batch(step, one.keys, known)
        self.admitted[step] = one

    def _batch(
        self, step: int, keys: Mapping[GroupKey, int], known: Mapping[str, Completion]
    ) -> Batch:
        assert self.sampler is not None, "sampling needs an engine"
        draws = [Draw(str(key), self.prompts.asked(id)) for key, id in keys.items()]
        requests = self.sampler.requests(
            draws,
            sampling=self.sampling,
            num_samples=self.rollout.samples_per_prompt,
            deadline_s=self.rollout.deadline_s,
            router_replay=self.moe.router_replay,
            kept_ids=self.sampling.is_cut,
        )
        return Batch(
            draws,
            requests,
            background=self.background,
            scorer=self.scorer,
            step=step,
            known=known,
        )

    def _round(self, step: int, count: int, found: StepRollouts, tell: Tell) -> list[GroupRecord]:
        if found.num_rounds > 0:
            return super()._round(step, count, found, tell)
        self.admit(step)
        one = self.admitted[step]
        if one.batch is None:
            found.num_replayed += 1
            records = one.records
        else:
            started = time.perf_counter()
            tell("sampling", one.batch.num_whole, len(one.keys))
            pending = one.batch.sampled()
            found.generate_s += time.perf_counter() - started
            records = self._scored(one.keys, pending, one.facts, found, tell)
        del self.admitted[step]
        return records


def _continued(request: Request, known: Mapping[str, Completion]) -> Request:
    """Return the request, continued from its saved tokens if there are any."""
    saved = known.get(request.id)
    if saved is None:
        return request
    return replace(request, begun=saved.segments, prompt_columns=saved.prompt_columns)


def _unscored(completion: Completion) -> Sample:
    return Sample(completion, "", {}, None)
