"""What only a GPU can show: bf16 kernels against the reference, memory trouble, traces.

Each test has a twin on the CPU (tests/contract, tests/integration, tests/unit).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.contract.test_trainer_contract import rows
from tests.support import runs, tiny

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.models.build import load_model
from homeostat.observe.jsonl import read_metrics
from homeostat.run.sizing.token_budget import MOST_TOKENS
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import Role, TrainBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trainer(tmp_path: Path, device: str, dtype: torch.dtype, *overrides: str) -> LocalTrainer:
    config = tiny.config(tmp_path, *overrides)
    runtime = Runtime(torch.device(device), dtype, threads=1, pin_memory=device == "cuda")
    loaded = load_model(
        config.model, config.lora, dtype=dtype, device=runtime.device, seed=0,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
    )  # fmt: skip
    models = {Role.POLICY: RoleModel(loaded, config.trainer)}
    return LocalTrainer(models, config.trainer, runtime=runtime, seed=0)


def losses_of(made: LocalTrainer, num_steps: int) -> list[float]:
    data, found = rows(16), []
    spec = loss_spec(SftConfig(), data)
    for step in range(1, num_steps + 1):
        made.accumulate(Role.POLICY, [TrainBatch.of(data)], spec, step=step)
        found.append(made.apply(Role.POLICY, step=step, learning_rate=1e-3).loss)
    return found


def test_fp32_on_the_gpu_follows_the_cpu(tmp_path: Path) -> None:
    found = losses_of(trainer(tmp_path, "cuda", torch.float32), 10)
    assert found == pytest.approx(losses_of(trainer(tmp_path, "cpu", torch.float32), 10), rel=1e-4)


@pytest.mark.parametrize("kernel", ["varlen", "sdpa", "eager"])
def test_bf16_learns_as_fp32_does(tmp_path: Path, kernel: str) -> None:
    made = trainer(tmp_path, "cuda", torch.bfloat16, f"model.attention={kernel}")
    found = losses_of(made, 20)
    reference = losses_of(trainer(tmp_path, "cpu", torch.float32), 20)
    assert found == pytest.approx(reference, rel=2e-2)


def test_gradient_checkpointing_costs_less_memory(tmp_path: Path) -> None:
    """Of a forward and backward pass over many rows: in an update the optimizer may need more."""
    data, peaks = rows(400), []
    spec = loss_spec(SftConfig(), data)
    tiny.write_model(tmp_path / "model", hidden_size=512, intermediate_size=2048)
    for flag in ("false", "selective", "true"):
        made = trainer(tmp_path, "cuda", torch.bfloat16, f"trainer.gradient_checkpointing={flag}")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made.accumulate(Role.POLICY, [TrainBatch.of(data)], spec, step=1)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del made
        torch.cuda.empty_cache()
    assert peaks[2] < peaks[1] < peaks[0]


def test_memory_trouble_is_retried_smaller_and_names_call_sites(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model", hidden_size=1024, intermediate_size=4096)
    rows_file = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 1000}]
    rows_file.write_text("\n".join([json.dumps({"messages": messages})] * 64))
    raw = tiny.recipe(
        tmp_path,
        name="starved",
        data={"train": [{"type": "messages", "path": str(rows_file)}], "max_length": 2048},
        trainer={"max_steps": 3, "batch_rows": 64, "max_tokens_per_device": 65536, "lr": 1e-3},
    )
    total = torch.cuda.get_device_properties(0).total_memory
    share = 2.5 * 2**30 / total
    prelude = f"import torch; torch.cuda.set_per_process_memory_fraction({share})"
    process = runs.start(raw, tmp_path, prelude=prelude)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    config = tiny.build_config(raw, [], file=None)
    first = runs.events(config, "oom_retry")[0]
    snapshot = json.loads((config.run_dir / first["snapshot"]).read_text())
    assert any("decoder.py" in entry["site"] for entry in snapshot["largest"])
    plain = tiny.build_config({**raw, "name": "plain"}, [], file=None)
    runs.train(plain)
    assert runs.losses(config) == pytest.approx(runs.losses(plain), rel=2e-2)


def test_traces_snapshots_and_device_metrics_are_written(tmp_path: Path) -> None:
    config = tiny.config(
        tmp_path,
        trainer={"max_steps": 4, "empty_cache_interval": 2},
        observe={"console": "quiet", "report": False, "profiler": {"steps": [2]}},
    )
    runs.train(config)
    names = {path.name for path in (config.run_dir / "trace").iterdir()}
    assert {"step_00000002.json", "step_00000002_top.txt", "step_00000002_memory.pickle"} <= names
    records = read_metrics(config.run_dir / "metrics.jsonl")
    assert records[-1]["memory/max_alloc"] > 0
    pytest.importorskip("pynvml")
    assert records[-1]["gpu/0/memory_used"] > 0
    assert 0 <= records[-1]["gpu/0/utilization"] <= 1


def test_a_run_on_the_gpu_goes_on_where_it_stopped(tmp_path: Path) -> None:
    straight = tiny.config(tmp_path, name="straight", trainer={"max_steps": 8})
    runs.train(straight)
    rewound = tiny.config(
        tmp_path, name="straight", trainer={"max_steps": 8}, checkpoint={"load_step": 6}
    )
    before = runs.losses(straight)
    runs.train(rewound)
    # Atomic sums of the backward pass come in any order: equal to rounding, not to the bit.
    assert runs.losses(rewound) == pytest.approx(before, rel=1e-2)


def test_lora_and_transformers_run_in_bf16(tmp_path: Path) -> None:
    start = tiny.config(tmp_path, name="start", checkpoint={"export": "final"})
    export = runs.train(start).export
    assert export is not None
    for implementation in ("native", "transformers"):
        config = tiny.config(
            tmp_path,
            name=f"lora_{implementation}",
            model={"path": str(export), "init": "pretrained", "implementation": implementation},
            lora={"rank": 8, "dropout": 0.1},
            trainer={"max_steps": 12},
        )
        runs.train(config)
        found = runs.losses(config)
        assert found[-1] < found[0]


def test_a_run_that_does_not_say_takes_as_many_tokens_as_help(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "trainer.device=cuda", "trainer.max_tokens_per_device=null")
    runs.train(config)
    stored = CheckpointStore(config.run_dir / "checkpoints").newest_valid()
    assert stored is not None
    assert stored.section("run")["chosen_tokens"] == MOST_TOKENS
