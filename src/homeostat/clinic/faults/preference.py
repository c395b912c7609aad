"""Faults of preference training: pairs that are pushed down together, and a wrong reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import Body, Raw
from homeostat.health.finding import Family

PAIRS = Body("sort", "dpo", steps=40)


class BothPushedDown(Injector):
    """The rate is far too high: rejected answers are pushed down, and the chosen ones with them."""

    name, family = "preference_both_down", Family.LEARNING
    expects = ("likelihood-displacement",)
    body, onset, strength = PAIRS, FROM_START, (20.0, 40.0)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["trainer"]["lr"] *= self.dose.strength
        raw["preference"] = {"beta": 0.05}


class WrongReference(Injector):
    """The reference is another checkpoint than the one that the policy starts from."""

    name, family = "preference_reference", Family.LEARNING
    expects = ("reference-mismatch",)
    body, onset, strength = Body("sort", "dpo", steps=20), FROM_START, (0.1, 0.4)

    def prepare(self, raw: Raw, folder: Path) -> None:
        other = folder / "other_reference"
        shutil.copytree(raw["model"]["path"], other)
        noise = torch.Generator().manual_seed(self.dose.seed)
        for file in other.glob("*.safetensors"):
            tensors = load_file(file)
            for tensor in tensors.values():
                scale = self.dose.strength * float(tensor.float().std())
                tensor += scale * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
            save_file(tensors, file, metadata={"format": "pt"})
        raw["reference"] = {"type": "checkpoint", "path": str(other)}


FAULTS: tuple[type[Injector], ...] = (BothPushedDown, WrongReference)
