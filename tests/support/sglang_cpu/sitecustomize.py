"""Let SGLang's processes give requests their seeds on a CPU. Python imports this as it starts.

SGLang ties seeds to kernels whose results do not depend on the batch, and has those for GPUs alone.
In their place stand functions that change nothing: what the contract says of such an engine
(`batch_invariant` is False) holds without them.
"""

from __future__ import annotations

import sys
from types import ModuleType

NAME = "sglang.srt.batch_invariant_ops"


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _no() -> bool:
    return False


def _absent(name: str) -> object:
    """Any other name can be imported, and cannot be called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return None


def _stand_in() -> ModuleType:
    module = ModuleType(NAME)
    module.__dict__.update(
        enable_batch_invariant_mode=_nothing,
        is_batch_invariant_mode_enabled=_no,
        __getattr__=_absent,
    )
    return module


sys.modules[NAME] = _stand_in()
