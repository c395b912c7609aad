"""Copy docs and recipes into the wheel, where `homeostat docs` and `homeostat new` find them.

Everything else about the build is in pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {
    "docs": (
        "*.svg",
        "*.png",
        "guide/*.md",
        "guide/*.svg",
        "reference/*.md",
        "reference/rules/*.md",
    ),
    "recipes": ("*.yaml", "assets/*.jsonl", "assets/*/*"),
}


class BuildWithDocs(build_py):
    """Adds homeostat/shipped to what is built; an editable install uses the checkout's folders."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder, patterns in SHIPPED.items():
            for pattern in patterns:
                for file in sorted(Path(folder).glob(pattern)):
                    target = Path(self.build_lib) / "homeostat" / "shipped" / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithDocs})
