"""Finds out whether vLLM is installed, and checks its options against vLLM's own dataclass.

vLLM is imported only in this folder, and only when it is needed: importing it takes seconds, and
sets up logging and torch in the whole process.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from homeostat.errors import EngineError
from homeostat.observe.processor import Processor
from homeostat.rollout.vendor_options import refuse_unknown_options

INSTALL = "pip install 'homeostat[vllm]'"


def is_installed() -> bool:
    """A folder that happens to be called vllm is not it: it has no origin."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def require_vllm(module: str = "vllm") -> ModuleType:
    """A module of vLLM. Raises EngineError where there is no vLLM, or none that imports."""
    way_out = f"Install it with: {INSTALL}. Or set engine.type to native."
    if not is_installed():
        raise EngineError(f"engine.type is vllm, and vLLM is not installed. {way_out}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(
            f"engine.type is vllm, and vLLM does not import here ({error}). {way_out}"
        ) from error


def require_installed() -> None:
    """Raises EngineError where there is no vLLM; does not import it."""
    if not is_installed():
        require_vllm()


def require_computable(dtype: str, *, processor: Processor) -> None:
    """Refuses what vLLM's CPU build cannot compute on a processor.

    On x86-64 vLLM brings one library for each set of instructions (AVX2, AVX-512, AMX) and loads
    the one that fits, so that every dtype works. On aarch64 it has one, whose bf16 is made of
    FEAT_BF16's instructions: on a processor without them it is ended by SIGILL.
    """
    is_arm = processor.architecture in ("aarch64", "arm64")
    if dtype != "bfloat16" or not is_arm or not processor.features or processor.has_bf16:
        return
    raise EngineError(
        f"engine.dtype comes out as bfloat16, and this processor ({processor.describe()}) has no "
        "bf16 instructions: vLLM's CPU build would be ended by SIGILL. Set engine.dtype=float32."
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses names that vLLM's EngineArgs does not have. Values are judged by vLLM itself."""
    if options:
        vllm = require_vllm("vllm")
        known = [field.name for field in dataclasses.fields(vllm.EngineArgs)]
        vendor = f"vLLM {vllm.__version__}"
        refuse_unknown_options(options, known=known, vendor=vendor, noun="engine argument")
