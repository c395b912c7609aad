"""Find the folders that come with homeostat but are no Python: docs and recipes.

In a checkout they are at its root. In a wheel they are inside the package (setup.py copies them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from homeostat.errors import HomeostatError

Shipped = Literal["docs", "recipes"]


def shipped_folder(name: Shipped) -> Path:
    """Return the folder. Raises HomeostatError in an installation that lacks it."""
    here = Path(__file__).resolve().parent
    for folder in (here / "shipped" / name, here.parents[1] / name):
        if folder.is_dir():
            return folder
    raise HomeostatError(
        f"this installation of homeostat lacks its folder {name}: install it again (pip install "
        "--force-reinstall homeostat)."
    )
