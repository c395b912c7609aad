"""Strict, torch-free configuration. Load a recipe with `load_config`."""

from homeostat.config.loading.load import load_config
from homeostat.config.run import RunConfig

__all__ = ["RunConfig", "load_config"]
