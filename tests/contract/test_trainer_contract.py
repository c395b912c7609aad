"""What every Trainer must hold. A new backend is one more entry in TRAINERS.

Only what the protocol offers is used, so that a trainer may live in other processes: gradients are
read from the first moments that it saves, and states by loading them into a local trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import ranks, tiny

from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.data.packing import pack
from homeostat.errors import LossInputError, ModelError
from homeostat.models.hf import save_hf
from homeostat.ops.attention import PackedLayout
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.train.build import local_trainer
from homeostat.train.forward import predicted_positions
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.train.scoring import score
from homeostat.train.sharded import ShardedTrainer, start_sharded
from homeostat.train.trainer import Trainer
from homeostat.types import LossSpec, Outputs, Role, StepPlan, TokenRow, TrainBatch, UpdateReport

POLICY = Role.POLICY
BETA1 = 0.9
MAX_GRAD_NORM = 0.5

State = dict[str, dict[str, torch.Tensor]]


def local(folder: Path, *overrides: str, **sections: dict) -> LocalTrainer:
    config = tiny.config(folder, *overrides, **sections)
    return local_trainer(config.for_trainer, resolve_runtime(config))


def in_lanes(folder: Path, *overrides: str, **sections: dict) -> LocalTrainer:
    return local(folder, *overrides, "trainer.lanes=2", **sections)


def sharded(
    num_ranks: int,
    folder: Path,
    *overrides: str,
    backend: Mapping[str, int] = MappingProxyType({}),
    **sections: dict,
) -> Trainer:
    config = tiny.config(folder, *overrides, *ranks.over(num_ranks, **backend), **sections)
    runtime = resolve_runtime(config)
    with ranks.forked():
        log_file = folder / f"workers_{num_ranks}.log"
        return start_sharded(config.for_trainer, runtime, log_file=log_file)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "local": local,
    "2 lanes": in_lanes,
    **{f"{num} ranks": partial(sharded, num) for num in (1, 2, 4)},
    "2 ranks, ring": partial(sharded, 2, backend={"context_parallel_size": 2}),
    "2 ranks, heads": partial(sharded, 2, backend={"sequence_parallel_size": 2}),
}


def splits_micro_batches(trainer: Trainer) -> bool:
    """Return whether lanes or ranks share a micro-batch."""
    if isinstance(trainer, ShardedTrainer):
        return trainer.config.trainer.backend.ranks_per_micro_batch > 1
    return isinstance(trainer, LocalTrainer) and trainer.lanes is not None


@dataclass
class Bench:
    """A trainer, the state that it began with, and a local one beside it to compare with."""

    trainer: Trainer
    beside: LocalTrainer
    config: RunConfig
    folder: Path
    start: State = field(init=False)
    num_saved: int = 0

    def __post_init__(self) -> None:
        self.start = self.saved()

    def saved(self) -> State:
        """What the trainer saves, whole, by way of a local trainer that loads it."""
        self.num_saved += 1
        folder = self.folder / f"saved_{self.num_saved}"
        folder.mkdir()
        self.trainer.save(folder)
        self.beside.load(folder)
        return whole(self.beside)

    def begin(self) -> Trainer:
        """Both as they were at the beginning."""
        self.trainer.load(self.folder / "saved_1")
        self.beside.load(self.folder / "saved_1")
        return self.trainer


def whole(trainer: LocalTrainer) -> State:
    """The state of a trainer that holds whole tensors, copied."""
    groups = trainer.state().items()
    return {k: {n: rows.tensor.clone() for n, rows in g.items()} for k, g in groups}


def on_bench(kind: str, folder: Path, *overrides: str, **sections: dict) -> Iterator[Bench]:
    trainer = TRAINERS[kind](folder, *overrides, **sections)
    try:
        config = tiny.config(folder, *overrides, **sections)
        yield Bench(trainer, local(folder, *overrides, **sections), config, folder)
    finally:
        trainer.close()


def kinds(*names: str) -> list[Any]:
    """Those over ranks start processes, and are tested with the others that do; two ranks stand
    for one and for four."""
    marks = {
        "1 ranks": [pytest.mark.ranks, pytest.mark.slow],
        "2 ranks": [pytest.mark.ranks],
        "4 ranks": [pytest.mark.ranks, pytest.mark.slow],
        "2 ranks, ring": [pytest.mark.ranks, pytest.mark.slow],
        "2 ranks, heads": [pytest.mark.ranks, pytest.mark.slow],
    }
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


@pytest.fixture(scope="module", params=kinds(*TRAINERS))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    clip = f"trainer.max_grad_norm={MAX_GRAD_NORM}"
    yield from on_bench(request.param, tmp_path_factory.mktemp("trainer"), clip)


@pytest.fixture(scope="module", params=kinds("local", "2 ranks"))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Trains an adapter with dropout."""
    folder = tmp_path_factory.mktemp("adapter")
    sections = {"model": {"path": str(pretrained(folder)), "init": "pretrained"}}
    yield from on_bench(request.param, folder, **sections, lora={"rank": 4, "dropout": 0.3})


