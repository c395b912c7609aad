"""Rewrite the models of a run to the precision that the recipe asks for (precision/).

All roles are rewritten alike: the log-probs of a reference can be compared with the policy's only
if both are computed in the same precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from homeostat.config.trainer import TrainerConfig
from homeostat.precision.fp8_model import rewrite_fp8
from homeostat.precision.int4_rewrite import Int4Rewrite
from homeostat.precision.rewrite import Rewrite
from homeostat.train.roles import RoleModel
from homeostat.train.shards import Rows
from homeostat.types import Role


def rewritten(
    models: Mapping[Role, RoleModel], config: TrainerConfig, *, device: torch.device
) -> dict[Role, RoleModel]:
    """Rewrite every module once, and give each role the rewrites of its module."""
    made: dict[nn.Module, tuple[Rewrite, ...]] = {}
    for model in models.values():
        module = model.loaded.module
        if module not in made:
            made[module] = _rewrites(module, config, device=device)
    return {
        role: replace(model, rewrites=made[model.loaded.module]) for role, model in models.items()
    }


def distinct(groups: Iterable[tuple[Rewrite, ...]]) -> list[Rewrite]:
    """Return each rewrite once: roles may share a module."""
    return list({id(rewrite): rewrite for group in groups for rewrite in group}.values())


def rows_of(rewrites: Iterable[Rewrite]) -> dict[str, Rows]:
    """Return the tensors of rewrites as a checkpoint holds them."""
    return {
        f"{number}.{name}": Rows(tensor, 0, tuple(tensor.shape))
        for number, rewrite in enumerate(rewrites)
        for name, tensor in rewrite.state().items()
    }


def _rewrites(
    module: nn.Module, config: TrainerConfig, *, device: torch.device
) -> tuple[Rewrite, ...]:
    if config.fp8 is not None:
        return (rewrite_fp8(module, config.fp8, device=device),)
    return () if config.int4 is None else (Int4Rewrite(module, config.int4),)
