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
            f"out of memory while the update of step {step} was being written, so that part of the "
            f"weights may have it and part not: {reason_of(error)}. Checkpoints are "
            "untouched. Free some memory (trainer.max_tokens_per_device, say) and give the same "
            "command again: it goes on from the last checkpoint."
        ) from error
