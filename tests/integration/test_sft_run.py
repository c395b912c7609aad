"""Whole runs of a tiny model: they learn, stop, go on to the same bits, and survive trouble."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.support import runs, tiny

from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import ConfigError, DataError, ModelError, RunDirError, TrainingHaltedError
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.saving.shards import TensorReader


def test_a_run_learns_and_leaves_all_its_files(tmp_path: Path) -> None:
    config = tiny.config(
        tmp_path,
        trainer={"max_steps": 40},
        data={"validation_share": 0.2},
        eval={"interval_steps": 20},
        checkpoint={"export": "final", "interval_steps": 20},
        observe={"report": True, "console": "quiet"},
    )
    result = runs.train(config)
    losses = runs.losses(config)
    assert len(losses) == 40
    assert losses[-1] < 0.6 * losses[0]
    names = {path.name for path in config.run_dir.iterdir()}
    assert names >= {
        "config.json", "config.yaml", "metrics.jsonl", "events.jsonl", "row_losses.jsonl",
        "checkpoints", "console.log", "report.html",
    }  # fmt: skip
    assert result.export is not None
    assert (result.export / "model.safetensors").is_file()
    assert (result.export / "tokenizer.json").is_file()


def test_the_export_is_the_trained_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = tiny.config(tmp_path, checkpoint={"export": "final"})
    result = runs.train(config)
    assert result.export is not None
    model = AutoModelForCausalLM.from_pretrained(result.export)
    stored = CheckpointStore(config.run_dir / "checkpoints").newest_valid()
    assert stored is not None
    for name, tensor in TensorReader(stored.path, "model").whole().items():
        assert torch.equal(model.get_parameter(name), tensor), name
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    assert tokenizer.chat_template


@pytest.mark.parametrize("log_interval", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_stop_and_resume_is_an_uninterrupted_run_to_the_bit(
    tmp_path: Path, log_interval: int
) -> None:
    common = {
        "data": {"validation_share": 0.2},
        "eval": {"interval_steps": 3},
        "observe": {"console": "quiet", "report": False, "log_interval": log_interval},
    }
    straight = tiny.config(tmp_path, name="straight", trainer={"max_steps": 9}, **common)
    runs.train(straight)
    raw = tiny.recipe(tmp_path, name="halting", trainer={"max_steps": 9}, **common)
    process = runs.start(raw, tmp_path, prelude=stop_at(5, "SIGTERM"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    resumed = tiny.config(tmp_path, name="halting", trainer={"max_steps": 9}, **common)
    assert CheckpointStore(resumed.run_dir / "checkpoints").steps()[-1] == 5
    assert runs.events(resumed, "run_stopped")
    runs.train(resumed)
    assert runs.final_tensors(resumed) == runs.final_tensors(straight)
    assert runs.losses(resumed)[-1] == runs.losses(straight)[-1]
    assert [r["step"] for r in read_metrics(resumed.run_dir / "metrics.jsonl")][-1] == 9
    assert all_row_losses(resumed.run_dir) == all_row_losses(straight.run_dir)


def all_row_losses(run_dir: Path) -> list[dict]:
    return list(iter_jsonl(run_dir / "row_losses.jsonl"))


def stop_at(step: int, name: str) -> str:
    """Python that makes the process send itself a signal while a step is computed."""
    return f"""
import os, signal
from homeostat.train.local import LocalTrainer
original = LocalTrainer.apply
def apply(self, role, *, step, learning_rate):
    if step == {step}:
        os.kill(os.getpid(), signal.{name})
    return original(self, role, step=step, learning_rate=learning_rate)
