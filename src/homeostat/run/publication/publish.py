"""Publication: which weights the engine samples with, and how they are sent to it.

    make_room -> updates -> publish(step)

A version is the step after which the weights were published; 0 are those the run starts from. An
engine that shares the trainer's weights only needs the version. Any other engine receives the
weights every `sync.interval` updates and keeps them in between, so completions sampled meanwhile
carry their version. Skipped updates (without a signal) are counted as well, so the schedule does
not depend on what was sampled.

A resumed run must sample with the weights it would have sampled with. Where these may be older than
the trainer's, a copy of what was last published is kept on the host, and a checkpoint that is saved
while the engine is behind holds it (published.safetensors).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from homeostat.arrays import FloatArray
from homeostat.config.parts import PublicationSettings
from homeostat.config.sync import SharedMemoryConfig
from homeostat.errors import CheckpointError, EngineDiedError, NotServedError, SyncError
from homeostat.health.finding import Grade
from homeostat.health.remedies import Action
from homeostat.rollout.engine import Quiesce
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.run.publication.fp8_checkpoint import fp8_checkpoint
from homeostat.run.publication.host_weights import PolicyWeights, host_weights
from homeostat.run.publication.nothing_sent import PUBLISHED
from homeostat.run.session.restarts import Restarts, death_in
from homeostat.run.session.session import Session
from homeostat.sync.bucket import Bucket, Manifest, Packer
from homeostat.sync.publish import Publisher, ScoreEach, WeightSource
from homeostat.sync.transports import open_transport
from homeostat.sync.verify import Probe
from homeostat.train.local import LocalTrainer
from homeostat.train.saving.run_state import RlState
from homeostat.train.trainer import Trainer
from homeostat.types import TokenRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights that no model in this process holds any more: they can only be sent."""

    tensors: Mapping[str, Tensor]

    def weight_buckets(self, packer: Packer) -> Iterator[Bucket]:
        return packer.pack(self.tensors.items())

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        raise AssertionError("stored weights are verified by their checksums alone")


