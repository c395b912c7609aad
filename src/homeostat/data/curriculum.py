"""Draw prompts by source, by difficulty, and again after they were failed or solved.

    step's count -> replayed prompts -> the rest by source (data/mixing.py)
                 -> inside a source: its epoch's order, or by estimated solve rate

The estimate of a prompt is an exponential average of the solved shares of its groups. By difficulty
a prompt is drawn with the probability

    explore / N + (1 - explore) * weight(rate) / sum of all weights

without replacement inside a step (Efraimidis and Spirakis 2006: the largest log(u) / p win), so
every prompt keeps a chance. Estimates change after a step only, with all of its groups, dropped
ones too; the noise is a function of (seed, step, round, source). So the draws of a step depend on
what the checkpoint holds and on nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.config.curriculum import CurriculumConfig, DifficultyConfig, ReplayConfig
from homeostat.data.mixing import Allotment, EpochOrder, Mixture
from homeostat.data.prompts import Outcome
from homeostat.errors import DataError

# Streams of noise: no two uses share one.
_BY_DIFFICULTY, _REPLAYED = 3, 4


class SolveRates:
    """The solve rate of every prompt, from `count` groups, the newest of step `last_step`.

    `rate` is the average over the groups, `newest` the solved share of the newest one, `replays`
    how often the prompt was drawn again.
    """

    # A checkpoint holds the entries of these arrays for prompts that were sampled.
    COLUMNS = ("rate", "newest", "count", "last_step", "replays")

    def __init__(self, num_prompts: int, *, prior: float, memory: float) -> None:
        self.memory = memory
        self.rate = np.full(num_prompts, prior)
        self.newest = np.zeros(num_prompts)
        self.count = np.zeros(num_prompts, dtype=np.int64)
        self.last_step = np.zeros(num_prompts, dtype=np.int64)
        self.replays = np.zeros(num_prompts, dtype=np.int64)

    def learn(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Take in the groups of a step; one without a judged sample changes nothing."""
        for outcome in outcomes:
            if outcome.rate is None:
                continue
            number, known = outcome.prompt_id, self.count[outcome.prompt_id] > 0
            old, memory = self.rate[number], self.memory if known else 0.0
            self.rate[number] = memory * old + (1.0 - memory) * outcome.rate
            self.newest[number] = outcome.rate
            self.count[number] += 1
            self.last_step[number] = step

    def state(self) -> dict[str, list[Any]]:
        """Return the arrays of the prompts that are known, as JSON."""
        known = np.flatnonzero((self.count > 0) | (self.replays > 0))
        columns = {name: getattr(self, name)[known].tolist() for name in self.COLUMNS}
        return {"prompts": known.tolist(), **columns}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take in what `state` returned. Raises KeyError, TypeError, ValueError or IndexError."""
        known = np.array(state["prompts"], dtype=np.int64)
        if len(known) and (known.min() < 0 or known.max() >= len(self.count)):
            raise IndexError(f"prompt {int(known.max())} of {len(self.count)}")
        for name in self.COLUMNS:
            column = getattr(self, name)
            column[known] = np.array(state[name], dtype=column.dtype)


class CurriculumDraws:
    """The order of prompts of a run with weighted sources, a curriculum, or both."""

    def __init__(
        self,
        orders: Sequence[EpochOrder],
        *,
        mixture: Mixture | None,
        curriculum: CurriculumConfig | None,
        num_prompts: int,
        seed: int,
        fingerprint: str,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`num_prompts` counts all prompts of the set, also those that are held out."""
        assert len(orders) == (1 if mixture is None else len(mixture.names)), len(orders)
        self._orders, self._seed = orders, seed
        self._allotment = None if mixture is None else Allotment(mixture)
        self._difficulty = None if curriculum is None else curriculum.difficulty
        self._replay = None if curriculum is None else curriculum.replay
        rules = self._difficulty or DifficultyConfig()
        self._rates = SolveRates(num_prompts, prior=rules.prior, memory=rules.memory)
        self._is_tracked = curriculum is not None
        self._cursors = [0] * len(orders)
        self._num_drawn = 0
        # The step that is being drawn, and its prompts so far.
        self._step, self._drawn, self._num_replayed = 0, list[int](), 0
        self._fingerprint = self._hash(fingerprint, mixture, curriculum)
        if state is not None:
            self._resume_from(state)

    def draw(self, count: int, *, step: int, round: int) -> list[int]:
        """Return the prompts of a sampling round; replayed ones only come in the first."""
        if step != self._step:
            self._step, self._drawn, self._num_replayed = step, [], 0
        again = self._again(count, step) if round == 0 and self._replay is not None else []
        self._num_replayed += len(again)
        self._drawn += again
        counts = self._split(count - len(again), step)
        fresh = []
        for source, num in enumerate(counts):
            fresh += self._of_source(source, num, step=step, round=round)
        self._num_drawn += count
        return [*again, *fresh]

    def learn(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Take in how often the prompts of a step were solved, in the order of their numbers."""
        if self._is_tracked:
            self._rates.learn(step, outcomes)

    def metrics(self) -> dict[str, float]:
        """Return the estimates after the newest step, and what it drew."""
        if not self._is_tracked:
            return {}
        ids = np.concatenate([order.row_ids for order in self._orders])
        seen = ids[self._rates.count[ids] > 0]
        found = {"curriculum/seen_share": len(seen) / len(ids)}
        if len(seen):
            found["curriculum/solve_rate"] = float(self._rates.rate[seen].mean())
        if self._drawn:
            found["curriculum/drawn_rate"] = float(self._rates.rate[self._drawn].mean())
            found["curriculum/replayed_share"] = self._num_replayed / len(self._drawn)
        return found

    @property
    def epoch(self) -> float:
        """Return the number of prompts handed out over the number of prompts."""
        return self._num_drawn / sum(len(order.row_ids) for order in self._orders)

    def state(self) -> dict[str, Any]:
        credit = [] if self._allotment is None else self._allotment.credit.tolist()
        return {
            "data": self._fingerprint,
            "drawn": self._num_drawn,
            "cursors": list(self._cursors),
            "credit": credit,
            "rates": self._rates.state(),
        }

    def _split(self, count: int, step: int) -> list[int]:
        return [count] if self._allotment is None else self._allotment.split(count, step=step)

    def _of_source(self, source: int, count: int, *, step: int, round: int) -> list[int]:
        order = self._orders[source]
        if self._difficulty is None:
            taken = order.span(self._cursors[source], count)
        else:
            key = (self._seed, _BY_DIFFICULTY, step, round, source)
            taken = self._by_difficulty(self._difficulty, order.row_ids, count, key=key)
        self._cursors[source] += count
        self._drawn += taken
        return taken

    def _by_difficulty(
        self, rules: DifficultyConfig, ids: IntArray, count: int, *, key: tuple[int, ...]
    ) -> list[int]:
        """Draw without replacement, first from the prompts that the step does not have yet."""
        chance = self._chances(rules, ids)
        ranks = np.argsort(-np.log(_uniform(len(ids), key)) / chance, kind="stable")
        is_drawn = np.isin(ids[ranks], self._drawn)
        in_order = [*ids[ranks[~is_drawn]].tolist(), *ids[ranks[is_drawn]].tolist()]
        # More than there are: some prompts come twice, as at the end of an epoch.
        return [in_order[place % len(in_order)] for place in range(count)]

    def _chances(self, rules: DifficultyConfig, ids: IntArray) -> FloatArray64:
        weights = np.array([rules.prefer.weight(rate) for rate in self._rates.rate[ids].tolist()])
        total = weights.sum()
        if total <= 0:
            return np.full(len(ids), 1.0 / len(ids))
        return rules.explore / len(ids) + (1.0 - rules.explore) * weights / total

    def _again(self, count: int, step: int) -> list[int]:
        """Return the prompts that are replayed in a step."""
        assert self._replay is not None, "asked for with replay only"
        pools = [self._due(order.row_ids, self._replay, step) for order in self._orders]
        pool = np.concatenate(pools)
        # Whole prompts that the share has earned: a share of less than one comes now and then.
        earned = count * self._replay.share
        quota = math.floor(step * earned) - math.floor((step - 1) * earned)
        noise = _uniform(len(pool), (self._seed, _REPLAYED, step))
        chosen = pool[np.argsort(noise, kind="stable")][:quota]
        self._rates.replays[chosen] += 1
        return chosen.tolist()

    def _due(self, ids: IntArray, rules: ReplayConfig, step: int) -> IntArray:
        rates = self._rates
        wanted = 0.0 if rules.of == "failed" else 1.0
        is_due = (
            (rates.count[ids] > 0)
            & (rates.newest[ids] == wanted)
            & (rates.replays[ids] < rules.max_times)
            & (step - rates.last_step[ids] <= rules.max_age_steps)
        )
        return ids[is_due]

    def _hash(
        self, fingerprint: str, mixture: Mixture | None, curriculum: CurriculumConfig | None
    ) -> str:
        """Return a digest of everything that decides which prompts a step has."""
        settings = "" if curriculum is None else curriculum.model_dump_json()
        weights = "" if mixture is None else mixture.description
        digest = hashlib.sha256(f"{fingerprint} {self._seed} {settings} {weights}".encode())
        for order in self._orders:
            digest.update(f"{order.shuffle} {len(order.row_ids)} ".encode())
            digest.update(order.row_ids.tobytes())
        return digest.hexdigest()

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        if state.get("data") != self._fingerprint:
            raise DataError(
                "the prompts are not those that the run started with, according to the "
                "checkpoint's state.json (or the weights of data.train, rollout.curriculum, "
                "data.shuffle or seed changed), so it cannot be continued where it stopped. "
                "Restore the data files and settings, or start a new run with another `name`."
            )
        try:
            self._num_drawn = int(state["drawn"])
            self._cursors = [int(cursor) for cursor in state["cursors"]]
            if len(self._cursors) != len(self._orders):
                raise ValueError(f"{len(self._cursors)} cursors of {len(self._orders)} sources")
            if self._allotment is not None:
                if len(state["credit"]) != len(self._orders):
                    raise ValueError(
                        f"{len(state['credit'])} claims of {len(self._orders)} sources"
                    )
                self._allotment = Allotment(self._allotment.mixture, state["credit"])
            self._rates.restore(state["rates"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"the checkpoint's state.json: data is damaged: {error}") from None


def _uniform(count: int, key: tuple[int, ...]) -> FloatArray64:
    """Return numbers in (0, 1) that depend on the key alone, on any machine."""
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
