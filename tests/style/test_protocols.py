"""A backend that claims a protocol by its name is checked against it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "tests" / "typing" / "protocols.py"
# Package -> how the names of its backends end: NativeEngine, LocalTrainer, DiskTransport.
ENDINGS = {
    "rollout": ("Engine",),
    "train": ("Trainer",),
    "workers": ("Group",),
    "sync": ("Packer", "Receiver", "Transport"),
}
# One rank of a trainer, which ShardedTrainer drives: not a Trainer by itself.
PARTS = {"FsdpTrainer"}


def backends(package: str) -> list[str]:
    """Names of the classes in a package that claim to implement one of its protocols."""
    found = []
    for file in sorted((ROOT / "src" / "homeostat" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(ENDINGS[package]):
                is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
                if not is_protocol and node.name not in (*ENDINGS[package], *PARTS):
                    found.append(node.name)
    return found


@pytest.mark.parametrize("package", ENDINGS)
def test_every_backend_is_checked_against_its_protocol(package: str) -> None:
    found = backends(package)
    assert found
    checked = {
        name.id
        for node in ast.walk(ast.parse(CHECKS.read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.List)
        for name in node.value.elts
        if isinstance(name, ast.Name)
    }
    assert [name for name in found if name not in checked] == []
