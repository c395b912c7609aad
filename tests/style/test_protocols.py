"""A backend that claims a protocol by its name is checked against it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "tests" / "typing" / "protocols.py"
# Package -> how the names of its backends end: NativeEngine, LocalTrainer, DiskTransport.
ENDINGS = {
    "rollout": ("Engine",),
    "train": ("Trainer",),
    "workers": ("Group", "Channel", "Listener"),
    "sync": ("Packer", "Receiver", "Transport"),
}
# Or their docstrings claim it.
CLAIM = re.compile(r"[Ii]mplements `[\w.]+`")
# One rank of a trainer, which ShardedTrainer drives, and what two engines are derived from.
PARTS = {"FsdpTrainer", "SteppingEngine"}


def backends(package: str) -> list[str]:
    """Names of the classes in a package that claim to implement one of its protocols."""
    found = []
    for file in sorted((ROOT / "src" / "homeostat" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and claims(node, package):
                found.append(node.name)
    return found


def claims(node: ast.ClassDef, package: str) -> bool:
    """Whether a class says that it implements a protocol of the package."""
    if any("Protocol" in ast.unparse(base) for base in node.bases) or node.name in PARTS:
        return False
    by_name = node.name.endswith(ENDINGS[package]) and node.name not in ENDINGS[package]
    return by_name or CLAIM.search(ast.get_docstring(node) or "") is not None


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
