"""Cases of the vLLM engine's keys. They need vLLM: tests/vllm runs them.

Two runs show most keys, each by the settings that vLLM itself reports, and by measurements.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_rl
from tests.support.every_key.rl_sync import patched, published
from tests.support.every_key.rl_workshop import RlWorkshop, only, texts
from tests.support.every_key.vllm_host import VllmHost
from tests.support.every_key.workshop import Run
from tests.support.kills import kill_engine

from homeostat.errors import EngineError, HomeostatError
from homeostat.observe.processor import this_processor
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.vllm.core import quantised_arguments
from homeostat.rollout.vllm.options import require_computable
from homeostat.run.publication.fp8_checkpoint import fp8_checkpoint

NEEDS_VLLM = "needs vLLM: make test-vllm"
# vLLM has no heads narrower than 32 on a CPU; two of keys and values, so that two ranks have one.
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
VLLM = ("engine={type: vllm, enforce_eager: true}",)
BLOCK = 32
# Keys and values of two layers and two heads, in float32.
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 32 * 4
DIFFERENCE = "sampling/sampling_logp_difference/max"


@dataclass(frozen=True)
class Seen:
    """A run, vLLM's own settings in it, and how much cache it had whenever it was put to sleep."""

    run: Run
    settings: dict[str, Any]
    asleep_bytes: list[int]


class VllmWorkshop(RlWorkshop):
    """A model that vLLM can serve, and the runs that more than one case looks at."""

    def __init__(self, folder: Path) -> None:
        self.host = VllmHost()
        super().__init__(folder)

    def fill(self) -> None:
        tiny_rl.write_model(self.folder / "model", **HEADS)
        tiny_rl.recipe(self.folder)

    def close(self) -> None:
        self.host.close()

    def told(self, *overrides: str, host: VllmHost | None = None) -> Seen:
        """A run, with vLLM's own settings in it."""
        host = host or self.host
        asleep: list[int] = []
        plain = RemoteEngine.sleep

        def sleep(engine: RemoteEngine) -> None:
            plain(engine)
            asleep.append(engine.stats().cache_bytes)

        with host.serving():
            run = self.again(*VLLM, *overrides, watch=patched(sleep=sleep))
        return Seen(run, host.settings, asleep)

    @cached_property
    def plain(self) -> Seen:
        return self.told()

    @cached_property
    def narrow(self) -> Seen:
        """Room for five blocks; one of them is vLLM's own."""
        share = 5.5 * BLOCK_BYTES / free_bytes(torch.device("cpu"))
        return self.told(
            "engine.max_concurrency=7",
            "engine.max_batched_tokens=77",
            f"engine.memory_share={share}",
            "engine.sleep=false",
            f"engine.options={{block_size: {BLOCK}}}",
        )

    def refuses(self, change: str, why: str) -> None:
        with pytest.raises(HomeostatError, match=why):
            self.told(change)


VllmCase = Callable[[VllmWorkshop], None]


def it_samples_with_vllm(workshop: VllmWorkshop) -> None:
    seen = workshop.plain
    assert published(seen.run) == [0, 1]
    assert seen.settings["dtype"] == "torch.float32"
    assert only(DIFFERENCE, seen.run) < 1e-5


def told_of(name: str, *, was: Any, now: Any) -> VllmCase:
    def case(workshop: VllmWorkshop) -> None:
        before, after = workshop.plain, workshop.narrow
        assert (before.settings[name], after.settings[name]) == (was, now)

    return case


def few_run_at_one_time(workshop: VllmWorkshop) -> None:
    told_of("max_num_seqs", was=256, now=7)(workshop)
    assert only("engine/max_running", workshop.plain.run) == 16
    assert only("engine/max_running", workshop.narrow.run) <= 7


def memory_bounds_what_runs(workshop: VllmWorkshop) -> None:
    seen = workshop.narrow
    # What is free changes between two looks.
    assert 4 * BLOCK_BYTES <= seen.settings["cache_bytes"] <= 7 * BLOCK_BYTES
    # A request of up to 22 tokens takes one block.
    assert only("engine/max_running", seen.run) < 7
    workshop.refuses("engine.memory_share=1e-12", r"engine\.memory_share")


def passes_are_smaller(workshop: VllmWorkshop) -> None:
    before, after = (
        seen.settings["max_num_batched_tokens"] for seen in (workshop.plain, workshop.narrow)
    )
    assert before > 77 == after
    # On a CPU a prompt is computed whole.
    workshop.refuses("engine.max_batched_tokens=3", "max_num_batched_tokens")


def half_dtype() -> str:
    """A 16-bit dtype that vLLM can compute in here: every such processor has fp16."""
    try:
        require_computable("bfloat16", processor=this_processor())
    except EngineError:
        return "float16"
    return "bfloat16"


def half_precision_differs_from_the_trainers(workshop: VllmWorkshop) -> None:
    dtype = half_dtype()
    if dtype != "bfloat16":
        workshop.refuses("engine.dtype=bfloat16", "no bf16 instructions")
    whole, half = workshop.plain, workshop.told(f"engine.dtype={dtype}")
    found = [seen.settings["dtype"] for seen in (whole, half)]
    assert found == ["torch.float32", f"torch.{dtype}"]
    assert only(DIFFERENCE, whole.run) < 1e-5
    # fp16 keeps three bits more than bf16.
    assert only(DIFFERENCE, half.run) > (1e-4 if dtype == "bfloat16" else 1e-5)


