"""The model that an FP8 engine serves: the trainer's parameters with separate products.

The module tree is copied and its parameters are not, so that new weights are seen as they are
written, and the trainer's modules compute as before. The rewrite is the trainer's
(precision/fp8_model.py): prompts, scoring and plain decoding go through its products, fused
decoding through kernels over the same copies of weights (cuda/fp8_layers.py).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from homeostat.config.fp8 import Fp8Config
from homeostat.models.decoder import Decoder
from homeostat.models.moe import Experts
from homeostat.ops.experts import experts_of
from homeostat.ops.linear import Linear, linear
from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.fp8_linear import Fp8Product
from homeostat.precision.fp8_model import Fp8Rewrite, rewrite_fp8

M = TypeVar("M", bound=nn.Module)


class Fp8Model:
    """A model that is in FP8 from the version of `config.start_step` on."""

    def __init__(
        self, model: Decoder, config: Fp8Config, *, device: torch.device, version: int
    ) -> None:
        self.model = shared_copy(model)
        self._rewrite: Fp8Rewrite = rewrite_fp8(self.model, config, device=device)
        self._rewrite.begin_step(version + 1)

    def weights_changed(self, version: int) -> None:
        """Serve the weights of a version: those that the step after it is sampled with."""
        self._rewrite.begin_step(version + 1)
        self._rewrite.weights_changed()


def shared_copy(module: M) -> M:
    """Copy a tree of modules, with the same parameters and in their own precision."""
    copied = copy.copy(module)
    children = {
        name: None if child is None else shared_copy(child)
        for name, child in module._modules.items()
    }
    object.__setattr__(copied, "_modules", children)
    if isinstance(copied, Linear) and isinstance(copied.product, Fp8Product):
        copied.product = partial(linear, numerics=copied.numerics)
    elif isinstance(copied, Experts) and isinstance(copied.product, Fp8Experts):
        copied.product = experts_of
    return copied
