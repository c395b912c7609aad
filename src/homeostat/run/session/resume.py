"""Decide whether a run directory can be resumed, and from which checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.config.loading.resume import Change, compare_configs, saved_config
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem, RunDirError
from homeostat.observe.run_dir import RunDir
from homeostat.train.saving.checkpoint import CheckpointStore, Found


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a run resumes from, and the config keys that differ from before.

    `found` is None if the run starts at its beginning.
    """

    found: Found | None
    changes: tuple[Change, ...]


def find_resume_point(config: RunConfig, run_dir: RunDir) -> ResumePoint:
    """Return where the run resumes. Raises if that would mix two experiments in one folder."""
    store = CheckpointStore(run_dir.checkpoints)
    load_step = config.checkpoint.load_step
    if not run_dir.was_used:
        if load_step is None and store.steps():
            raise RunDirError(
                f"{store.folder} holds checkpoints, but events.jsonl is missing, so it is unknown "
                "which run they belong to. Give this run another name, or move them away."
            )
        return ResumePoint(None if load_step is None else store.at_step(load_step), ())
    if config.checkpoint.resume == "never":
        raise RunDirError(
            f"the run directory {run_dir.path} was used before and checkpoint.resume=never. "
            "Give this run another name, or set checkpoint.resume=auto."
        )
    changes = compare_configs(_saved_config(run_dir), config)
    found = store.newest_valid() if load_step is None else store.at_step(load_step)
    if found is not None:
        _refuse_other_experiment(changes, run_dir)
    return ResumePoint(found, tuple(change for change in changes if change.resume != "free"))


def _saved_config(run_dir: RunDir) -> RunConfig:
    try:
        return saved_config(run_dir.config_json)
    except ValueError as error:
        raise RunDirError(
            f"{run_dir.config_json} cannot be read ({error}), so the settings of "
            "the run are unknown. Give this run another name."
        ) from None


def _refuse_other_experiment(changes: list[Change], run_dir: RunDir) -> None:
    forbidden = [change for change in changes if change.resume == "forbid"]
    if forbidden:
        hint = f"Set it back, or give this run another name than {run_dir.path.name!r}."
        raise ConfigError(
            [
                Problem(
                    change.path,
                    f"the value is now {change.new!r}, but the run began with {change.old!r}: "
                    "resuming would mix two experiments.",
                    hint,
                )
                for change in forbidden
            ]
        )
