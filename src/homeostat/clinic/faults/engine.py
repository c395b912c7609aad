"""Faults between trainer and engine: other weights, other sampling, a dead process."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from homeostat.clinic.injector import FROM_START, Cure, Injector
from homeostat.clinic.processes import descendants, workers
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.health.finding import Family
from homeostat.models.decoder import Decoder
from homeostat.rollout.remote import RemoteEngine
from homeostat.run.session.session import Session
from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.local import LocalTrainer
from homeostat.types import Role

OWN_PROCESS = Body("sort", steps=30, changes={"engine": {"type": "native", "own_process": True}})


def part_ways(engine: Any) -> Decoder:
    """Let the engine compute with a copy of the weights as they are now."""
    engine.model = copy.deepcopy(engine.model)
    engine.runner.model = engine.model
    if engine.bursts is not None:
        # The compiled step lays out the weights of the model that it holds itself.
        engine.bursts.compiled.model = engine.model
    return engine.model


class StaleEngine(Injector):
    """Publications get lost: the engine keeps old weights but reports the new version."""

    name, family = "stale_engine", Family.SYNC
    expects = ("weights-not-updated", "train-infer-logprob-drift", "engine-weights-differ")
    body = Body("sort", steps=50, changes={"trainer.lr": 2e-3})

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            part_ways(parts.engine)


class LayerDamaged(Injector):
    """One layer arrives damaged in the engine at every publication; the rest is correct."""

    name, family = "engine_layer_damaged", Family.SYNC
    expects = ("engine-weights-differ", "engine-logprob-mismatch", "weight-conversion-wrong")
    strength = (0.05, 0.2)

    def before_step(self, step: int, parts: Any) -> None:
        if not self.is_ill(step):
            return
        if self.strikes(step):
            self.model = part_ways(parts.engine)
        torch.manual_seed(self.dose.seed)
        published = dict(parts.trainer.roles[Role.POLICY].model.causal_lm.named_parameters())
        with torch.no_grad():
            for name, param in self.model.causal_lm.named_parameters():
                param.copy_(published[name])
                if ".layers.1." in name and param.ndim == 2:
                    param.add_(self.dose.strength * torch.randn_like(param))


class OtherCheckpoint(Injector):
    """The engine serves other weights than the trainer's: those of an untrained model."""

    name, family = "engine_other_checkpoint", Family.SYNC
    expects = ("engine-weights-differ", "engine-logprob-mismatch", "weight-conversion-wrong")

    def before_step(self, step: int, parts: Any) -> None:
        if not self.strikes(step):
            return
        torch.manual_seed(self.dose.seed)
        with torch.no_grad():
            for param in part_ways(parts.engine).causal_lm.parameters():
                param.copy_(0.07 * torch.randn_like(param) if param.ndim == 2 else param)


class TemperatureMismatch(Injector):
    """The engine samples at another temperature than the trainer computes log-probs at."""

    name, family, strength = "temperature_mismatch", Family.OFFPOLICY, (0.4, 0.7)
    expects = ("engine-logprob-mismatch",)

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            collector = parts.collector
            collector.sampling = replace(collector.sampling, temperature=self.dose.strength)


class RareSync(Injector):
    """Weights are published so seldom that the engine is many updates behind."""

    name, family, onset = "rare_sync", Family.OFFPOLICY, FROM_START
    expects = ("stale-policy", "sync-interval-without-correction", "train-infer-logprob-drift")
    body, strength = OWN_PROCESS, (10.0, 20.0)
    cure, vital = Cure.ALL, "reward"

    def prepare(self, raw: Raw, folder: Path) -> None:
        put(raw, "sync.interval", round(self.dose.strength))
        raw["trainer"]["lr"] *= 2


class TooFarAhead(Injector):
    """Groups are sampled so many steps ahead of the trainer that their policy is long gone."""

    name, family, onset = "too_far_ahead", Family.OFFPOLICY, FROM_START
    expects = ("stale-policy", "train-infer-logprob-drift", "sync-interval-without-correction")
    body, strength = OWN_PROCESS, (8.0, 14.0)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rollout"]["max_staleness"] = round(self.dose.strength)
        raw["trainer"]["lr"] *= 2


