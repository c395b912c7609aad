"""The simulator of the loop against references that are computed in another way."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homeostat.errors import DoesNotFitError, PlanError
from homeostat.models.families import decoder_config
from homeostat.run.sizing.scale import SHAPES, read_shape, shape_names
from homeostat.simulator.engine import Engine, EngineModel
from homeostat.simulator.fit import Measured, fit, predicted, stage_work
from homeostat.simulator.layout import Layout
from homeostat.simulator.loop import simulate
from homeostat.simulator.machine import load_machine, machine_names
from homeostat.simulator.memory import activation_bytes, trainer_memory
from homeostat.simulator.plan import make_plan
from homeostat.simulator.publication import publish_seconds
from homeostat.simulator.published import compare
from homeostat.simulator.rates import RATE_NAMES
from homeostat.simulator.search import Job, best_candidate, least_gpus
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.training import train_seconds
from homeostat.simulator.workload import Lengths, Workload

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
H200 = load_machine("h200")
SMALL = ModelShape("0.5b", 24, 896, 14, 2, 64, 4864, 151_936, tied=True)
MIDDLE = ModelShape("1.5b", 28, 1536, 12, 2, 128, 8960, 151_936, tied=True)
WORK = Workload(16, 8, 64, Lengths(200, 512, 0.6), max_tokens=16384, reward_workers=8)


def measured(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", shape_names())
def test_a_shape_has_the_parameters_of_its_decoder(name: str) -> None:
    raw = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
    decoder, shape = decoder_config(raw), read_shape(name)
    assert shape.num_params == pytest.approx(decoder.num_params, rel=1e-3)
    # An embedding is looked up, not multiplied with.
    active = decoder.num_active_params - (0 if shape.tied else shape.head_params)
    assert shape.active_params == pytest.approx(active, rel=1e-3)


def test_the_planned_models_have_their_published_sizes() -> None:
    sizes = {name: read_shape(name).num_params / 1e9 for name in shape_names()}
    assert sizes["qwen2.5-7b"] == pytest.approx(7.6, rel=0.01)
    assert sizes["llama3.1-70b"] == pytest.approx(70.6, rel=0.01)
    assert sizes["qwen3-235b-a22b"] == pytest.approx(235, rel=0.01)
    assert read_shape("qwen3-235b-a22b").active_params / 1e9 == pytest.approx(22, rel=0.05)


def test_decoding_equals_a_loop_over_single_steps() -> None:
    model = EngineModel(SMALL, H200.rates, max_batch=5)
    rng = random.Random(3)
    lengths = [rng.randint(1, 40) for _ in range(23)]
    engine = Engine(model)
    for request, new in enumerate(lengths):
        engine.submit(request, prompt=16, new=new, computes_prompt=request % 4 == 0)
    ended: dict[int, float] = {}
    while engine.next_end() is not None:
        for request in engine.advance():
            ended[request] = engine.now
    expected = step_by_step(model, lengths, prompt=16)
    assert ended == pytest.approx(expected, rel=1e-9)


def step_by_step(model: EngineModel, lengths: list[int], *, prompt: int) -> dict[int, float]:
    waiting, running, now = list(enumerate(lengths)), {}, 0.0
    ended: dict[int, float] = {}
    while waiting or running:
        admitted = waiting[: model.max_batch - len(running)]
        del waiting[: len(admitted)]
        if admitted:
            computed = sum(request % 4 == 0 for request, _ in admitted)
            now += model.rates.seconds(model.prefill_work(computed, prompt, len(admitted)))
        running |= {request: [prompt, new] for request, new in admitted}
        cached = sum(context for context, _ in running.values())
        now += model.rates.seconds(model.step_work(len(running), cached, 1.0))
        for request, state in list(running.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if not state[1]:
                ended[request] = now
                del running[request]
    return ended


def test_a_synchronous_step_is_the_sum_of_its_stages() -> None:
    step = simulate(SMALL, WORK, Layout(1, 1), H200)
    stages = predicted(step)
    assert step.step_s == pytest.approx(sum(stages.values()) - stages["step"])


def test_staleness_overlaps_sampling_with_training_and_never_beats_the_slower_side() -> None:
    sync = simulate(MIDDLE, WORK, Layout(1, 1, colocated=False), H200)
    stale = simulate(MIDDLE, WORK, Layout(1, 1, colocated=False, max_staleness=1), H200)
    trainer = stale.score_s + stale.train_s + stale.other_s
    assert stale.step_s < 0.95 * sync.step_s
    assert stale.step_s >= trainer
    assert max(stale.trainer_busy, stale.engines_busy) <= 1.0
    staler = simulate(MIDDLE, WORK, Layout(1, 1, colocated=False, max_staleness=3), H200)
    assert staler.step_s <= stale.step_s * 1.001


def test_rewards_run_beside_sampling_as_far_as_there_are_workers() -> None:
    slow = replace(WORK, reward_s=0.2, reward_workers=1)
    one = simulate(SMALL, slow, Layout(1, 1), H200)
    many = simulate(SMALL, replace(slow, reward_workers=16), Layout(1, 1), H200)
    calls = slow.prompts * slow.reward_s
    assert one.generate_s + one.reward_s >= calls
    assert 0.2 <= many.reward_s < 0.25
    # The first groups end before the last: part of the calls is hidden behind sampling.
    assert one.reward_s < calls


def test_the_drawn_lengths_have_the_mean_that_was_asked_for() -> None:
    lengths = Lengths(4000, 16384, 0.6)
    drawn = lengths.draw(4096)
    assert sum(drawn) / len(drawn) == pytest.approx(4000, rel=0.02)
    assert max(drawn) == 16384
    assert sorted(drawn) == sorted(lengths.draw(4096, step=1))
    assert drawn != lengths.draw(4096, step=1)


@pytest.mark.parametrize("shape", ["0.5b", "1.5b"])
def test_decoding_on_an_h200_is_as_measured(shape: str) -> None:
    rows = measured("engine_decode")[shape]
    for batch in (1, 32, 256):
        row = rows[f"batch_{batch}"]
        model = EngineModel(SMALL if shape == "0.5b" else MIDDLE, H200.rates)
        cached = batch * (64 + row["new_tokens"] / 2)
        per_step, per_token = model.step_cost(batch)
        step_ms = 1000 * (per_step + per_token * cached)
        assert step_ms == pytest.approx(row["step_ms"], rel=0.15), batch


def test_a_step_on_an_h200_is_as_measured() -> None:
    found = measured("grpo_step_gpu")
    work = Workload(32, 8, 64, Lengths(512, 512), max_tokens=18432)
    step = simulate(SMALL, work, Layout(1, 1), H200)
    stages = found["homeostat"]["stages_s"]
    assert step.step_s == pytest.approx(stages["step"], rel=0.15)
    assert step.generate_s == pytest.approx(stages["generate"], rel=0.15)
    assert step.train_s == pytest.approx(stages["train"], rel=0.15)


def test_held_and_kept_bytes_are_as_measured() -> None:
    row = next(r for r in measured("estimate_cuda")["rows"] if "1.5B bf16, 8k" in r["setup"])
    work = Workload(1, 2, 1, Lengths(1, 1), max_tokens=8192)
    memory = trainer_memory(MIDDLE, work, Layout(1, 1))
    assert memory.training == pytest.approx(row["measured_bytes"], rel=0.15)
    # Ranks hold fp32 masters and moments; one GPU has bf16 weights beside its masters.
    sharded = trainer_memory(MIDDLE, work, Layout(8, 8))
    assert sharded.weights + sharded.optimizer == pytest.approx(12 * MIDDLE.num_params / 8)
    assert memory.weights + memory.optimizer == pytest.approx(14 * MIDDLE.num_params)
    away = trainer_memory(MIDDLE, work, Layout(8, 8, offload_optimizer=True, offload_params=True))
    assert away.training == sharded.work
    assert away.host == pytest.approx(16 * MIDDLE.num_params / 8)
    recomputing = Layout(1, 1, gradient_checkpointing=True)
    assert activation_bytes(MIDDLE, work, recomputing) < memory.work / 3


def test_rates_are_found_again_from_two_steps() -> None:
    """A machine that is slower in some respects is recognised by two configurations."""
    changed = {"train_flop": 1.6, "pass_layer": 2.0, "weight_byte": 1.5, "decode_layer": 1.4}
    rates = {name: getattr(H200.rates, name) * factor for name, factor in changed.items()}
    true = replace(H200, rates=replace(H200.rates, **rates))
    cases = [
        (SMALL, Workload(16, 8, 64, Lengths(256, 256), updates=2, scored=1)),
        (MIDDLE, Workload(8, 4, 64, Lengths(1024, 1024))),
        (SMALL, Workload(32, 8, 64, Lengths(512, 512))),
        (MIDDLE, Workload(16, 8, 256, Lengths(300, 700, 0.5))),
    ]
    steps = [simulate(shape, work, Layout(1, 1), true) for shape, work in cases]
    given = [
        Measured("", shape, work, predicted(step))
        for (shape, work), step in zip(cases[:2], steps, strict=False)
    ]
    # Its file says that some rates are nearly certain; here none is.
    fitted = fit(replace(H200, uncertainty=()), given)
    assert fitted.rates.train_flop > fit(H200, given).rates.train_flop
    for (shape, work), step in zip(cases, steps, strict=True):
        before = simulate(shape, work, Layout(1, 1), H200).step_s
        after = simulate(shape, work, Layout(1, 1), fitted).step_s
        assert abs(after / step.step_s - 1) < 0.03
        assert abs(before / step.step_s - 1) > 0.15


def test_the_work_of_a_stage_gives_its_seconds() -> None:
    case = Measured("", SMALL, Workload(16, 8, 64, Lengths(256, 256), updates=2, scored=1), {})
    stages = predicted(simulate(SMALL, case.workload, Layout(1, 1), H200))
    works = stage_work(case, H200)
    for stage in ("generate", "reward", "score", "train", "other"):
        assert H200.rates.seconds(works[stage]) == pytest.approx(stages[stage], rel=1e-6), stage


def test_more_shards_cost_transfers_and_a_slow_network_exposes_them() -> None:
    shape, work = read_shape("llama3.1-70b"), replace(WORK, prompts=512, samples=16)
    fast = train_seconds(shape, work, Layout(64, 64), H200)
    slow = train_seconds(shape, work, Layout(64, 64), replace(H200, network_bytes_per_s=1e9))
    assert fast.compute_s == slow.compute_s
    assert slow.exposed_s > 10 * fast.exposed_s


def test_a_broadcast_takes_its_bytes_over_one_network_card() -> None:
    shape = read_shape("qwen3-30b-a3b")
    layout = Layout(8, 8, colocated=False, tensor_parallel_size=8)
    seconds = publish_seconds(shape, WORK, layout, H200)
    assert seconds == pytest.approx(2 * shape.num_params / H200.network_bytes_per_s, rel=0.05)
    adapter = replace(WORK, adapter_params=10**7)
    assert publish_seconds(shape, adapter, layout, H200) < seconds / 100


def test_what_cannot_fit_is_refused_with_the_sums() -> None:
    job = Job(read_shape("qwen3-235b-a22b"), WORK, H200)
    with pytest.raises(DoesNotFitError, match=r"3,761 GB over 8 GPUs are 470\.2 GB each, of 150"):
        best_candidate(job, 8)
    least = least_gpus(job)
    assert least is not None
    assert least > 8
    found = best_candidate(job, least)
    assert found.memory.peak <= H200.memory_bytes


def test_a_split_is_whole_and_uses_all_gpus() -> None:
    job = Job(read_shape("qwen3-235b-a22b"), replace(WORK, prompts=64), H200)
    for staleness in (0, 1):
        layout = best_candidate(job, 64, max_staleness=staleness).layout
        layout.check(job.shape, node_gpus=8)
        assert layout.gpus == 64
        assert layout.max_staleness == staleness
        assert layout.colocated == (layout.trainer_gpus == layout.engine_gpus == 64)
    with pytest.raises(PlanError, match="experts"):
        Layout(64, 64, expert_parallel_size=48).check(job.shape, node_gpus=8)
    with pytest.raises(PlanError, match="while it trains"):
        Layout(64, 64, max_staleness=1).check(job.shape, node_gpus=8)


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("rewards", Job(SMALL, replace(WORK, reward_s=2.0, reward_workers=1), H200)),
        (
            "train compute",
            Job(SMALL, replace(WORK, epochs=8), H200),
        ),
        (
            "network",
            Job(MIDDLE, WORK, replace(H200, link_bytes_per_s=1e9, network_bytes_per_s=1e9)),
        ),
        (
            "decode launches",
            Job(SMALL, replace(WORK, prompts=2, lengths=Lengths(512, 512)), H200),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_scarce_binds_first(name: str, job: Job) -> None:
    plan = make_plan(job, 8)
    assert plan.first == name
    assert plan.binds[0].step_s < plan.best.step.step_s


def test_every_machine_has_every_rate_and_says_where_it_comes_from() -> None:
    for name in machine_names():
        machine = load_machine(name)
        assert set(machine.rates.as_dict()) == set(RATE_NAMES)
        assert all(rate > 0 for rate in machine.rates.as_dict().values())
        assert machine.sources
    with pytest.raises(PlanError, match="h200"):
        load_machine("abacus")


def test_a_bad_machine_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("memory_bytes = 1e9\n[rates]\nstep_s = 1\n", encoding="utf-8")
    with pytest.raises(PlanError, match=r"mine\.toml"):
        load_machine(str(file))


def test_published_figures_stand_beside_ours() -> None:
    rows = compare(read_shape, only="qwen3-30b-a3b")
    assert {row.what.split(",")[0] for row in rows} == {"step", "publication"}
    assert all(row.source and row.theirs_s > 0 and 0.1 < row.ratio < 10 for row in rows)
