"""Turn what tokenizers and transformers raise about a tokenizer's files into our own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from homeostat.data.templates import TEMPLATE_ERRORS
from homeostat.errors import HomeostatError, ModelError

_LOAD_ERRORS = (*TEMPLATE_ERRORS, OSError, ImportError, StrictDataclassError)


class RefuseVendorErrors:
    """Turn a vendor's error inside the block into ours.

    tokenizers raises the bare class Exception, which no narrow except clause can name. If its Rust
    code panics (for example over two pieces of the vocabulary with one id), pyo3 raises a
    BaseException of a module that cannot be imported, so it is recognised by its name.

    A vendor's message seldom names the file at fault. `find_fault` is called for that after an
    error.
    """

    def __init__(self, prefix: str, *, find_fault: Callable[[], str] = str) -> None:
        self.prefix = prefix
        self.find_fault = find_fault

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: object) -> None:
        if kind is None or issubclass(kind, HomeostatError):
            return
        is_panic = kind.__name__ == "PanicException"
        if is_panic or kind is Exception or issubclass(kind, _LOAD_ERRORS):
            shown = " ".join(str(error).split())[:300] or kind.__name__
            shown = self.find_fault() or shown
            raise ModelError(f"{self.prefix}: {shown}") from None
