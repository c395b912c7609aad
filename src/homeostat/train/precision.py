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
from homeostat.precision.fp8_model import fp8_bytes, rewrite_fp8
from homeostat.precision.int4_rewrite import Int4Rewrite, int4_bytes
from homeostat.precision.rewrite import Rewrite
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.train.saving.shards import Rows, TensorReader
from homeostat.types import Role


def rewritten(
    models: Mapping[Role, RoleModel], config: TrainerConfig, *, device: torch.device
) -> dict[Role, RoleModel]:
    """Rewrite every module once, and give each role the rewrites of its module."""
    made: dict[nn.Module, tuple[Rewrite, ...]] = {}
    found = {}
    for role, model in models.items():
        module = model.loaded.module
        if module not in made:
            made[module] = _rewrites(module, config, device=device)
        found[role] = _with_rewrites(model, made[module])
    return found


def _with_rewrites(model: RoleModel, rewrites: tuple[Rewrite, ...]) -> RoleModel:
    if not rewrites:
        return model
    facts = {"precision": "; ".join(rewrite.describe() for rewrite in rewrites)}
    sheet = replace(model.loaded.sheet, facts={**model.loaded.sheet.facts, **facts})
    return replace(model, rewrites=rewrites, loaded=replace(model.loaded, sheet=sheet))


def distinct(groups: Iterable[tuple[Rewrite, ...]]) -> list[Rewrite]:
    """Return each rewrite once: roles may share a module."""
    return list({id(rewrite): rewrite for group in groups for rewrite in group}.values())


def copy_bytes(config: TrainerConfig, runtime: Runtime, model: nn.Module) -> int:
    """Return the bytes of copies of weights that rewrites of a trained model will hold."""
    fp8, int4 = config.fp8, config.int4
    if fp8 is not None:
        return fp8_bytes(model, fp8, device=runtime.device)
    return 0 if int4 is None else int4_bytes(model, int4)


def rows_of(rewrites: Iterable[Rewrite]) -> dict[str, Rows]:
    """Return the tensors of rewrites as a checkpoint holds them."""
    return {
        f"{number}.{name}": Rows(tensor, 0, tuple(tensor.shape))
        for number, rewrite in enumerate(rewrites)
        for name, tensor in rewrite.state().items()
    }


def copy_recorded(own: Mapping[str, Rows], stored: TensorReader) -> None:
    """Fill the histories of a run whose settings of precision may have changed since it was saved.

    A layer that was in another precision has none yet; of a longer history the newest are taken.
    """
    for name, rows in own.items():
        count = min(len(rows.tensor), *stored.shapes.get(name, (0,)))
        rows.tensor.zero_()
        if count:
            rows.tensor[:count].copy_(stored.rows(name, 0, count))


def _rewrites(
    module: nn.Module, config: TrainerConfig, *, device: torch.device
) -> tuple[Rewrite, ...]:
    if config.fp8 is not None:
        return (rewrite_fp8(module, config.fp8, device=device),)
    return () if config.int4 is None else (Int4Rewrite(module, config.int4),)