def the_cache_is_kept(workshop: VllmWorkshop) -> None:
    """Once in the step, while the trainer works, there is none; or nobody sleeps."""
    assert workshop.plain.asleep_bytes == [0]
    assert workshop.narrow.asleep_bytes == []
    assert only("engine/cache_bytes", workshop.narrow.run) > 0


def seen_in_a_process_of_its_own(workshop: VllmWorkshop, change: str) -> Seen:
    host = VllmHost()
    try:
        return workshop.told(change, host=host)
    finally:
        host.close()


def compiled_code_samples_the_same(workshop: VllmWorkshop) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("vLLM compiles with a C++ compiler, and there is none")
    with pytest.MonkeyPatch.context() as patch:
        # What an engine in the process of the tests may have left behind.
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        compiled = seen_in_a_process_of_its_own(workshop, "engine.enforce_eager=false")
    found = [seen.settings["enforce_eager"] for seen in (workshop.plain, compiled)]
    assert found == [True, False]
    assert texts(compiled.run) == texts(workshop.plain.run)
    assert only(DIFFERENCE, compiled.run) < 1e-5


def two_ranks_sample_what_one_does(workshop: VllmWorkshop) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM gives each rank a core of its own, and there is one")
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
        two = seen_in_a_process_of_its_own(workshop, "engine.tensor_parallel_size=2")
    assert [seen.settings["ranks"] for seen in (workshop.plain, two)] == [1, 2]
    assert texts(two.run) == texts(workshop.plain.run)
    assert only(DIFFERENCE, two.run) < 1e-5


def a_start_has_a_deadline(workshop: VllmWorkshop) -> None:
    """In a process that is started for the run, as it always is outside these cases."""
    with pytest.raises(HomeostatError, match=r"engine\.start_timeout_s"):
        workshop.again(*VLLM, "engine.start_timeout_s=0.001")


def an_engine_that_is_silent_is_given_up(workshop: VllmWorkshop) -> None:
    workshop.refuses("engine.stall_s=1e-9", r"engine\.stall_s")


def a_dead_engine_is_not_started_anew(workshop: VllmWorkshop) -> None:
    plain = RemoteEngine.poll

    def dying(engine: RemoteEngine, **named: Any) -> Any:
        kill_engine()
        return plain(engine, **named)

    with workshop.host.serving():
        run = workshop.attempt(*VLLM, "engine.max_restarts=0", watch=patched(poll=dying))
    assert isinstance(run.error, EngineError), run.error
    assert "SIGKILL" in str(run.error)
    assert "engine.max_restarts" in str(run.error)
    assert run.events("engine_restarted") == []


def vllm_is_told_of_fp8_weights(workshop: VllmWorkshop) -> None:
    """Tests of what is sent are in tests/unit/test_fp8_engine.py; its products need a GPU."""
    config = workshop.config(*VLLM, "engine.quantization=fp8", "trainer.fp8={recipe: rowwise}")
    checkpoint = fp8_checkpoint(config)
    assert checkpoint is not None
    assert fp8_checkpoint(workshop.config(*VLLM)) is None
    told = quantised_arguments(config.engine, checkpoint.settings)
    assert told["hf_overrides"]["quantization_config"]["format"] == "float-quantized"


def vllm_is_told_of_an_fp8_cache(workshop: VllmWorkshop) -> None:
    config = workshop.config(*VLLM, "engine.kv_cache_dtype=fp8")
    assert quantised_arguments(config.engine, None) == {"kv_cache_dtype": "fp8"}


def two_engines_divide_the_requests(workshop: VllmWorkshop) -> None:
    """In processes that are started for the run: each has its own log."""
    run = workshop.again(*VLLM, "engine.data_parallel_size=2")
    assert all((run.dir / f"engine{number}.log").is_file() for number in (1, 2))
    assert texts(run) == texts(workshop.plain.run)


CASES: dict[str, VllmCase] = {
    "engine.data_parallel_size (vllm)": two_engines_divide_the_requests,
    "engine.type (vllm)": it_samples_with_vllm,
    "engine.max_concurrency (vllm)": few_run_at_one_time,
    "engine.memory_share (vllm)": memory_bounds_what_runs,
    "engine.max_batched_tokens (vllm)": passes_are_smaller,
    "engine.dtype (vllm)": half_precision_differs_from_the_trainers,
    "engine.enforce_eager (vllm)": compiled_code_samples_the_same,
    "engine.tensor_parallel_size (vllm)": two_ranks_sample_what_one_does,
    "engine.quantization (vllm)": vllm_is_told_of_fp8_weights,
    "engine.kv_cache_dtype (vllm)": vllm_is_told_of_an_fp8_cache,
    "engine.start_timeout_s (vllm)": a_start_has_a_deadline,
    "engine.stall_s (vllm)": an_engine_that_is_silent_is_given_up,
    "engine.sleep (vllm)": the_cache_is_kept,
    "engine.max_restarts (vllm)": a_dead_engine_is_not_started_anew,
    "engine.options (vllm)": told_of("block_size", was=128, now=BLOCK),
}
