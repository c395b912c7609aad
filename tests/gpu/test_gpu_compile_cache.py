"""On a GPU: what the compilers really write is found whole, and a run has a folder of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from homeostat.run.wiring.cache_damage import find_damage
from homeostat.run.wiring.compile_cache import own_compile_cache, view_caches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_what_the_compilers_write_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    events: list[Any] = []
    device = torch.device("cuda", 0)

    def gated(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * x

    with own_compile_cache(device, emit=lambda kind, **fields: events.append((kind, fields))):
        triton, inductor = (
            Path(os.environ[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        )
        torch._dynamo.reset()
        torch.compile(gated)(torch.ones(1024, device=device))
    assert tmp_path in triton.parents
    assert list(inductor.rglob("*.py"))
    assert list(triton.rglob("*.cubin"))
    assert find_damage(triton) == find_damage(inductor) == []
    assert events == []
    cubin = next(triton.rglob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-100])
    facts = view_caches(device).facts()
    assert [line.endswith("is cut off") for line in facts["damaged"]] == [True]