LocalTrainer.apply = apply
"""


def test_kill_nine_loses_at_most_the_steps_since_the_last_save(tmp_path: Path) -> None:
    straight = tiny.config(tmp_path, name="straight", trainer={"max_steps": 7})
    runs.train(straight)
    raw = tiny.recipe(tmp_path, name="killed", trainer={"max_steps": 7})
    process = runs.start(raw, tmp_path, prelude=stop_at(6, "SIGKILL"))
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    killed = tiny.config(tmp_path, name="killed", trainer={"max_steps": 7})
    assert len(runs.losses(killed)) == 5
    runs.train(killed)
    assert runs.events(killed, "run_resumed")[0]["step"] == 4
    assert runs.final_tensors(killed) == runs.final_tensors(straight)
    assert runs.losses(killed) == runs.losses(straight)


def test_a_run_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """Nothing is compiled on a CPU, and importing it takes as long as torch itself."""
    seen = "heavy = {'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)"
    prelude = f"import atexit\natexit.register(lambda: exec({seen!r} + '; print(heavy)'))"
    process = runs.start(tiny.recipe(tmp_path), tmp_path, prelude=prelude)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == "set()"


def test_a_broken_checkpoint_is_passed_over_with_a_message(tmp_path: Path) -> None:
    straight = tiny.config(tmp_path, name="straight")
    runs.train(straight)
    config = tiny.config(tmp_path, name="broken")
    runs.train(config)
    newest = CheckpointStore(config.run_dir / "checkpoints").path(6) / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    runs.train(config)
    (event,) = runs.events(config, "checkpoint_skipped_invalid")
    assert event["name"] == "step_00000006"
    assert runs.final_tensors(config) == runs.final_tensors(straight)


def test_a_chosen_step_is_loaded_and_later_ones_set_aside(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, checkpoint={"keep_last": 5})
    runs.train(config)
    before = runs.final_tensors(config)
    again = tiny.config(tmp_path, checkpoint={"keep_last": 5, "load_step": 2})
    runs.train(again)
    assert runs.final_tensors(again) == before
    assert list((config.run_dir / "checkpoints").glob("set_aside_*/step_00000006"))
    with pytest.raises(OSError, match="Steps there: 2, 4, 6"):
        runs.train(tiny.config(tmp_path, checkpoint={"keep_last": 5, "load_step": 3}))


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    runs.train(config)
    metrics = (config.run_dir / "metrics.jsonl").read_bytes()
    assert runs.train(config).step == 6
    assert (config.run_dir / "metrics.jsonl").read_bytes() == metrics


def test_a_finished_run_can_be_exported_later(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    assert runs.train(config).export is None
    before = runs.final_tensors(config)
    again = tiny.config(tmp_path, checkpoint={"export": "final"})
    export = runs.train(again).export
    assert export is not None
    assert (export / "model.safetensors").is_file()
    assert runs.final_tensors(again) == before


def test_a_run_directory_does_not_mix_experiments(tmp_path: Path) -> None:
    runs.train(tiny.config(tmp_path))
    with pytest.raises(ConfigError, match=r"trainer\.batch_rows: the value is now 4"):
        runs.train(tiny.config(tmp_path, "trainer.batch_rows=4"))
    with pytest.raises(RunDirError, match=r"checkpoint\.resume=never"):
        runs.train(tiny.config(tmp_path, "checkpoint.resume=never"))
    tiny.write_rows(tmp_path / "rows.jsonl", seed=5)
    longer = tiny.config(tmp_path, trainer={"max_steps": 8})
    with pytest.raises(DataError, match="not those that the run started with"):
        runs.train(longer)


def test_more_steps_continue_a_finished_run_and_say_so(tmp_path: Path) -> None:
    runs.train(tiny.config(tmp_path))
    longer = tiny.config(tmp_path, "trainer.max_steps=8")
    assert runs.train(longer).step == 8
    assert [e["path"] for e in runs.events(longer, "config_changed")] == ["trainer.max_steps"]


def test_packed_and_unpacked_rows_give_the_same_losses(tmp_path: Path) -> None:
    packed = tiny.config(tmp_path, name="packed")
    runs.train(packed)
    raw = {"max_steps": 6, "batch_rows": 8, "lr": 1e-2, "threads": 1, "packing": False}
    raw["optimizer"] = {"type": "adamw", "weight_decay": 0.01}
    unpacked = tiny.config(tmp_path, name="unpacked")
    unpacked = unpacked.model_copy(
        update={"trainer": type(unpacked.trainer).model_validate_json(json.dumps(raw))}
    )
    runs.train(unpacked)
    assert runs.losses(unpacked) == pytest.approx(runs.losses(packed), abs=1e-5)
    assert runs.losses(unpacked)[0] == pytest.approx(runs.losses(packed)[0], abs=1e-6)


def test_transformers_and_the_native_decoder_train_alike(tmp_path: Path) -> None:
    start = tiny.config(tmp_path, name="start", checkpoint={"export": "final"})
    export = runs.train(start).export
    assert export is not None
    found = []
    for implementation in ("native", "transformers"):
        model = {"path": str(export), "init": "pretrained", "implementation": implementation}
        config = tiny.config(tmp_path, name=implementation, model=model)
        runs.train(config)
        found.append(runs.losses(config))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    config = tiny.config(
        tmp_path,
        trainer={"max_steps": 60, "lr": 0.3},
        data={"validation_share": 0.2},
        eval={"interval_steps": 1, "patience": 3},
        checkpoint={"keep_last": 1, "interval_steps": 100},
    )
    result = runs.train(config)
    assert result.step < 60
    records = read_metrics(config.run_dir / "metrics.jsonl")
    losses = {r["step"]: r["eval/loss"] for r in records}
    store = CheckpointStore(config.run_dir / "checkpoints")
    best = store.best_step()
    assert best is not None
    assert losses[best] == min(losses.values()) == result.best_eval
    assert best in store.steps()
    assert runs.train(config).step == result.step


def poisoned_model(tmp_path: Path) -> Path:
    """A model whose first MLP overflows for the token of 'f', and for no other.

    Channel 0 belongs to that token alone, and gate and up are huge there.
    """
    config = tiny.config(tmp_path)
    loaded = load_model(
        config.model, None, dtype=torch.float32, device=torch.device("cpu"), seed=0,
        gradient_checkpointing=False,
    )  # fmt: skip
    (token,) = load_tokenizer(config.model).encode("f")[0].tolist()
    trunk = loaded.module.model
    with torch.no_grad():
        trunk.embed_tokens.weight[:, 0] = 0.0
        trunk.embed_tokens.weight[token, 0] = 1.0
        trunk.layers[0].self_attn.o_proj.weight[0] = 0.0
        trunk.layers[0].mlp.gate_proj.weight[:, 0] = 5e18
        trunk.layers[0].mlp.up_proj.weight[:, 0] = 5e18
    folder = tiny.write_model(tmp_path / "poisoned")
    save_hf(loaded.module.state_dict().items(), folder, source_config=loaded.sheet.source_config)
    return folder


def test_not_finite_is_skipped_traced_to_rows_and_module(tmp_path: Path) -> None:
    model = {"path": str(poisoned_model(tmp_path)), "init": "pretrained"}
    config = tiny.config(
        tmp_path, model=model, trainer={"max_steps": 2, "batch_rows": 40, "threads": 1}
    )
    runs.train(config)
    events = runs.events(config, "step_skipped")
    assert [event["step"] for event in events] == [1, 2]
    assert "forward pass" in events[0]["origin"]
    assert "model.layers.0.mlp.down_proj" in events[0]["origin"]
    rows = list(iter_jsonl(config.run_dir / events[0]["rows_file"]))
    assert rows
    assert all("f" in row["text"].replace("<|im_", "") for row in rows)
    assert all(row["origin"].startswith(str(tmp_path / "rows.jsonl")) for row in rows)
    metrics = read_metrics(config.run_dir / "metrics.jsonl")
    assert metrics[-1]["train/skipped_steps"] == 2
    assert not math.isfinite(metrics[-1]["train/loss"])


@pytest.mark.slow
def test_single_rows_at_fault_are_borne_ten_times_as_long(tmp_path: Path) -> None:
    model = {"path": str(poisoned_model(tmp_path)), "init": "pretrained"}
    sizes = {"max_steps": 12, "batch_rows": 40, "threads": 1, "max_nonfinite_steps": 1}
    config = tiny.config(tmp_path, model=model, trainer=sizes)
    with pytest.raises(TrainingHaltedError, match="10 updates in a row were skipped"):
        runs.train(config)
    steps = [event["step"] for event in runs.events(config, "step_skipped")]
    assert steps == list(range(1, 11))


def test_halting_on_not_finite_leaves_the_reason(tmp_path: Path) -> None:
    model = {"path": str(poisoned_model(tmp_path)), "init": "pretrained"}
    config = tiny.config(
        tmp_path, "trainer.on_nonfinite=halt", model=model, trainer={"batch_rows": 40}
    )
    with pytest.raises(TrainingHaltedError, match=r"forward pass, model\.layers\.0"):
        runs.train(config)
    assert (config.run_dir / "traceback.txt").is_file()
    assert runs.events(config, "run_failed")


# Step 1 is done without a limit, and the address space that it takes is measured; step 2 may have
# the share `share` of that. The allocator is told to return what is freed at once, so that both
# steps ask for the same: what it would keep differs between machines. On aarch64 torch has another
# allocator than the system's.
RETURNS_AT_ONCE = {"MIMALLOC_DISALLOW_ARENA_ALLOC": "1", "MIMALLOC_PURGE_DELAY": "0"}
STARVED = """
import ctypes, resource, threading, time
from homeostat.train.step import GuardedStep
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536) == 1
original = GuardedStep.run
taken, is_over = [0], threading.Event()
def size():
    return int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
