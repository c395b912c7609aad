"""Evaluate a model on the held-out rows or prompts of a recipe, without training it.

The parts of a run are set up in a temporary folder, which is removed afterwards. Nothing in the
run's own folder is changed: a checkpoint is linked into the temporary folder and loaded from there.
"""

from __future__ import annotations

import io
import tempfile
from functools import partial
from pathlib import Path

from homeostat.config.kind import RunKind
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem
from homeostat.observe.terminal import SafeConsole
from homeostat.run.calling.surroundings import as_before
from homeostat.run.evaluation.preference_measure import prepare_preferences
from homeostat.run.evaluation.reward_model_measure import prepare_reward_model
from homeostat.run.evaluation.rl_eval import evaluate_prompts
from homeostat.run.evaluation.sft_measure import prepare_sft
from homeostat.run.ray.cluster import ray_opened
from homeostat.run.session.session import Session, open_session
from homeostat.run.wiring.compile_cache import own_compile_cache
from homeostat.run.wiring.rl_setup import set_up_rl
from homeostat.run.wiring.sft_setup import Prepare, set_up
from homeostat.train.runtime import resolve_device
from homeostat.train.saving.checkpoint import Found

_PREPARE: dict[RunKind, Prepare] = {
    RunKind.SFT: prepare_sft,
    RunKind.PREFERENCE: prepare_preferences,
    RunKind.REWARD_MODEL: prepare_reward_model,
}
# The temporary run is that many steps from its end.
_FAR = 10**6


def evaluate_recipe(config: RunConfig, *, checkpoint: Found | None = None) -> dict[str, float]:
    """Return the metrics (eval/...) of the recipe's model, or of a checkpoint of its run."""
    if not config.has_validation:
        what = "the recipe has no held-out rows, so there is nothing to evaluate on."
        raise ConfigError([Problem("data.validation", what, "Set it, or data.validation_share.")])
    with as_before(), tempfile.TemporaryDirectory(prefix="homeostat_evaluate_") as folder:
        return _evaluated(_placed(config, Path(folder), checkpoint))


def _placed(config: RunConfig, folder: Path, checkpoint: Found | None) -> RunConfig:
    """Return the recipe of an evaluation in another folder."""
    config = config.model_copy(update={"runs_dir": str(folder)})
    quiet = config.observe.model_copy(update={"console": "quiet", "report": False, "sinks": ()})
    step = checkpoint.step if checkpoint is not None else 0
    # A complete run would not open an engine, and no setting may refer to a step after the last
    # one.
    trainer = config.trainer.model_copy(update={"max_steps": step + _FAR, "epochs": None})
    saving = config.checkpoint.model_copy(update={"load_step": step or None, "resume": "auto"})
    update = {"observe": quiet, "trainer": trainer, "checkpoint": saving}
    if checkpoint is not None:
        link = config.run_dir / "checkpoints" / checkpoint.path.name
        link.parent.mkdir(parents=True)
        link.symlink_to(checkpoint.path.resolve(), target_is_directory=True)
    return config.model_copy(update=update)


def _evaluated(config: RunConfig) -> dict[str, float]:
    console = SafeConsole(file=io.StringIO())
    command = ["python", "homeostat.evaluate"]
    with open_session(
        config, recipe="", command=command, console=console, log_level="warning"
    ) as session:
        device, emit = resolve_device(config), partial(session.event, step=session.start_step)
        place = ray_opened(config, device=device.type)
        with own_compile_cache(device, emit=emit), place:
            return _metrics(config, session)


def _metrics(config: RunConfig, session: Session) -> dict[str, float]:
    if config.is_rl:
        with set_up_rl(config, session) as parts:
            return evaluate_prompts(parts)
    with set_up(config, session, prepare=_PREPARE[config.kind]) as parts:
        assert parts.eval_rows is not None, "the recipe has held-out rows"
        return parts.objective.evaluate(parts.eval_rows, parts.attempts)
