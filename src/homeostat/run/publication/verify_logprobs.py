"""Decide by a slow float64 reference whether engine or trainer is wrong (observe.verify_logprobs).

    some sampled rows -> log-probs as sampled, as the engine scores them now, as the trainer scores
    them, and of the same weights in float64 -> the distance of each from the last -> a verdict

Engine and trainer are judged by the limit that a publication's probe has: what rounding explains.
Tokens of an older policy were sampled with older weights, so they are not judged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from homeostat.arrays import FloatArray, FloatArray64
from homeostat.columns import KEPT_IDS, ROUTES, Ragged, dense
from homeostat.config.loading.live import LiveConfig
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.families import decoder_config
from homeostat.models.float64 import reference_logprobs
from homeostat.models.hub_names import stacked_tensors
from homeostat.rollout.engine import Engine
from homeostat.run.learning.updates import step_rows
from homeostat.run.publication.host_weights import host_weights
from homeostat.run.publication.publish import probe_of
from homeostat.train.events import EmitEvent
from homeostat.train.scoring import score
from homeostat.train.trainer import Trainer
from homeostat.types import (
    Completion,
    Role,
    RolloutGroup,
    TokenRow,
    TrainBatch,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One party's distance from the float64 reference, on the same tokens."""

    party: str
    error_mean: float
    error_max: float
    share_off: float

    @property
    def is_off(self) -> bool:
        return self.share_off > 0


def judge(
    party: str, logp_M: FloatArray, reference_M: FloatArray64, *, tolerance: float
) -> Judgement:
    """Judge both parties. A token is wrong if rounding cannot explain its distance, or if it is not
    finite.
    """
    error_M = np.abs(logp_M.astype(np.float64) - reference_M)
    off_M = ~(error_M <= tolerance * (1 + np.abs(reference_M)))
    return Judgement(party, float(error_M.mean()), float(error_M.max()), float(off_M.mean()))


def verdict(judgements: Sequence[Judgement], *, tolerance: float) -> str:
    """Say in words which party is wrong, if any."""
    off = [judgement for judgement in judgements if judgement.is_off]
    if not off:
        names = " and ".join(judgement.party for judgement in judgements)
        return f"{names} agree with float64 to rounding"
    told = [
        f"the {one.party} is off: {one.share_off:.0%} of the tokens are further from float64 than "
        f"{tolerance:.2g} x (1 + |logp|), the worst by {one.error_max:.3g}"
        for one in off
    ]
    right = [judgement.party for judgement in judgements if not judgement.is_off]
    return "; ".join([*told, *(f"the {name} is right" for name in right)])


class LogprobVerifier:
    """Compares engine, trainer and float64, where that is due."""

    def __init__(
        self, live: LiveConfig, *, trainer: Trainer, engine: Engine | None, emit: EmitEvent
    ) -> None:
        self.live = live
        self.trainer = trainer
        self.engine = engine
        self.emit = emit

    @cached_property
    def shape(self) -> DecoderConfig:
        return decoder_config(self.trainer.sheet.source_config)

    @cached_property
    def tolerance(self) -> float:
        return probe_of(self.live.now.for_publication, self.trainer).tolerance

    def verify(
        self, groups: Sequence[RolloutGroup], *, step: int, version: int
    ) -> dict[str, float]:
        """Metrics of the comparison; the verdict goes to the events and the log. `version` is that
        of the trainer's weights."""
        rules = self.live.now.observe.verify_logprobs
        if rules is None or (step - 1) % rules.interval_steps:
            return {}
        made = step_rows(groups, self.live.now.for_learning)
        rows = [row for row in made.rows if row.weights_T.any()]
        places = np.linspace(0, len(rows) - 1, min(rules.rows, len(rows))).round().astype(int)
        some = [rows[place] for place in places]
        if not some:
            return {}
        samples = [sample for group in groups for sample in group.samples]
        written = [samples[made.sample_R[row.row_id]].completion for row in some]
        found = self._judged(some, written, version=version)
        text = verdict(found, tolerance=self.tolerance)
        is_off = any(judgement.is_off for judgement in found)
        (log.error if is_off else log.info)("step %d, %d rows: %s", step, len(some), text)
        fields = {"verdict": text, "rows": len(some)}
        self.emit("logprobs_off" if is_off else "logprobs_verified", step, **fields)
        return {
            f"verify/{one.party}/{name}": getattr(one, name)
            for one in found
            for name in ("error_mean", "error_max", "share_off")
        }

    def _judged(
        self, rows: Sequence[TokenRow], written: Sequence[Completion], *, version: int
    ) -> list[Judgement]:
        reference = self._reference(rows)
        batches = [TrainBatch.of([row]) for row in rows]
        temperature = self.live.now.rollout.temperature
        parties = {"trainer": score(self.trainer, Role.POLICY, batches, temperature=temperature)}
        engine = self.engine
        if engine is not None and engine.policy_version == version:
            if engine.capabilities.score_temperatures == "any" or temperature == 1:
                parties["engine_scoring"] = engine.score(rows, temperature=temperature)
        if all(_sampled_by(completion) == {version} for completion in written):
            parties["engine"] = [
                dense(row.columns["engine_logp"])[row.weights_T > 0] for row in rows
            ]
        wanted_M = np.concatenate(reference)
        return [
            judge(name, np.concatenate(logp), wanted_M, tolerance=self.tolerance)
            for name, logp in parties.items()
        ]

    def _reference(self, rows: Sequence[TokenRow]) -> list[FloatArray64]:
        weights = dict(stacked_tensors(self.shape.moe, host_weights(self.trainer).items()))
        found = []
        for row in rows:
            routes, shares = (row.columns.get(name) for name in ROUTES)
            kept = row.columns.get(KEPT_IDS)
            logp_T = reference_logprobs(
                self.shape,
                weights,
                row.tokens_T,
                temperature=self.live.now.rollout.temperature,
                routes_TLK=None if routes is None else dense(routes),
                shares_TLK=None if shares is None else dense(shares),
                kept_T=kept if isinstance(kept, Ragged) else None,
            )
            found.append(logp_T[row.weights_T[1:] > 0])
        return found


def _sampled_by(completion: Completion) -> set[int]:
    """The policy versions that sampled a completion."""
    return set(completion.policy_versions_T.tolist())
