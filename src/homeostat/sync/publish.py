"""Publishes a policy's weights: from the trainer's memory into the engine's, with verification.

    begin_update -> buckets -> apply ... -> commit -> verify -> Manifest

Between `begin_update` and `commit` the engine holds parts of two versions: if something fails in
between, the engine stays uncommitted and must be closed. Nothing is sent to an engine that shares
the trainer's tensors; for such an engine it is verified that the memory is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from homeostat.arrays import FloatArray
from homeostat.errors import HomeostatError, SyncError, TrainerLostError
from homeostat.sync.bucket import (
    Bucket,
    Manifest,
    Packer,
    Transport,
    entries_checksum,
)
from homeostat.sync.verify import Probe, require_received, require_served
from homeostat.types import POLICY_ID, Completion, TokenRow


class WeightSource(Protocol):
    """The part of a trainer that a publication needs."""

    def weight_buckets(self, packer: Packer) -> Iterator[Bucket]: ...

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]: ...


class WeightSink(Protocol):
    """The part of rollout.engine.Engine that a publication needs; `how` is its Quiesce."""

    @property
    def capabilities(self) -> Any: ...

    @property
    def policy_version(self) -> int: ...

    @property
    def received_checksum(self) -> str | None: ...

    def begin_update(self, how: Any, *, policy_id: str) -> list[Completion]: ...

    def apply(self, bucket: Bucket) -> None: ...

    def commit(self, version: int, *, policy_id: str) -> None: ...

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]: ...


class StagingSink(Protocol):
    """The part of an engine that receives weights while it samples."""

    def stage(self, bucket: Bucket) -> None: ...


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that the engine has received but does not use yet."""

    version: int
    buckets: list[Bucket]
    seconds: float


class ScoreEach(Protocol):
    """Returns the scores of each of several engines."""

    def __call__(
        self, rows: Sequence[TokenRow], *, temperature: float
    ) -> list[list[FloatArray]]: ...


class Publisher:
    """Sends the weights of one policy by one transport. Without a `probe` only the received bytes
    are verified. `through` provides a packer that sends the weights in another form. `score_each`
    is for an engine made of several engines, all of which must serve the weights.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        probe: Probe | None,
        policy_id: str = POLICY_ID,
        through: Callable[[Packer], Packer] | None = None,
        score_each: ScoreEach | None = None,
    ) -> None:
        self.transport = transport
        self.probe = probe
        self.policy_id = policy_id
        self.score_each = score_each
        self._staged: Staged | None = None
        packer = transport.packer()
        self.packer = packer if through is None else through(packer)

    def stage(self, source: WeightSource, engine: StagingSink, *, version: int) -> None:
        """Send the weights while the engine keeps sampling; `publish` of this version then only
        puts them in place. Raises SyncError if they did not arrive, and TrainerLostError, here and
        in `publish`, if the ranks that send them are lost."""
        self._staged = None
        started = time.perf_counter()
        buckets: list[Bucket] = []
        try:
            for bucket in source.weight_buckets(self.packer):
                engine.stage(bucket)
                buckets.append(bucket)
        except TrainerLostError:
            # New ranks resume the run, with a new engine.
            raise
        except (HomeostatError, RuntimeError, OSError) as error:
            raise SyncError(
                f"version {version} was not sent by {self.transport.name} while the engine "
                f"sampled: {error}"
            ) from error
        self._staged = Staged(version, buckets, time.perf_counter() - started)

    def publish(
        self,
        source: WeightSource,
        engine: WeightSink,
        *,
        version: int,
        quiesce: StrEnum,
        on_ended: Callable[[list[Completion]], object],
    ) -> Manifest:
        """Publish the weights. `on_ended` gets the completions that ended because of the update,
        before any step that can fail.
        """
        base = engine.policy_version
        if version < base:
            raise SyncError(
                f"version {version} cannot be published: the engine serves {base} already, and "
                "versions never go back."
            )
        on_ended(engine.begin_update(quiesce, policy_id=self.policy_id))
        started = time.perf_counter()
        try:
            staged, self._staged = self._staged, None
            is_staged = staged is not None and staged.version == version
            buckets = staged.buckets if staged and is_staged else self._send(source, engine)
            engine.commit(version, policy_id=self.policy_id)
        except TrainerLostError:
            raise
        except (HomeostatError, RuntimeError, OSError) as error:
            raise SyncError(
                f"version {version} was not published by {self.transport.name}: {error} The "
                f"engine was left without commit, between version {base} and {version}: it must "
                "be closed."
            ) from error
        entries = [entry for bucket in buckets for entry in bucket.entries]
        manifest = Manifest(
            policy_id=self.policy_id,
            version=version,
            base_version=base,
            transport=self.transport.name,
            checksum=entries_checksum(entries, policy_id=self.policy_id),
            num_tensors=len(entries),
            num_bytes=sum(entry.num_bytes for entry in entries),
            seconds=time.perf_counter() - started,
            sent_bytes=sum(bucket.sent_bytes for bucket in buckets),
            whole_because=next((one.whole_because for one in buckets), ""),
            staged_seconds=staged.seconds if staged and is_staged else None,
        )
        self._verify(source, engine, manifest)
        return manifest

    def close(self) -> None:
        self.packer.close()

    def _send(self, source: WeightSource, engine: WeightSink) -> list[Bucket]:
        take = engine.apply
        if engine.capabilities.shares_weights:
            receiver = self.transport.receiver(0, 1)

            def take(bucket: Bucket) -> None:
                list(receiver.unpack(bucket))

        buckets: list[Bucket] = []
        for bucket in source.weight_buckets(self.packer):
            take(bucket)
            buckets.append(bucket)
        return buckets

    def _verify(self, source: WeightSource, engine: WeightSink, manifest: Manifest) -> None:
        if not engine.capabilities.shares_weights:
            require_received(manifest, engine.received_checksum)
        if self.probe is None:
            return
        rows = self.probe.rows()
        temperature = self.probe.temperature
        trainer_logp = source.score(rows, temperature=temperature)
        each = self.score_each or (lambda rows, **how: [engine.score(rows, **how)])
        for engine_logp in each(rows, temperature=temperature):
            require_served(manifest, self.probe, trainer_logp=trainer_logp, engine_logp=engine_logp)
