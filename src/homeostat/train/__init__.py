"""The trainer package. It can also be called: `homeostat.train(recipe)`, see homeostat/api/runs.py.

The package and the function have the same name. Importing a submodule sets the attribute of that
name in its parent, so the package itself is made callable: then the attribute is always the same
object.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """The package of the trainer, which trains a recipe when it is called."""

    def __call__(self, recipe: Any, **callbacks: Any) -> Any:
        """Train to the end, and return the outcome (homeostat/api/runs.py has the signature)."""
        from homeostat.api.runs import train

        return train(recipe, **callbacks)


sys.modules[__name__].__class__ = _CallablePackage