def pretrained(folder: Path) -> Path:
    target = tiny.write_model(folder / "pretrained")
    trainer = local(folder)
    save_hf(trainer.weights(POLICY), target, source_config=trainer.sheet.source_config)
    return target


def rows(num: int = 9, seed: int = 0) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    made = []
    for row_id in range(num):
        length = int(rng.integers(2, 40))
        weights = (rng.random(length) < 0.6).astype(np.float32) * rng.choice([0.5, 1.0, 2.0])
        weights[-1] = 1.0
        made.append(TokenRow(row_id, rng.integers(0, 299, length), weights))
    return made


def batches(split: Sequence[list[TokenRow]]) -> list[TrainBatch]:
    return [TrainBatch.of(part) for part in split]


def update(
    trainer: Trainer,
    split: Sequence[list[TokenRow]],
    spec: LossSpec,
    *,
    step: int = 1,
    learning_rate: float = 1e-2,
) -> UpdateReport:
    trainer.accumulate(POLICY, batches(split), spec, step=step)
    return trainer.apply(POLICY, step=step, learning_rate=learning_rate)


def assert_same(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for stem, group in left.items():
        for name, tensor in group.items():
            assert torch.equal(tensor, right[stem][name]), (stem, name)


def gradients(state: State, report: UpdateReport, clip: float = MAX_GRAD_NORM) -> State:
    """Of the one update since the start: its first moments are the clipped gradient's share."""
    scale = min(1.0, clip / (report.grad_norm + 1e-6)) * (1 - BETA1)
    moments = {n: t for n, t in state["optimizer"].items() if n.startswith("exp_avg.")}
    return {"gradient": {name: tensor / scale for name, tensor in moments.items()}}


def assert_close(left: State, right: State, *, rel: float) -> None:
    for stem, group in right.items():
        for name, tensor in group.items():
            largest = float(tensor.abs().max())
            torch.testing.assert_close(left[stem][name], tensor, rtol=rel, atol=rel * largest)


def splits(data: list[TokenRow]) -> list[list[list[TokenRow]]]:
    """All in one, one by one, three unequal parts, and as packing would have it."""
    bins = pack([len(row) for row in data], 64, multiple_of=2)
    packed = [[data[index] for index in chosen] for chosen in bins]
    return [[data], [[row] for row in data], [data[5:], data[:2], data[2:5]], packed]


@pytest.mark.parametrize("normalise", ["token", pytest.param("row", marks=pytest.mark.slow)])
def test_the_gradient_is_the_local_one_whatever_the_split(bench: Bench, normalise: str) -> None:
    data = rows(seed=int(np.random.default_rng().integers(1 << 30)))
    spec = loss_spec(SftConfig(normalise=normalise), data)
    bench.begin()
    expected = update(bench.beside, [data], spec, learning_rate=0.0)
    gradient = gradients(whole(bench.beside), expected)
    for split in splits(data):
        report = update(bench.begin(), split, spec, learning_rate=0.0)
        assert report.loss == pytest.approx(expected.loss, rel=1e-6)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert report.num_micro_batches == len(split)
        assert_close(gradients(bench.saved(), report), gradient, rel=1e-5)


def test_an_adapter_learns_as_the_local_one_with_the_same_dropout(adapted: Bench) -> None:
    data = rows()
    spec = loss_spec(SftConfig(), data)
    for split in splits(data):
        adapted.begin()
        for step in (1, 2):
            report = update(adapted.trainer, split, spec, step=step)
            expected = update(adapted.beside, [data], spec, step=step)
            assert report.loss == pytest.approx(expected.loss, rel=1e-6)
        learned = whole(adapted.beside)["model"]
        # AdamW divides by the gradient's size: rounding counts where that is small.
        assert_close({"model": adapted.saved()["model"]}, {"model": learned}, rel=1e-4)
    other = update(adapted.begin(), [data], spec, step=2)
    same = update(adapted.begin(), [data], spec, step=1)
    assert other.grad_norm != same.grad_norm, "the step keys dropout"


def test_the_loss_is_that_of_full_logits_in_float64(bench: Bench) -> None:
    trainer, data = bench.begin(), rows()
    spec = loss_spec(SftConfig(), data)
    total, model = 0.0, bench.beside.roles[Role.POLICY].model
    for row in data:
        batch = TrainBatch.of([row])
        tokens = torch.from_numpy(batch.tokens_N)
        layout = PackedLayout.of([len(row)], torch.device("cpu"))
        hidden = model.hidden(tokens, torch.from_numpy(batch.positions_N), layout)
        logits = hidden.double() @ model.output_weight().double().T
        logp = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        total -= float((logp.detach() * torch.from_numpy(row.weights_T[1:])).sum())
    weights = sum(float(row.weights_T[1:].sum()) for row in data)
    report = update(trainer, [data[:4], data[4:]], spec)
    assert report.loss == pytest.approx(total / weights, rel=1e-6)


def test_discard_undoes_what_was_begun(bench: Bench) -> None:
    data = rows()
    spec = loss_spec(SftConfig(), data)
    update(bench.begin(), [data], spec)
    expected = bench.saved()
    trainer = bench.begin()
    trainer.accumulate(POLICY, batches([data[:3]]), replace(spec, denominator=0.1), step=1)
    trainer.discard(POLICY)
    update(trainer, [data], spec)
    assert_same(bench.saved(), expected)


def test_what_is_not_finite_is_never_applied(bench: Bench) -> None:
    trainer, data = bench.begin(), rows()
    spec = loss_spec(SftConfig(), data)
    report = update(trainer, [data[:5], data[5:]], replace(spec, denominator=1e-45))
    assert not report.applied
    assert_same(bench.saved(), bench.start)
    assert update(trainer, [data], spec, step=2).applied


def test_the_rows_behind_a_number_that_is_not_finite_are_found(bench: Bench) -> None:
    """A weight of 1e38 on one row overflows the loss of that row alone."""
    trainer, data = bench.begin(), rows()
    spec = loss_spec(SftConfig(), data)
    bad = replace(data[4], weights_T=data[4].weights_T * np.float32(3e38))
    poisoned = [*data[:4], bad, *data[5:]]
    plan = StepPlan(1, 0, tuple(batches([poisoned[:3], poisoned[3:]])), spec)
    trainer.accumulate(POLICY, plan.micro_batches, spec, step=1)
    assert not trainer.apply(POLICY, step=1, learning_rate=1e-2).applied
    found, origin = trainer.trace_nonfinite(plan)
    expected, expected_origin = bench.beside.trace_nonfinite(plan)
    assert [row.row_id for row in found] == [row.row_id for row in expected] == [bad.row_id]
    assert (origin.direction, origin.module) == (expected_origin.direction, expected_origin.module)
    assert update(trainer, [data], spec).applied


def test_state_put_back_goes_on_to_the_same_bits(bench: Bench) -> None:
    data = rows()
    spec = loss_spec(SftConfig(), data)
    update(bench.begin(), [data], spec, step=1)
    bench.saved()
    middle = bench.folder / f"saved_{bench.num_saved}"
    reports = [update(bench.trainer, [data], spec, step=step) for step in (2, 3)]
    straight = bench.saved()
    bench.trainer.load(middle)
    again = [update(bench.trainer, [data], spec, step=step) for step in (2, 3)]
    assert [r.loss for r in again] == [r.loss for r in reports]
    assert_same(bench.saved(), straight)


def test_the_update_is_torchs_adamw_with_clipping(bench: Bench) -> None:
    trainer, data = bench.begin(), rows()
    reference = bench.beside
    spec = loss_spec(SftConfig(), data)
    named = dict(reference.roles[POLICY].model.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    )
    for step in range(1, 4):
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * step
        report = update(trainer, [data], spec, step=step, learning_rate=1e-2 * step)
        reference.accumulate(POLICY, batches([data]), spec, step=step)
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), MAX_GRAD_NORM)
        adamw.step()
        reference.discard(POLICY)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)
    expected = {name: param.detach().clone() for name, param in named.items()}
    for name, param in bench.saved()["model"].items():
        # Parts of a micro-batch are summed in another order, and where a gradient is next to
        # nothing Adam makes a step of what rounding left of it.
        atol = 3e-5 if splits_micro_batches(bench.trainer) else 1e-6
        torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=atol)