class BadPublication(Injector):
    """One publication arrives damaged, and the engine samples with it until the next."""

    name, family = "bad_publication", Family.SYNC
    expects = ("engine-weights-differ", "engine-logprob-mismatch", "weight-conversion-wrong")
    body, onset, strength = OWN_PROCESS, (9, 13), (0.05, 0.2)
    cure = Cure.SAFE
    verify: ClassVar[bool] = False

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["sync"] = {"interval": self.dose.onset - 1, "verify": self.verify}
        raw["trainer"]["lr"] /= 20

    def started(self, parts: Any, session: Session) -> None:
        # Typed, so that the type checker finds a fault that patches what is no longer there.
        trainer: LocalTrainer = parts.trainer
        buckets = trainer.weight_buckets

        def damaged(role: Role, packer: Packer) -> Iterator[Bucket]:
            if not self.strikes(parts.state.step + 1):
                return buckets(role, packer)
            return packer.pack(self._with_noise(trainer.weights(role)))

        setattr(trainer, "weight_buckets", damaged)  # noqa: B010 (a method, on purpose)

    def _with_noise(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        torch.manual_seed(self.dose.seed)
        for name, weight in weights:
            noise = self.dose.strength * torch.randn_like(weight)
            yield name, weight + noise if ".layers.1." in name else weight


class BadPublicationVerified(BadPublication):
    """A damaged publication with sync.verify: it is detected, and ends a run that may not heal."""

    name, verify, is_fatal = "bad_publication_verified", True, True


class EngineKilled(Injector):
    """The engine's process is killed, three times in a few steps."""

    name, family = "engine_killed", Family.GENERATION
    expects = ("engine-restarts", "engine-died")
    body, onset = OWN_PROCESS, (5, 12)
    cure, vital, stays = Cure.SAFE, "reward", True

    def before_step(self, step: int, parts: Any) -> None:
        if step - self.dose.onset in (0, 3, 6):
            for process in descendants("homeostat.workers.child"):
                os.kill(process, signal.SIGKILL)


class EngineHung(Injector):
    """The engine's process stops and no longer answers, twice in a few steps."""

    name, family = "engine_hung", Family.GENERATION
    expects = ("engine-restarts", "engine-step-timeout")
    body, onset = OWN_PROCESS, (5, 12)
    cure, vital, stays = Cure.SAFE, "reward", True
    # Two deadlines, two reports, and two starts of the engine.
    deadline_s = 300.0

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["engine"]["stall_s"] = 4.0

    def before_step(self, step: int, parts: Any) -> None:
        if step - self.dose.onset in (0, 3):
            for process in workers():
                os.kill(process, signal.SIGSTOP)


class SlowPublication(Injector):
    """The path that weights take to the engine is slow, as over a full network."""

    name, family, strength = "slow_publication", Family.SYNC, (1.2, 1.6)
    expects = ("slow-weight-sync",)
    body, onset = OWN_PROCESS, (5, 9)

    def started(self, parts: Any, session: Session) -> None:
        engine: RemoteEngine = parts.engine
        apply = engine.apply

        def slow(bucket: Bucket) -> None:
            if self.is_ill(parts.state.step + 1):
                time.sleep(self.dose.strength)
            apply(bucket)

        setattr(engine, "apply", slow)  # noqa: B010 (a method, on purpose)


class SlowEngine(Injector):
    """The engine samples at a fraction of its speed."""

    name, family, strength = "engine_slow", Family.PERFORMANCE, (0.12, 0.2)
    expects = (
        "generation-dominates",
        "rollout-underutilised",
        "throughput-falls",
        "step-time-grows",
    )

    def started(self, parts: Any, session: Session) -> None:
        engine, poll = parts.engine, parts.engine.poll

        def slow(*, timeout_s: float) -> Any:
            if self.is_ill(parts.state.step + 1):
                time.sleep(self.dose.strength)
            return poll(timeout_s=timeout_s)

        engine.poll = slow


class TrainerStarved(SlowEngine):
    """Groups are sampled ahead of the trainer, by an engine that is too slow for it."""

    name = "trainer_starved"
    expects = ("trainer-starved",)
    body = replace(OWN_PROCESS, changes=OWN_PROCESS.changes | {"rollout.max_staleness": 1})


FAULTS: tuple[type[Injector], ...] = (
    StaleEngine,
    LayerDamaged,
    OtherCheckpoint,
    TemperatureMismatch,
    RareSync,
    TooFarAhead,
    EngineKilled,
    EngineHung,
    SlowEngine,
    TrainerStarved,
    SlowPublication,
    BadPublication,
    BadPublicationVerified,
)
