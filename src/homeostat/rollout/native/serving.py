"""The mode in which a model serves: no gradients, eval mode, out-of-memory as an EngineError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from homeostat.errors import EngineError
from homeostat.models.build import Model
from homeostat.ops.memory import is_out_of_memory, reason_of


class Serving:
    def __init__(self, model: Model) -> None:
        self.model = model
        self._modules = list(model.modules())

    @contextmanager
    def __call__(self, num_flying: int) -> Iterator[None]:
        """Serve in evaluation mode; the model's own mode is restored afterwards."""
        was_training = self.model.training
        self._set_training(False)
        try:
            # The second guard spares each operation the question whether it needs a graph: a
            # decoding step is thousands of them. Unlike inference_mode it leaves plain tensors.
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, EngineError) or not is_out_of_memory(error):
                raise
            raise EngineError(
                f"out of memory while {num_flying} completions were on their way: "
                f"{reason_of(error)} Lower engine.max_concurrency, engine.memory_share "
                "or engine.prefill_tokens. Nothing saved is lost."
            ) from None
        finally:
            self._set_training(was_training)

    def _set_training(self, training: bool) -> None:
        # Module.train() walks the tree through nn.Module's attribute hooks, which costs a small
        # model as much as a forward pass does. The flag itself is a plain attribute.
        if self.model.training is not training:
            for module in self._modules:
                object.__setattr__(module, "training", training)
