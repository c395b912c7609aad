"""The largest numbers of past updates, from which delayed scaling chooses a scale.

A record of the current update grows with every micro-batch and joins the history when the update is
applied; the record of an update that was not applied is dropped. So a retried update uses the
scales of the first attempt, and a resumed run the scales of an uninterrupted one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.precision.fp8 import SMALLEST
from homeostat.precision.operands import NO_AMAX, Amax


class AmaxHistory:
    """The history of one tensor; without length it is empty, and scales are dynamic."""

    def __init__(self, length: int, *, limit: float, device: torch.device) -> None:
        self.length, self.limit = length, limit
        self.values = torch.zeros(length, device=device)
        self._record = torch.zeros(1, device=device)
        self.expected: Tensor | None = None
        self._has_record = False

    def now(self, *, records: bool) -> Amax:
        """Return what to scale by; `records`: the tensor belongs to an update."""
        if not self.length:
            return NO_AMAX
        self._has_record |= records
        return Amax(self.expected, self._record if records else None)

    def end_update(self, *, applied: bool) -> None:
        """Add the record to the history if the update was applied, and begin a new one."""
        if self.length and self._has_record and applied:
            # An update of zeros is not an empty place of the history, which is 0.
            record = self._record.clamp_min(SMALLEST)
            self.values.copy_(torch.cat([record, self.values[:-1]]))
            self._expect()
        self._record.zero_()
        self._has_record = False

    def restored(self) -> None:
        """Go on with the values that were put into the history; zeros are an empty one."""
        # A run that goes back to an earlier checkpoint has scales already.
        self.expected = None
        self.end_update(applied=False)
        if self.length and bool(self.values.any()):
            self._expect()

    def _expect(self) -> None:
        largest = self.values.amax().reshape(1)
        # After updates of zeros nothing is known: a scale of 1.
        self.expected = largest.where(largest > SMALLEST, self.limit)