class SentWeights:
    """Publishes to an engine with its own copy of the weights, and restarts it if it dies."""

    def __init__(
        self,
        engine: RemoteEngine | Router,
        config: PublicationSettings,
        *,
        trainer: Trainer,
        probe: Probe,
        rl_state: RlState,
        session: Session,
        restarts: Restarts,
    ) -> None:
        self.engine = engine
        self.restarts = restarts
        self.config = config
        self.trainer = trainer
        self.probe = probe if config.sync.verify else None
        self.rl_state = rl_state
        self.session = session
        # A copy of the engine's weights, if they may be older than the trainer's.
        self._copy: dict[str, Tensor] | None = None
        self._publisher: Publisher | None = None
        self._is_sending = False
        self._step = 0
        # While the engine samples ahead, its thread may find it dead as weights are staged here.
        self._turn = threading.RLock()
        if isinstance(engine, RemoteEngine):
            engine.on_death = self._revive

    @property
    def is_behind(self) -> bool:
        return self.rl_state.published_version < self._step

    def start(self, step: int, checkpoint: Path | None) -> None:
        """The first publication: what the engine had when the run was left, or what the trainer
        has now."""
        self._step = step
        if self.is_behind:
            assert checkpoint is not None, "a run that begins is behind nothing"
            self._copy = _read(checkpoint / PUBLISHED)
        elif self._may_fall_behind:
            self._copy = host_weights(self.trainer)
        self._tell(self._deliver(self._last_published, self.rl_state.published_version))

    def make_room(self) -> None:
        """Free memory for the trainer; the engine keeps the weights it has."""
        if self.config.engine.sleep:
            self.engine.sleep()

    def publish(self, step: int, *, must: bool) -> dict[str, float]:
        """Publish the weights after the updates of a step if that is due, or if `must` says that
        the next samples need this step's weights. Returns metrics if anything was sent. A version
        that the engine already has (only the critic learnt) is not sent again."""
        self._step = step
        if not self._is_due(step, must=must):
            return {}
        manifest = self._deliver(lambda: PolicyWeights(self.trainer), step)
        self.rl_state.published_version = step
        if self._may_fall_behind:
            self._copy = host_weights(self.trainer)
        self._tell(manifest)
        staged = manifest.staged_seconds
        return {
            **({} if staged is None else {"sync/staged_seconds": staged}),
            "sync/seconds": manifest.seconds,
            "sync/bytes": float(manifest.num_bytes),
            "sync/sent_bytes": float(manifest.sent_bytes),
            "sync/version": float(manifest.version),
        }

    def stage(self, step: int, *, must: bool) -> None:
        """Send the weights that `publish` of this step will put in place, while the engine keeps
        sampling: it may be polled in another thread. Without sync.overlap nothing happens."""
        if self.config.sync.overlap == "never" or not self._is_due(step, must=must):
            return
        with self._turn:
            cause = self._staging_failure(step)
        if cause is not None:
            log.warning("version %d is sent while the engine is paused: %s", step, cause)
            self.session.event("overlap_not_used", step, version=step, cause=cause)

    def _staging_failure(self, step: int) -> str | None:
        """Send the weights while the engine samples. Returns what prevented it, or None."""
        if not self.engine.capabilities.stages:
            name = self.engine.capabilities.name
            return f"the {name} engine can receive weights only while it is paused"
        if self._publisher is None:
            # To connect, the engine would have to stand still.
            return "the transport is opened again after an engine died"
        try:
            self._publisher.stage(PolicyWeights(self.trainer), self.engine, version=step)
        except SyncError as error:
            may_pause = self.config.sync.overlap != "always" or self._has_dead_engine()
            # The publication that was begun cannot be continued: `publish` opens another transport.
            self._disconnect()
            if not may_pause:
                raise
            return str(error)
        return None

    def _has_dead_engine(self) -> bool:
        one = self.engine
        engines = one.engines if isinstance(one, Router) else [one]
        return any(isinstance(e, RemoteEngine) and e.death() is not None for e in engines)

    def _is_due(self, step: int, *, must: bool) -> bool:
        age = step - self.rl_state.published_version
        return age > 0 and (must or age >= self.config.steps_between_publications)

    def republish(self) -> None:
        """Send the weights that the engine should have once more."""
        self._tell(self._deliver(self._last_published, self.rl_state.published_version))

    def follow_precision(self) -> None:
        """Send the weights again, which the trainer rounds to INT4 from now on.

        An engine that is behind, or samples ahead, has rounded ones from the next publication on.
        """
        if self.is_behind or self.config.samples_ahead:
            return
        if self._may_fall_behind:
            self._copy = host_weights(self.trainer)
        self.republish()

    def reconfigure(self, config: PublicationSettings) -> None:
        """Apply a changed sync.interval. An engine that is not behind has the trainer's weights."""
        self.config = config
        if self._may_fall_behind and not self.is_behind:
            self._copy = host_weights(self.trainer)

    @property
    def state_bytes(self) -> int:
        tensors = self._copy.values() if self._copy is not None and self.is_behind else ()
        return sum(tensor.nbytes for tensor in tensors)

    def save(self, folder: Path) -> None:
        if self.is_behind:
            assert self._copy is not None, "an engine that falls behind has its weights kept"
            save_file(self._copy, folder / PUBLISHED)

    def close(self) -> None:
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the transport: the next publication opens another one."""
        if self._publisher is not None:
            self._end(self._publisher)
            self._publisher = None

    def _end(self, publisher: Publisher) -> None:
        """Close a transport here, and where the trainer packs."""
        publisher.close()
        self.trainer.forget_packer(publisher.packer)

    @property
    def _process(self) -> RemoteEngine:
        assert isinstance(self.engine, RemoteEngine), "several engines have their own feed"
        return self.engine

    @property
    def _may_fall_behind(self) -> bool:
        # While the engine samples, the trainer's weights change: a process that replaces a dead one
        # needs those that were published.
        return self.config.samples_ahead or self.config.steps_between_publications > 1

    def _last_published(self) -> WeightSource:
        return self._kept() if self.is_behind else PolicyWeights(self.trainer)

    def _for_replacement(self) -> WeightSource:
        """Return what a process is sent that replaces a dead one.

        While the engine samples ahead, the trainer may be in the middle of an update, and is
        another thread's to call.
        """
        return self._kept() if self.config.samples_ahead else self._last_published()

    def _kept(self) -> WeightSource:
        assert self._copy is not None, "an engine that falls behind has its weights kept"
        return StoredWeights(self._copy)

    def _deliver(self, source: Callable[[], WeightSource], version: int) -> Manifest:
        """Send the weights. A process that dies meanwhile is replaced, and sent everything."""

        def send() -> Manifest:
            return self._send_until_served(source, version)

        try:
            return send()
        except (EngineDiedError, SyncError) as error:
            return self._restarted(death_in(error, self._process), send)

    def _send_until_served(self, source: Callable[[], WeightSource], version: int) -> Manifest:
        """Send the weights, and send them again if the engine does not serve what it received."""
        try:
            return self._send(source(), version)
        except NotServedError as error:
            if self.config.health.heal == "off":
                raise
            self._tell_again(error)
        return self._send(source(), version)

    def _revive(self, error: EngineDiedError) -> None:
        """Replace a process that was found dead by a verb that will be tried again."""
        if self._is_sending:
            raise error
        version = self.rl_state.published_version
        with self._turn:
            self._restarted(error, lambda: self._send_until_served(self._for_replacement, version))

    def _restarted(self, error: EngineDiedError, send: Callable[[], Manifest]) -> Manifest:
        """Start processes until one lives to have the weights, or no restart is left."""
        while True:
            self.restarts.count(error, step=self._step)
            self._disconnect()
            try:
                return self._process.restart(send)
            except (EngineDiedError, SyncError) as again:
                error = death_in(again, self._process)

    def _send(self, source: WeightSource, version: int) -> Manifest:
        self._is_sending = True
        try:
            publisher = self._publisher or self._connected()
            manifest = self._published(publisher, self.engine, source, version)
            # A packer that was used here cannot travel to the trainer any more.
            if isinstance(source, StoredWeights):
                self._disconnect()
            return manifest
        finally:
            self._is_sending = False

    def _published(
        self,
        publisher: Publisher,
        engine: RemoteEngine | Router,
        source: WeightSource,
        version: int,
    ) -> Manifest:
        publisher.probe = None if isinstance(source, StoredWeights) else self.probe
        return publisher.publish(
            source, engine, version=version, quiesce=Quiesce.DRAIN, on_ended=list
        )

    def _connected(self) -> Publisher:
        engine = self.engine
        score_each = engine.score_each if isinstance(engine, Router) else None
        self._publisher = self._publisher_to(engine, score_each=score_each)
        return self._publisher

    def _publisher_to(
        self, engine: RemoteEngine | Router, *, score_each: ScoreEach | None = None
    ) -> Publisher:
        """Connect an engine to a new transport."""
        transport = open_transport(
            self.config.sync.transport or SharedMemoryConfig(),
            folder=self.session.run_dir.path,
            device=self.trainer.runtime.device,
            timeout_s=self.config.sync.timeout_s,
            host=self.config.cluster.host,
            num_receivers=engine.capabilities.num_receivers,
            over_hosts=self.config.cluster.type == "ray",
            own_weights=isinstance(self.trainer, LocalTrainer),
        )
        checkpoint = fp8_checkpoint(self.config)
        publisher = Publisher(
            transport,
            probe=self.probe,
            through=None if checkpoint is None else checkpoint.packer,
            score_each=score_each,
        )
        engine.connect(transport)
        return publisher

    def _tell_again(self, error: NotServedError) -> None:
        log.warning("%s\nThey are sent once more.", error)
        facts = {"code": "", "cause": str(error), "remedy": str(Action.REPUBLISH), "path": ""}
        facts |= {"old": None, "new": None, "grade": str(Grade.SAFE), "window": 0}
        self.session.event("remedy_applied", self._step, **facts)

    def _tell(self, manifest: Manifest) -> None:
        if manifest.whole_because:
            whole = {"version": manifest.version, "cause": manifest.whole_because}
            self.session.event("weights_sent_whole", self._step, **whole)
        self.session.event(
            "weights_published",
            self._step,
            version=manifest.version,
            bytes=manifest.num_bytes,
            sent_bytes=manifest.sent_bytes,
            seconds=manifest.seconds,
            transport=manifest.transport,
            checksum=manifest.checksum,
        )


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): it should hold the weights that the engine had "
            "when the checkpoint was saved. Set checkpoint.load_step to another checkpoint."
        ) from None


def probe_of(config: PublicationSettings, trainer: Trainer) -> Probe:
    """Rows that trainer and engine are compared on."""
    dtypes = [trainer.runtime.dtype]
    if config.engine.own_dtype is not None:
        dtypes.append(getattr(torch, config.engine.own_dtype))
    if config.engine_fp8 is not None or config.engine.kv_cache_dtype == "fp8":
        # A value that one of them rounds up, the other may round down.
        dtypes.append(torch.float8_e4m3fn)
    dtype = max(dtypes, key=lambda one: torch.finfo(one).eps)
    return Probe(
        vocabulary=trainer.sheet.vocab_size,
        num_layers=int(trainer.sheet.source_config["num_hidden_layers"]),
        dtype=dtype,
        row_tokens=min(16, config.max_request_tokens),
    )
