"""homeostat: LLM post-training that keeps itself healthy.

    recipe      build a recipe in code, or load one
    check       report every mistake that can be known before a run
    train       train to the end, with callbacks
    steps       iterate over the steps of a run
    evaluate    measure a model on held-out rows or prompts
    Model       a model to generate and score with, loaded once
    generate    sample answers to prompts
    score       log-probs of given completions
    diagnose    what is wrong with a run of any framework
    plugins     base classes of algorithms, rewards, sources, engines, transports and rules

docs/guide/python.md explains them. Importing this package has no side effects and needs no torch:
each name imports what it needs when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homeostat import plugins as plugins
    from homeostat.api.health import diagnose as diagnose
    from homeostat.api.models import Model as Model
    from homeostat.api.models import generate as generate
    from homeostat.api.models import score as score
    from homeostat.api.recipes import recipe as recipe
    from homeostat.api.runs import check as check
    from homeostat.api.runs import evaluate as evaluate
    from homeostat.api.runs import steps as steps
    from homeostat.api.runs import train as train

__version__ = "0.1.0"

# Name -> the module that has it.
_PLACES = {
    "recipe": "homeostat.api.recipes",
    "check": "homeostat.api.runs",
    "steps": "homeostat.api.runs",
    "evaluate": "homeostat.api.runs",
    "diagnose": "homeostat.api.health",
    "Model": "homeostat.api.models",
    "generate": "homeostat.api.models",
    "score": "homeostat.api.models",
}
# The package of the trainer can be called: see its __init__.py.
_MODULES = ("plugins", "train")

__all__ = [
    "Model",
    "check",
    "diagnose",
    "evaluate",
    "generate",
    "plugins",
    "recipe",
    "score",
    "steps",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"homeostat.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'homeostat' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
