"""Faults of energy-based fine-tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path

from homeostat.clinic.faults.policy import DuplicateSamples
from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.health.finding import Family

# The energy is the only reward.
ENERGY: Raw = {"rewards": None}
SORT_EBFT = Body("sort", "ebft", steps=40, changes=ENERGY)
# Whitened samples that differ are equally far apart, whatever the policy does.
PLAIN_EBFT = Body("sort", "ebft", steps=40, changes={**ENERGY, "ebft.whitening": False})


class DiversityOutweighs(Injector):
    """The term that keeps samples apart outweighs the likeness to the truth."""

    name, family, expects = "ebft_diversity_outweighs", Family.LEARNING, ("ebft-alignment-falls",)
    body, onset, strength = PLAIN_EBFT, FROM_START, (6.0, 12.0)

    def prepare(self, raw: Raw, folder: Path) -> None:
        put(raw, "ebft.diversity_coefficient", self.dose.strength)


class EnergyOfCopies(DuplicateSamples):
    """All samples of a prompt are drawn with the same noise: none is better than another."""

    name, family = "ebft_samples_alike", Family.POLICY
    expects = ("mode-collapse", "zero-std-groups")
    body = SORT_EBFT


class ForeignReferences(Injector):
    """The references belong to other prompts."""

    name, family, onset = "ebft_foreign_references", Family.LEARNING, FROM_START
    expects = ("ebft-no-progress", "ebft-alignment-falls")
    body = Body("sort", "ebft", steps=60, changes=ENERGY)

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = Path(raw["data"]["train"][0]["path"])
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        answers = [row["answer"] for row in rows]
        random.Random(self.dose.seed).shuffle(answers)
        lines = [
            json.dumps({**row, "answer": answer}) for row, answer in zip(rows, answers, strict=True)
        ]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


FAULTS = (DiversityOutweighs, EnergyOfCopies, ForeignReferences)
