"""A value that a remedy sets over the recipe's reaches whoever computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.test_healing import train
from tests.support import runs, tiny_rl
from tests.support.own_process import shared_engine_process

from homeostat.config import RunConfig
from homeostat.observe.jsonl import read_metrics
from homeostat.run.healing.healer import Edit
from homeostat.run.wiring.hooks import Hooks


class Seen(Hooks):
    """A run that goes on with one edit, and what reaches those who compute with it."""

    def __init__(self, path: str, value: Any) -> None:
        self.path, self.value = path, value
        self.temperatures: set[float] = set()
        self.params: list[dict[str, Any]] = []

    def started(self, parts: Any, session: Any) -> None:
        session.healing.overlay[self.path] = Edit(self.value, 1)
        submit, accumulate = parts.engine.submit, parts.trainer.accumulate

        def seen(request: Any) -> None:
            self.temperatures.add(request.sampling.temperature)
            submit(request)

        def update(role: Any, batches: Any, spec: Any, *, step: int) -> None:
            self.params.append(dict(spec.params))
            accumulate(role, batches, spec, step=step)

        parts.engine.submit, parts.trainer.accumulate = seen, update


EDITED = ("health.heal=all", "algorithm.entropy_bonus=1e-3", "trainer.max_steps=2")


def edited_run(tmp_path: Path, path: str, value: Any, *overrides: str) -> tuple[Seen, RunConfig]:
    config = tiny_rl.config(tmp_path, *EDITED, *overrides)
    seen = Seen(path, value)
    train(config, seen)
    assert seen.params
    return seen, config


def test_an_edited_temperature_reaches_the_sampler(tmp_path: Path) -> None:
    seen, _ = edited_run(tmp_path, "rollout.temperature", 0.7)
    assert seen.temperatures == {0.7}


def test_an_edited_clip_reaches_the_loss(tmp_path: Path) -> None:
    seen, _ = edited_run(tmp_path, "algorithm.clip_high", 0.28)
    assert {params["clip_high"] for params in seen.params} == {0.28}


def test_an_edited_kl_coefficient_reaches_the_loss(tmp_path: Path) -> None:
    kl = "algorithm.kl={coefficient: 0.01}"
    seen, _ = edited_run(tmp_path, "algorithm.kl.coefficient", 0.5, kl)
    assert {params["kl_coefficient"] for params in seen.params} == {0.5}


def test_an_edited_off_policy_mask_reaches_the_loss(tmp_path: Path) -> None:
    correction = "algorithm.correction={weight: {type: token}}"
    path = "algorithm.correction.off_policy_mask"
    seen, _ = edited_run(tmp_path, path, 0.5, correction)
    assert {params["off_policy_mask"] for params in seen.params} == {0.5}


def test_an_edited_count_of_updates_is_made(tmp_path: Path) -> None:
    _, config = edited_run(tmp_path, "trainer.updates_per_step", 1)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    assert [record["stale/updates/mean"] for record in records] == [0.0, 0.0]


@shared_engine_process()
def test_an_edited_sync_interval_is_kept_by_publications(tmp_path: Path) -> None:
    own = ("engine.own_process=true", "sync.interval=8", "trainer.max_steps=3")
    _, config = edited_run(tmp_path, "sync.interval", 2, *own)
    published = [event["version"] for event in runs.events(config, "weights_published")]
    assert published == [0, 1, 2, 3]
