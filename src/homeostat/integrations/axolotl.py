"""A plug-in for axolotl that adds the doctor's callback to the trainer.

    plugins:
      - homeostat.integrations.axolotl.HealthPlugin
    homeostat_stop_on: error        # optional, as are the other keys of HealthArgs

axolotl imports this module; nothing else should, because it needs axolotl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from homeostat.integrations.transformers import HealthCallback

if TYPE_CHECKING:
    BasePlugin = object
else:
    from axolotl.integrations.base import BasePlugin


class HealthArgs(BaseModel):
    """Keys that the plug-in adds to axolotl's config; their meaning is that of HealthCallback."""

    homeostat_level: str = "warn"
    homeostat_stop_on: str | None = None
    homeostat_ignore: list[str] | None = None
    homeostat_webhook: str | None = None


class HealthPlugin(BasePlugin):
    """Watch the run with a HealthCallback."""

    def get_input_args(self) -> str:
        return f"{__name__}.{HealthArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[HealthCallback]:
        """Return the callback that axolotl gives to the trainer. Raises HomeostatError."""
        return [
            HealthCallback(
                level=cfg.homeostat_level or "warn",
                stop_on=cfg.homeostat_stop_on,
                ignore=cfg.homeostat_ignore or (),
                webhook=cfg.homeostat_webhook,
            )
        ]
