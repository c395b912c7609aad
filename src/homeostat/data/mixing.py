"""Mix sources by weight: how many rows of a step come from each source, and which.

    weights of the step -> Allotment: rows per source -> EpochOrder of each source: row ids

Nothing is drawn at random: a source gets the whole rows that its weight has earned so far, and the
rest of its claim is carried over to the next step. So the counts of any number of steps differ from
what the weights ask for by about one row per source at most, however long the run is. Inside a
source every row comes once an epoch, as without weights; each source has its own epochs.

All of it depends only on the settings, the seed and the rows that were taken before, so a resumed
run takes the same rows, over any number of ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.config.curriculum import WeightSchedule, weight_at
from homeostat.config.data import DataConfig
from homeostat.data.prepare import shuffled
from homeostat.errors import DataError

# Number of steps from which the mean share of a source is computed.
MAX_STEPS_SHOWN = 200


class EpochOrder:
    """The rows of one source, epoch after epoch. An order depends only on (key, epoch)."""

    def __init__(self, row_ids: IntArray, *, key: tuple[int, ...], shuffle: bool) -> None:
        assert len(row_ids) > 0, "no rows to take"
        self.row_ids = np.asarray(row_ids, dtype=np.int64)
        self._key, self.shuffle = key, shuffle
        self._cached: tuple[int, IntArray] | None = None

    def span(self, start: int, count: int) -> list[int]:
        """Return `count` rows from a place on, counted over all epochs."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, place = divmod(start + len(taken), len(self.row_ids))
            taken += self._order(epoch)[place : place + count - len(taken)].tolist()
        return taken

    def _order(self, epoch: int) -> IntArray:
        if not self.shuffle:
            return self.row_ids
        cached = self._cached
        if cached is None or cached[0] != epoch:
            # Places come in order, and shuffling a large data set takes time: keep one epoch.
            order = self.row_ids[shuffled(len(self.row_ids), (*self._key, epoch))]
            self._cached = cached = (epoch, order)
        return cached[1]


class Mixture:
    """The weights of the training sources, with the names that metrics give them."""

    def __init__(self, names: Sequence[str], weights: Sequence[float | WeightSchedule]) -> None:
        assert len(names) == len(weights), f"{len(names)} names, {len(weights)} weights"
        self.names, self.weights = tuple(names), tuple(weights)

    @classmethod
    def of(cls, data: DataConfig) -> Mixture | None:
        """Return the mixture of a recipe; None if its sources have no weights."""
        if not data.is_mixed:
            return None
        weights = [source.weight for source in data.train if source.weight is not None]
        return cls(data.source_names, weights)

    @property
    def description(self) -> str:
        """Return the weights as text, for the fingerprint of what a run takes its rows by."""
        return json.dumps(
            [w.model_dump() if isinstance(w, WeightSchedule) else w for w in self.weights]
        )

    def shares(self, step: int) -> FloatArray64:
        """Return the share of each source in a step. At least one is above 0."""
        weights = np.array([weight_at(weight, step) for weight in self.weights], dtype=np.float64)
        return weights / weights.sum()


class Allotment:
    """Share out rows by weight. `credit` is what each source has earned and not been given."""

    def __init__(self, mixture: Mixture, credit: Sequence[float] | None = None) -> None:
        self.mixture = mixture
        num = len(mixture.names)
        self.credit = np.zeros(num) if credit is None else np.array(credit, dtype=np.float64)
        assert len(self.credit) == num, f"{len(self.credit)} claims of {num} sources"

    def split(self, count: int, *, step: int) -> list[int]:
        """Return the number of rows of each source."""
        shares = self.mixture.shares(step)
        has_part = shares > 0
        # A source that is left out now keeps no claim to rows of later steps.
        self.credit[~has_part] = 0.0
        counts = np.floor(count * shares).astype(np.int64)
        self.credit += count * shares - counts
        for _ in range(count - int(counts.sum())):
            chosen = int(np.argmax(np.where(has_part, self.credit, -np.inf)))
            self.credit[chosen] -= 1.0
            counts[chosen] += 1
        return counts.tolist()


