"""The exception hierarchy. Every leaf also inherits the stdlib class that a caller would expect.

A message says what is wrong, why it cannot work, and which setting to change. The CLI prints the
message without a traceback and exits with `exit_code`; any other exception is a bug of homeostat.
"""

from __future__ import annotations

from dataclasses import dataclass


class HomeostatError(Exception):
    """An error that the user can fix."""

    exit_code = 2


# Replaces a value that must not be shown in messages, logs and reports.
REMOVED = "<removed>"
# The `line` of a setting that was given on the command line and is in no file.
COMMAND_LINE = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of an input: where it is, what is wrong and why, and how to fix it."""

    place: str
    message: str
    hint: str = ""
    line: int | None = None

    def render(self, file: str | None = None) -> str:
        """Return the problem as text for people."""
        where = "command line" if self.line == COMMAND_LINE else file
        if where is not None and self.line:
            where = f"{where}:{self.line}"
        tail = f" {self.hint}" if self.hint else ""
        return ": ".join(filter(None, (where, self.place, f"{self.message}{tail}")))


class ConfigError(HomeostatError, ValueError):
    """The recipe, or a combination of settings in it, cannot work. Holds every problem found."""

    def __init__(self, problems: list[Problem], *, file: str | None = None) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = problems
        self.file = file
        lines = [problem.render(file) for problem in problems]
        super().__init__("\n".join(lines))


class DataError(HomeostatError, ValueError):
    """A data file, or a row of one, cannot be used."""


class OutputError(HomeostatError, OSError):
    """A file that the command was asked to write, or its output, could not be written."""

    exit_code = 1


class DataWriteError(DataError, OSError):
    """Tokenised rows could not be written: the problem is the disk, not the data."""

    exit_code = 1


class UserCodeError(HomeostatError, ImportError):
    """A module, a file or a name that a recipe points to does not exist."""


class PluginError(HomeostatError, ImportError):
    """A plug-in that a recipe names cannot be used. The message names it."""


class HubError(HomeostatError, OSError):
    """A model or dataset could not be downloaded or sent: the connection, the hub or the disk."""

    exit_code = 1


class SignatureError(HomeostatError, ValueError):
    """A stanza of health/signatures/*.toml cannot be used. Names file and code of every problem."""


class ModelError(HomeostatError, ValueError):
    """A model folder cannot be used, or lacks something that the settings need."""


class PlanError(HomeostatError, ValueError):
    """A plan for so many GPUs cannot be made of these inputs."""


class DoesNotFitError(PlanError):
    """No split of the GPUs has enough memory."""


class EngineError(HomeostatError, RuntimeError):
    """The engine cannot serve a request, or stopped answering."""

    exit_code = 1


class EngineDiedError(EngineError):
    """The engine's process ended. Another engine can sample the in-flight requests again."""


class PolicyNotFiniteError(EngineError):
    """The weights give log-probs that are not finite, so nothing can be sampled from them."""


class WorkerError(HomeostatError, RuntimeError):
    """A worker process did not start, died, raised, or did not answer in time."""

    exit_code = 1


class WorkerDiedError(WorkerError):
    """A worker process ended although nothing had asked it to."""


class WorkerOutOfMemoryError(WorkerDiedError, MemoryError):
    """A worker process was ended because memory ran out, before it could raise anything."""


class WorkerHungError(WorkerError):
    """A worker process did not answer a call within its deadline."""


class LostRanksError(WorkerError):
    """A collective failed on a rank although no rank is known to have died: a lost connection."""


class TrainerLostError(WorkerError):
    """Ranks of the trainer died, hung or lost each other. New ranks can resume the run."""


class NodeLostError(TrainerLostError):
    """A machine of the cluster is gone, and the others have no room for the whole run."""


class SyncError(HomeostatError, RuntimeError):
    """New weights did not reach the engine, or the engine does not serve them."""

    exit_code = 1


class NotServedError(SyncError):
    """New weights were sent and received, but the engine computes with others."""


class RewardError(HomeostatError, RuntimeError):
    """A reward cannot be used at all: it cannot be imported or called."""


class CheckpointError(HomeostatError, OSError):
    """A checkpoint could not be written, or no valid one could be read."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written: the problem is the disk, not the recipe."""

    exit_code = 1


class DiskFullError(CheckpointWriteError):
    """A checkpoint could not be written because the disk is full."""


class RunDirError(HomeostatError, OSError):
    """The run directory is in use, not writable, or belongs to another kind of run."""


class RunDirWriteError(RunDirError):
    """A file of the run directory could not be written: the problem is the disk, not the recipe."""

    exit_code = 1


class MissingDependencyError(HomeostatError, ImportError):
    """An optional package is missing. The message gives the command that installs it."""

    @classmethod
    def of(cls, package: str, *, extra: str, needed_for: str) -> MissingDependencyError:
        """Build the error for a package and the extra that installs it."""
        return cls(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'homeostat[{extra}]'"
        )


class LossInputError(HomeostatError, ValueError):
    """An update names no known loss, or its batches lack a column that the loss reads."""


class TrainingHaltedError(HomeostatError, RuntimeError):
    """The run stopped itself because continuing would do harm. Nothing saved is lost."""

    exit_code = 1


class CallbackError(HomeostatError, RuntimeError):
    """A callback of the code that called a run raised an exception."""

    exit_code = 1


class NonFiniteHaltError(TrainingHaltedError):
    """Loss, gradient or weights are not finite, and the run cannot continue."""


class ReplayError(TrainingHaltedError):
    """Recorded routes are missing, do not fit, or were not replayed exactly once."""


class OutOfMemoryHaltError(TrainingHaltedError, MemoryError):
    """Memory ran out although micro-batches cannot get smaller; the message says what helps."""
