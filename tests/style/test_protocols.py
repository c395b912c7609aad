"""A backend that claims a protocol by its name is checked against it."""

from __future__ import annotations

import ast
import re

import pytest
from tests.support.sources import PACKAGE, ROOT, nodes_of

CHECKS = ROOT / "tests" / "typing" / "protocols.py"
# Package -> how the names of its backends end: NativeEngine, LocalTrainer, DiskTransport.
ENDINGS = {
    "rollout": ("Engine",),
    "train": ("Trainer", "Shards"),
    "workers": ("Group", "Channel", "Listener"),
    "sync": ("Packer", "Receiver", "Transport"),
}
# Or their docstrings claim it.
CLAIM = re.compile(r"[Ii]mplements `[\w.]+`")
# Bases, and one rank of a trainer, which ShardedTrainer drives.
PARTS = {"FsdpTrainer", "RankTrainer", "SteppingEngine", "VendorEngine"}


def backends(package: str) -> list[str]:
    """Names of the classes in a package that claim to implement one of its protocols."""
    found = []
    for file in sorted((PACKAGE / package).rglob("*.py")):
        for node in nodes_of(file):
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
        for node in nodes_of(CHECKS)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.List)
        for name in node.value.elts
        if isinstance(name, ast.Name)
    }
    assert [name for name in found if name not in checked] == []