class MixedRows:
    """The rows of every step of a run whose steps all have the same number of rows."""

    def __init__(
        self, orders: Sequence[EpochOrder], mixture: Mixture, *, rows_per_step: int
    ) -> None:
        self._orders, self._rows_per_step = orders, rows_per_step
        self._allotment = Allotment(mixture)
        # Rows that each source has given before step 1, 2, ...
        self._given: list[list[int]] = [[0] * len(orders)]
        # Plans may be asked for by the thread that packs ahead and by others.
        self._lock = threading.Lock()

    def rows(self, step: int) -> list[int]:
        """Return the row ids of a step, source by source."""
        starts, ends = self._spans(step)
        return [
            row
            for order, start, end in zip(self._orders, starts, ends, strict=True)
            for row in order.span(start, end - start)
        ]

    def _spans(self, step: int) -> tuple[list[int], list[int]]:
        with self._lock:
            while len(self._given) <= step:
                counts = self._allotment.split(self._rows_per_step, step=len(self._given))
                last = self._given[-1]
                self._given.append([a + b for a, b in zip(last, counts, strict=True)])
            return self._given[step - 1], self._given[step]


def orders_of(
    row_ids: IntArray, source_B: IntArray, *, names: Sequence[str], seed: int, shuffle: bool
) -> list[EpochOrder]:
    """Return the order of each source. Raises DataError if none of a source's rows are left.

    `source_B` is the number of the source of every row of the store.
    """
    orders = []
    for number, name in enumerate(names):
        ids = row_ids[source_B[row_ids] == number]
        if not len(ids):
            raise DataError(
                f"data.train.{number}: no row of the source {name!r} is left to train on, "
                "although the source has a weight. Remove the source, or find out why its rows "
                "are dropped."
            )
        # Sources of one length would otherwise have the same order.
        orders.append(EpochOrder(ids, key=(seed, 2, number), shuffle=shuffle))
    return orders


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The part of one training source in a run: its share at the first and at the last step.

    `epochs` is how often each of its rows comes, about.
    """

    name: str
    rows: int
    first_share: float
    last_share: float
    epochs: float

    def __str__(self) -> str:
        share = f"{self.first_share:.1%}"
        if self.last_share != self.first_share:
            share += f" at first, {self.last_share:.1%} at last"
        return f"{self.name}: {self.rows} rows, {share}, {self.epochs:.2g} epochs"


def source_parts(
    data: DataConfig, source_ids: IntArray, *, total_steps: int, rows_per_step: int
) -> tuple[SourcePart, ...]:
    """Return the part of every source, from the source numbers of all rows to train on."""
    names, mixture = data.source_names, Mixture.of(data)
    rows = np.bincount(source_ids, minlength=len(names))
    if mixture is None:
        first = last = mean = rows / rows.sum()
    else:
        # Weights change slowly, so some steps tell enough of all.
        some = np.unique(np.linspace(1, total_steps, MAX_STEPS_SHOWN).round().astype(int)).tolist()
        shares = np.array([mixture.shares(step) for step in some])
        first, last, mean = shares[0], shares[-1], shares.mean(axis=0)
    epochs = mean * total_steps * rows_per_step / np.maximum(rows, 1)
    found = zip(names, rows, first, last, epochs, strict=True)
    return tuple(SourcePart(n, int(r), float(a), float(b), float(e)) for n, r, a, b, e in found)


def source_shares(source_ids: IntArray, names: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a step's mix from the source numbers of its rows or prompts."""
    if len(names) < 2 or not len(source_ids):
        return {}
    counts = np.bincount(source_ids, minlength=len(names))
    return {
        f"data/share/{name}": float(count) / len(source_ids)
        for name, count in zip(names, counts, strict=True)
    }