def test_rows_are_named_with_their_losses_and_log_probs(bench: Bench) -> None:
    trainer, data = bench.begin(), rows()
    batch = TrainBatch.of(data)
    (logp_M,) = score(bench.beside, POLICY, [batch])
    index_M, row_of_M = map(torch.from_numpy, predicted_positions(batch))
    report = update(trainer, [data[4:], data[:1], data[1:4]], loss_spec(SftConfig(), data))
    by_id = dict(zip(report.row_ids_B.tolist(), report.row_losses_B.tolist(), strict=True))
    weights_M = torch.from_numpy(batch.weights_N)[index_M]
    zeros = torch.zeros(len(data))
    nll_B = zeros.index_add(0, row_of_M, -torch.from_numpy(logp_M) * weights_M)
    expected = (nll_B / zeros.index_add(0, row_of_M, weights_M)).tolist()
    logp_by_id = dict(zip(report.row_ids_B.tolist(), report.row_logp, strict=True))
    for number, (row, loss) in enumerate(zip(data, expected, strict=True)):
        assert by_id[row.row_id] == pytest.approx(loss, rel=1e-5)
        own_M = logp_M[row_of_M.numpy() == number]
        assert logp_by_id[row.row_id] == pytest.approx(own_M, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_come_in_the_order_of_their_batches(bench: Bench, temperature: float) -> None:
    trainer, data = bench.begin(), rows()
    split = batches([[row] for row in data[:5]] + [data[5:]])
    found = score(trainer, POLICY, split, temperature=temperature)
    expected = score(bench.beside, POLICY, split, temperature=temperature)
    assert [len(logp_M) for logp_M in found] == [len(logp_M) for logp_M in expected]
    for logp_M, expected_M in zip(found, expected, strict=True):
        np.testing.assert_allclose(logp_M, expected_M, rtol=1e-6)


def test_outputs_are_the_local_ones_and_hidden_states_come_reduced(bench: Bench) -> None:
    trainer, data = bench.begin(), rows()
    split = batches([data[:2], data[2:5], data[5:]])
    asked = Outputs(logp=True, entropy=True, hidden=(0, 2), reducer="mean_of_trained")
    found, expected = (each.forward(POLICY, split, asked) for each in (trainer, bench.beside))
    for batch, one, other in zip(split, found, expected, strict=True):
        np.testing.assert_allclose(one.logp_M, other.logp_M, rtol=1e-5)
        np.testing.assert_allclose(one.entropy_M, other.entropy_M, rtol=1e-5)
        assert list(one.hidden) == [0, 2]
        for layer, reduced in one.hidden.items():
            assert len(reduced) == batch.num_rows
            np.testing.assert_allclose(reduced, other.hidden[layer], rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="no value head"):
        trainer.forward(POLICY, split, Outputs(value=True))
    assert trainer.forward(POLICY, split[:1], Outputs(logp=True))[0].entropy_M is None


def test_a_batch_that_lacks_a_column_of_its_loss_is_refused(bench: Bench) -> None:
    trainer, data = bench.begin(), rows()
    with pytest.raises(LossInputError, match="'policy' needs the column 'advantage'"):
        trainer.accumulate(POLICY, batches([data]), LossSpec("policy", 1.0), step=1)
    assert update(trainer, [data], loss_spec(SftConfig(), data)).applied


def test_weights_leave_whole_and_under_their_names(bench: Bench, tmp_path: Path) -> None:
    check_weights(bench, tmp_path)


def test_an_adapter_leaves_merged_and_under_its_names(adapted: Bench, tmp_path: Path) -> None:
    check_weights(adapted, tmp_path)


def check_weights(bench: Bench, tmp_path: Path) -> None:
    """Packed to travel, twice by one packer; as HF files; and as checksums."""
    trainer, data = bench.begin(), rows()
    update(trainer, [data], loss_spec(SftConfig(), data))
    bench.saved()
    transport = SharedMemoryTransport(f"homeostat-test-{tmp_path.name}-{id(bench)}", 4096)
    packer, receiver = transport.packer(), transport.receiver(0, 1)
    expected = {name: tensor.clone() for name, tensor in bench.beside.weights(POLICY)}
    for _ in range(2):
        found = {}
        for bucket in trainer.weight_buckets(POLICY, packer):
            found |= {name: tensor.clone() for name, tensor in receiver.unpack(bucket)}
        assert list(found) == list(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
    receiver.close()
    packer.close()
    assert dict(trainer.checksums(Role.POLICY)) == dict(bench.beside.checksums(Role.POLICY))
    for each, name in ((trainer, "own"), (bench.beside, "beside")):
        each.export(Role.POLICY, tmp_path / name, bench.config.for_export)
    own, beside = (sorted((tmp_path / name).iterdir()) for name in ("own", "beside"))
    assert [file.name for file in own] == [file.name for file in beside]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(own, beside, strict=True))


def test_what_it_says_of_itself_is_true(bench: Bench) -> None:
    trainer = bench.begin()
    bench.saved()
    files = (bench.folder / f"saved_{bench.num_saved}").iterdir()
    on_disk = sum(file.stat().st_size for file in files)
    assert trainer.state_bytes <= on_disk < 2 * trainer.state_bytes + 2**16
    assert trainer.device_report().max_alloc > 2**20
    sheet, beside = trainer.sheet, bench.beside.sheet
    assert sheet.num_params == beside.num_params
    assert sheet.num_trainable == beside.num_trainable
    assert sheet.source_config == beside.source_config


def test_bf16_keeps_fp32_masters_gradients_and_moments(tmp_path: Path) -> None:
    """Seen from inside, so of the local trainer alone."""
    trainer, data = local(tmp_path, "trainer.precision=bf16"), rows()
    spec = loss_spec(SftConfig(), data)
    before = {
        name: param.data_ptr()
        for name, param in trainer.roles[Role.POLICY].model.named_parameters()
    }
    start = trainer.roles[Role.POLICY].training.optimizer.masters["model.norm.weight"].clone()
    for step in range(1, 9):
        assert update(trainer, [[r] for r in data], spec, step=step, learning_rate=1e-4).applied
    for name, param in trainer.roles[Role.POLICY].model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert param.data_ptr() == before[name]
        master = trainer.roles[Role.POLICY].training.optimizer.masters[name]
        assert master.dtype == torch.float32
        assert torch.equal(param, master.bfloat16())
    # Eight steps of 1e-4 are lost in bf16 near 1.0 (spacing 2**-8) and kept by the master.
    moved = (
        (trainer.roles[Role.POLICY].training.optimizer.masters["model.norm.weight"] - start)
        .abs()
        .max()
    )
    assert 1e-4 < float(moved) < 2**-8
