"""The bound of kept sets. Apart from columns.py, because config imports no numpy."""

from __future__ import annotations

# The most ids that top-k, top-p or min-p may leave to draw a token from (rollout/kept.py).
MAX_KEPT_IDS = 1024
