"""Cases of the SGLang engine's keys: what SGLang is given, and what is refused before it starts.

SGLang is given its settings as one set of arguments, so that these are looked at; that it keeps to
them is shown by the contract suite and by tests/sglang, where SGLang is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.every_key.rl_workshop import RlWorkshop

from homeostat.config.sglang import SglangEngineConfig
from homeostat.errors import ConfigError
from homeostat.rollout.sglang.core import server_arguments
from homeostat.rollout.sglang.engine import sglang_capabilities
from homeostat.run.wiring.engines import dealt_devices, engine_names

SGLANG = "engine={type: sglang}"
SglangCase = Callable[[RlWorkshop], None]


def engine_of(workshop: RlWorkshop, *changes: str) -> SglangEngineConfig:
    engine = workshop.config(SGLANG, *changes).engine
    assert isinstance(engine, SglangEngineConfig)
    return engine


def arguments(workshop: RlWorkshop, *changes: str, device: str = "cuda") -> dict[str, Any]:
    engine, folder = engine_of(workshop, *changes), Path("model")
    dtype = engine.own_dtype or "float32"
    sizes = {"max_tokens": 96, "vocabulary": 50}
    return server_arguments(folder, engine, device=device, dtype=dtype, **sizes)


def told(change: str, name: str, *, was: Any, now: Any) -> SglangCase:
    """SGLang is given another value of an argument, and no other argument changes."""

    def case(workshop: RlWorkshop) -> None:
        before, after = arguments(workshop), arguments(workshop, change)
        assert (before.get(name), after.get(name)) == (was, now)
        assert {**before, name: now} == {**after, name: now}

    return case


def refused(change: str, why: str) -> SglangCase:
    def case(workshop: RlWorkshop) -> None:
        with pytest.raises(ConfigError, match=why):
            engine_of(workshop, change)

    return case


def it_is_another_engine(workshop: RlWorkshop) -> None:
    found = arguments(workshop)
    assert (found["context_length"], found["sampling_mask_max_tokens"]) == (104, 50)
    assert sglang_capabilities(engine_of(workshop), device="cuda", max_tokens=96).name == "sglang"
    refused("rollout.min_p=0.1", "no seeded noise for this key")(workshop)
    refused(
        "eval.sampling={top_k: 5, top_p: 0.9, temperature: 1}",
        "the tokens that top_k",
    )(workshop)


def memory_is_given_back_unless_told_otherwise(workshop: RlWorkshop) -> None:
    kept, freed = arguments(workshop, "engine.sleep=false"), arguments(workshop)
    names = ("enable_memory_saver", "enable_weights_cpu_backup")
    assert [kept[name] for name in names] == [False, False]
    assert [freed[name] for name in names] == [True, True]
    on_a_cpu = arguments(workshop, device="cpu")
    assert not any(on_a_cpu[name] for name in names)


def options_are_passed_on(workshop: RlWorkshop) -> None:
    told("engine.options={page_size: 16}", "page_size", was=None, now=16)(workshop)
    refused("engine.options={tp_size: 2}", "engine.tensor_parallel_size")(workshop)
    refused("engine.options={port: 30000}", "its own free port")(workshop)


def each_engine_has_its_own_devices(workshop: RlWorkshop) -> None:
    engine = engine_of(workshop, "engine.data_parallel_size=2", "engine.tensor_parallel_size=2")
    assert engine_names(engine) == ["engine1", "engine2"]
    visible = ["0", "1", "2", "3"]
    assert [dealt_devices(visible, engine, number=n) for n in (0, 1)] == [["0", "1"], ["2", "3"]]


def waits(key: str, default: float) -> SglangCase:
    """The wait itself is the same in all engines; the native one's cases show it."""

    def case(workshop: RlWorkshop) -> None:
        name = key.removeprefix("engine.")
        assert getattr(engine_of(workshop), name) == default
        assert getattr(engine_of(workshop, f"{key}=7"), name) == 7

    return case


CASES: dict[str, SglangCase] = {
    "engine.type (sglang)": it_is_another_engine,
    "engine.max_concurrency (sglang)": told(
        "engine.max_concurrency=7", "max_running_requests", was=256, now=7
    ),
    "engine.memory_share (sglang)": told(
        "engine.memory_share=0.3", "mem_fraction_static", was=0.5, now=0.3
    ),
    "engine.max_batched_tokens (sglang)": told(
        "engine.max_batched_tokens=77", "chunked_prefill_size", was=None, now=77
    ),
    "engine.dtype (sglang)": told("engine.dtype=bfloat16", "dtype", was="float32", now="bfloat16"),
    "engine.enforce_eager (sglang)": told(
        "engine.enforce_eager=true", "disable_cuda_graph", was=False, now=True
    ),
    "engine.tensor_parallel_size (sglang)": told(
        "engine.tensor_parallel_size=2", "tp_size", was=1, now=2
    ),
    "engine.data_parallel_size (sglang)": each_engine_has_its_own_devices,
    "engine.quantization (sglang)": refused(
        "engine.quantization=fp8", "accepts weights only in the trainer's precision"
    ),
    "engine.kv_cache_dtype (sglang)": told(
        "engine.kv_cache_dtype=fp8", "kv_cache_dtype", was=None, now="fp8_e4m3"
    ),
    "engine.sleep (sglang)": memory_is_given_back_unless_told_otherwise,
    "engine.options (sglang)": options_are_passed_on,
    "engine.start_timeout_s (sglang)": waits("engine.start_timeout_s", 900.0),
    "engine.stall_s (sglang)": waits("engine.stall_s", 1800.0),
    "engine.max_restarts (sglang)": waits("engine.max_restarts", 3),
}
