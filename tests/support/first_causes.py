"""The cause that the doctor names first for an error's words."""

from __future__ import annotations

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES


def first_cause(text: str) -> str:
    """Return the first cause of the first finding that is more than information."""
    view = read_text(text)
    found = as_json(diagnose(view, RULES), view)["findings"]
    spoken = [one for one in found if one["level"] != "info"]
    return spoken[0]["causes"][0]["name"] if spoken else ""
