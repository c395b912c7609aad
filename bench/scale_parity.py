"""Claim: a trainer over ranks is the local one, whatever the mesh, and resumes on any other mesh.

    python bench/scale_parity.py

For each case the ranks and one local trainer make the same updates of a tiny model in fp32, from
the same random weights. A row of the table holds, relative to the local trainer:

    loss      the largest difference of a loss over all updates
    gradient  that of the first update: the norm of the difference, of the tensor that differs most
    resumed   the largest difference of a later loss: of the case, once it has loaded what the case
              before it saved (the first one: the local trainer), and of the local trainer, once it
              has loaded what this case saved

Gradients are read from the first moments that a trainer saves, so that nothing but the Trainer
protocol is used. To add a case, add a line to CASES.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.config.loading.load import build_config
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.shards import TensorReader
from homeostat.train.sharded import start_sharded
from homeostat.train.trainer import Trainer
from homeostat.types import Role, TokenRow, TrainBatch

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets"
POLICY = Role.POLICY
SAVED_AFTER, STEPS = 2, 4
LOSS, GRADIENT = 1e-6, 1e-5
VOCABULARY = 299

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    # Large, so that routers are decided and rounding does not send a token elsewhere.
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _SMALL,
    # A dense layer first, then experts with groups, a shared expert and a bias for the choice.
    "experts": {
        **_SMALL,
        "model_type": "dots1",
        "architectures": ["Dots1ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": None,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh of so many ranks: `backend` are keys of trainer.backend, `trainer` others of it."""

    ranks: int
    model: str
    backend: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> str:
        """Return the settings in words."""
        chosen = [f"{name}={value}" for name, value in {**self.backend, **self.trainer}.items()]
        return ", ".join([self.model, *chosen])


@dataclass(frozen=True, slots=True)
class Row:
    """Differences from the local trainer, relative."""

    ranks: int
    mesh: str
    loss: float
    gradient: float
    resumed: float

    @property
    def is_equal(self) -> bool:
        """Return whether all differences are rounding."""
        return max(self.loss, self.resumed) <= LOSS and self.gradient <= GRADIENT


OFFLOAD = {"offload_params": True, "offload_optimizer": True}
_HYBRID = {"shard": "hybrid", "replicas": 2}
CASES = (
    Case(1, "dense"),
    Case(2, "dense"),
    Case(4, "dense"),
    Case(2, "dense", {"offload_optimizer": True}),
    Case(2, "dense", OFFLOAD),
    Case(4, "dense", {**_HYBRID, **OFFLOAD}),
    Case(1, "experts"),
    Case(2, "experts"),
    Case(2, "experts", {"expert_parallel_size": 2}),
    Case(4, "experts", {"expert_parallel_size": 4}),
    Case(4, "experts", {"expert_parallel_size": 2}, {"gradient_checkpointing": True}),
    Case(4, "experts", {"expert_parallel_size": 2, **_HYBRID}),
    Case(4, "experts", {"expert_parallel_size": 2, **OFFLOAD}),
    Case(4, "experts", {"expert_parallel_size": 4, "context_parallel_size": 2}),
    Case(4, "experts", {"expert_parallel_size": 2, "sequence_parallel_size": 2}),
    Case(4, "experts"),
    Case(2, "dense", {"sequence_parallel_size": 2}),
    # Two key heads for four ranks.
    Case(4, "dense", {"sequence_parallel_size": 4}),
    Case(2, "dense", {"context_parallel_size": 2}),
    Case(4, "dense", {"context_parallel_size": 4}),
    Case(4, "dense", {"context_parallel_size": 2, "sequence_parallel_size": 2}),
    Case(4, "dense", {"context_parallel_size": 2}, {"gradient_checkpointing": True}),
    Case(4, "dense", {"sequence_parallel_size": 2, **OFFLOAD}),
)


def config_of(folder: Path, case: Case | None, *, model: str) -> RunConfig:
    """Return the recipe of a case; None: the local trainer."""
    raw: dict[str, Any] = {
        "name": "parity",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(write_model(folder, model)), "init": "random"},
        "data": {
            "train": [{"type": "messages", "path": str(ASSETS / "tiny_wordplay.jsonl")}],
            "max_length": 128,
        },
        "trainer": {
            "max_steps": STEPS,
            "batch_rows": 8,
            "threads": 1,
            "device": "cpu",
            "max_grad_norm": None,
            # A gradient near zero has a direction that rounding decides; with a large eps the
            # update is as smooth as the gradient.
            "optimizer": {"type": "adamw", "eps": 1e-2},
        },
    }
    if case is not None:
        raw["trainer"] |= {"backend": {"type": "fsdp", **case.backend}, **case.trainer}
        raw["cluster"] = {"type": "torchrun", "processes": case.ranks}
    return build_config(raw, [], file=None)


