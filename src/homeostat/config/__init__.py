"""Strict, torch-free configuration: `load_config` is the way in."""

from homeostat.config.load import load_config
from homeostat.config.run import RunConfig

__all__ = ["RunConfig", "load_config"]