def watch(before):
    while not is_over.wait(0.0005):
        taken[0] = max(taken[0], size() - before)
def run(self, plan, *, learning_rate):
    if plan.step == 1:
        threading.Thread(target=watch, args=(size(),), daemon=True).start()
        result = original(self, plan, learning_rate=learning_rate)
        is_over.set()
        return result
    limit = size() + int({share} * taken[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return original(self, plan, learning_rate=learning_rate)
GuardedStep.run = run
"""


def big_recipe(tmp_path: Path, name: str, *, width: int = 256, num_rows: int = 64) -> dict:
    tiny.write_model(tmp_path / "model", hidden_size=width, intermediate_size=4 * width)
    rows = [
        json.dumps({"messages": [{"role": "user", "content": "a"},
                                 {"role": "assistant", "content": "b" * 100}]})
        for _ in range(num_rows)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return tiny.recipe(
        tmp_path,
        name=name,
        trainer={
            "max_steps": 2, "batch_rows": num_rows, "max_tokens_per_device": 16384, "threads": 1,
            "lr": 1e-3,
        },
    )  # fmt: skip


def test_out_of_memory_is_retried_smaller_with_the_same_gradient(tmp_path: Path) -> None:
    raw = big_recipe(tmp_path, "starved", num_rows=32)
    process = runs.start(raw, tmp_path, prelude=STARVED.format(share=0.4), env=RETURNS_AT_ONCE)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    config = tiny.build_config(raw, [], file=None)
    retries = runs.events(config, "oom_retry")
    assert retries
    assert retries[0]["tokens_now"] < retries[0]["tokens_before"]
    snapshot = json.loads((config.run_dir / retries[0]["snapshot"]).read_text())
    assert snapshot["largest"][0]["bytes"] > 0
    assert any("decoder.py" in entry["site"] for entry in snapshot["largest"])
    plain = tiny.build_config({**raw, "name": "plain"}, [], file=None)
    runs.train(plain)
    assert runs.losses(config) == pytest.approx(runs.losses(plain), rel=1e-5)


STARVED_EVALUATION = """
import resource, torch
from homeostat.run.evaluation import sft_measure
original = sft_measure.evaluate
def evaluate(*args):
    # A library of products takes its own memory at the first one, and ends the process without.
    torch.ones(512, 512) @ torch.ones(512, 512)
    size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    hard = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (size + {room}, hard))
    loss = original(*args)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return loss
sft_measure.evaluate = evaluate
"""


@pytest.mark.slow
def test_out_of_memory_in_an_evaluation_is_retried_smaller_too(tmp_path: Path) -> None:
    raw = big_recipe(tmp_path, "starved")
    raw["data"]["validation_share"] = 0.5
    raw["eval"] = {"at_start": True}
    prelude = STARVED_EVALUATION.format(room=36 * 2**20)
    process = runs.start(raw, tmp_path, prelude=prelude, env=RETURNS_AT_ONCE)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    config = tiny.build_config(raw, [], file=None)
    assert runs.events(config, "oom_retry")[0]["step"] == 0
    plain = tiny.build_config({**raw, "name": "plain"}, [], file=None)
    runs.train(plain)
    found, expected = (
        read_metrics(c.run_dir / "metrics.jsonl")[0]["eval/loss"] for c in (config, plain)
    )
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_one_row_that_does_not_fit_stops_with_the_ladder(tmp_path: Path) -> None:
    raw = big_recipe(tmp_path, "starved", width=768)
    process = runs.start(raw, tmp_path, prelude=STARVED.format(share=0.02))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "Settings to try, the least disruptive first" in output
    assert output.index("gradient_checkpointing=true") < output.index("lora.rank=16")
    assert "Traceback" not in output


def test_two_processes_cannot_share_a_run_directory(tmp_path: Path) -> None:
    raw = tiny.recipe(tmp_path, trainer={"max_steps": 100_000})
    process = runs.start(raw, tmp_path)
    config = tiny.config(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (config.run_dir / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(RunDirError, match=f"in use by process {process.pid}"):
            runs.train(config)
    finally:
        process.kill()
        process.communicate()


def test_tokens_beyond_the_model_are_refused(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model", vocab_size=100)
    with pytest.raises(ModelError, match="vocab_size"):
        runs.train(tiny.config(tmp_path))
