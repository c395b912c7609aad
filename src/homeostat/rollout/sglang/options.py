"""Finds out whether SGLang is installed, and checks its options against SGLang's own class.

SGLang is imported only in this folder, and only when it is needed: importing it takes seconds, and
changes logging, signals and torch in the whole process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from homeostat.errors import EngineError
from homeostat.rollout.vendor_options import refuse_unknown_options

# SGLang pins a torch that homeostat is not tested with, so that it is no extra.
INSTALL = "pip install --no-deps sglang==0.5.23 (the guide engines_and_sync.md lists what it needs)"


def is_installed() -> bool:
    """A folder that happens to be called sglang is not it: it has no origin."""
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None


def require_sglang(module: str = "sglang") -> ModuleType:
    """A module of SGLang. Raises EngineError where there is no SGLang, or none that imports."""
    way_out = f"Install it with: {INSTALL}. Or set engine.type to vllm or native."
    if not is_installed():
        raise EngineError(f"engine.type is sglang, and SGLang is not installed. {way_out}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(
            f"engine.type is sglang, and SGLang does not import here ({error}). {way_out}"
        ) from error


def require_installed() -> None:
    """Raises EngineError where there is no SGLang; does not import it."""
    if not is_installed():
        require_sglang()


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses names that SGLang's ServerArgs does not have. Values are judged by SGLang itself."""
    if options:
        known = require_sglang("sglang.srt.server_args").ServerArgs.__struct_fields__
        version = require_sglang().__version__
        refuse_unknown_options(
            options, known=known, vendor=f"SGLang {version}", noun="server argument"
        )