def write_model(folder: Path, model: str) -> Path:
    target = folder / model
    if not target.exists():
        target.mkdir()
        for file in (ASSETS / "tiny-chat").iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **MODELS[model]}))
    return target


def update(trainer: Trainer, step: int) -> float:
    """Make one update of rows of unequal lengths in micro-batches of unequal sizes; return its
    loss."""
    rng = np.random.default_rng(step)
    rows = []
    for row_id in range(7):
        length = int(rng.integers(3, 40))
        weights = (rng.random(length) < 0.6).astype(np.float32) * rng.choice([0.5, 1.0, 2.0])
        weights[-1] = 1.0
        rows.append(TokenRow(row_id, rng.integers(0, VOCABULARY, length), weights))
    batches = [TrainBatch.of(rows[:3]), *(TrainBatch.of([row]) for row in rows[3:])]
    trainer.accumulate(POLICY, batches, loss_spec(SftConfig(), rows), step=step)
    return trainer.apply(POLICY, step=step, learning_rate=1e-2).loss


def train(trainer: Trainer, folder: Path) -> list[float]:
    """Make all updates; save after the first one, for its gradient, and after SAVED_AFTER."""
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(update(trainer, step))
        if step in (1, SAVED_AFTER):
            (folder / str(step)).mkdir(parents=True)
            trainer.save(folder / str(step))
    return losses


def resume(trainer: Trainer, folder: Path) -> list[float]:
    """Return the losses of the updates after the state that another trainer saved."""
    trainer.load(folder / str(SAVED_AFTER))
    return [update(trainer, step) for step in range(SAVED_AFTER + 1, STEPS + 1)]


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Return the first update's gradients times 1 - beta1."""
    saved = TensorReader(folder / "1", "optimizer").whole()
    return {name: moment for name, moment in saved.items() if name.startswith("exp_avg.")}


def difference(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def gradient_difference(found: Path, expected: Path) -> float:
    ours, theirs = gradients(found), gradients(expected)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((ours[n] - g).norm() / g.norm()) for n, g in theirs.items() if g.norm() > 0)


class Table:
    """Measures cases one after the other, each beside a local trainer of the same model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Model -> the local trainer's losses and folder, and the folder of the last case.
        self._local: dict[str, tuple[list[float], Path]] = {}
        self._before: dict[str, Path] = {}

    def measure(self, case: Case) -> Row:
        """Train, and resume on this case's mesh what another one saved."""
        losses, local_folder = self._baseline(case.model)
        config = config_of(self.folder, case, model=case.model)
        folder = self.folder / f"case_{len(list(self.folder.glob('case_*')))}"
        log_file = self.folder / "workers.log"
        trainer = start_sharded(config.for_trainer, resolve_runtime(config), log_file=log_file)
        try:
            found = train(trainer, folder)
            ours = resume(trainer, self._before[case.model])
        finally:
            trainer.close()
        theirs = resume(self._alone(case.model), folder)
        self._before[case.model] = folder
        return Row(
            ranks=case.ranks,
            mesh=case.mesh,
            loss=difference(found, losses),
            gradient=gradient_difference(folder, local_folder),
            resumed=max(difference(later, losses[SAVED_AFTER:]) for later in (ours, theirs)),
        )

    def _alone(self, model: str) -> Trainer:
        config = config_of(self.folder, None, model=model)
        return local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))

    def _baseline(self, model: str) -> tuple[list[float], Path]:
        if model not in self._local:
            folder = self.folder / f"local_{model}"
            self._local[model] = train(self._alone(model), folder), folder
            self._before[model] = folder
        return self._local[model]


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="homeostat-parity-") as place:
        table = Table(Path(place))
        print(f"{'ranks':>5}  {'loss':>8}  {'gradient':>8}  {'resumed':>8}  mesh")
        for case in CASES:
            row = table.measure(case)
            sizes = f"{row.loss:8.1e}  {row.gradient:8.1e}  {row.resumed:8.1e}"
            print(f"{row.ranks:5d}  {sizes}  {row.mesh}", flush=True)
            rows.append(row)
    result = {
        **common.machine(("torch", "numpy")),
        "tolerance": {"loss": LOSS, "gradient": GRADIENT},
        "equal": all(row.is_equal for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    common.write_result("scale_parity", result)
    if not result["equal"]:
        sys.exit("a trainer over ranks differs from the local one")


if __name__ == "__main__":
    main()
