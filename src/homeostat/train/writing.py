"""The part of an update that cannot be begun again: writing to weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from homeostat.errors import HomeostatError, OutOfMemoryHaltError
from homeostat.ops.memory import is_out_of_memory, reason_of


@contextmanager
def writing_weights(step: int) -> Iterator[None]:
    """Turn running out of memory into a halt: a retry would apply part of the update twice."""
    try:
        yield
    except HomeostatError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryHaltError(
            f"out of memory while the update of step {step} was being written to the weights, so "
            f"only part of the weights may have it: {reason_of(error)}. Checkpoints are "
            "untouched. Free some memory (for example by a lower trainer.max_tokens_per_device) "
            "and run the same command again: it resumes from the last checkpoint."
        ) from error
