"""`homeostat.check`, `train`, `steps` and `evaluate`: the verbs of the command line, from Python.

What is heavy is imported by the function that needs it, after it was looked for: where a package of
`homeostat[train]` is missing, the error names it and the command that installs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homeostat.api.recipes import AnyRecipe, given_recipe
from homeostat.config.loading.resume import as_recipe
from homeostat.errors import MissingDependencyError
from homeostat.observe.redact import Scrubber

if TYPE_CHECKING:
    from homeostat.run.calling.steps import Steps
    from homeostat.run.preflight.item import Item
    from homeostat.run.session.result import RunResult
    from homeostat.run.session.step import Step


@dataclass(frozen=True, slots=True)
class Check:
    """The results of `check`. `ok`: a run can start. Printed, it is a table."""

    ok: bool
    items: tuple[Item, ...]

    def __str__(self) -> str:
        marks = {"ok": "ok", "warning": "look", "error": "no"}
        width = max(len(item.name) for item in self.items)
        lines = [f"{marks[one.level]:<5}{one.name:<{width}}  {one.text}" for one in self.items]
        return "\n".join([*lines, "ready to train" if self.ok else "not yet"])


def check(source: AnyRecipe) -> Check:
    """Check a recipe without training: keys, model, rows, rewards, sizes, memory and disk.

    Raises ConfigError where keys are wrong; everything else is an item of the answer.
    """
    config, _ = given_recipe(source)
    _require_training("check")
    from homeostat.hub.resolve import resolve_names
    from homeostat.run.calling.surroundings import as_before
    from homeostat.run.preflight.check import Preflight
    from homeostat.run.preflight.item import Item

    # The exception of a reward, for example, may quote private values of the recipe.
    values = config.model_dump(mode="json")
    scrubber = Scrubber.of(values, environ=os.environ, shows_paths=True)
    names: list[str] = []
    with as_before():
        config = resolve_names(config, tell=names.append)
        preflight = Preflight(config, progress=lambda done, total: None)
        found = [*(Item("names", "ok", line) for line in names), *preflight.run()]
    items = tuple(
        replace(one, text=scrubber.text(one.text), facts=scrubber.tree(one.facts)) for one in found
    )
    return Check(preflight.exit_code == 0, items)


def steps(
    source: AnyRecipe,
    *,
    on_step: Callable[[Step], object] | None = None,
    on_finding: Callable[[Mapping[str, Any]], object] | None = None,
    on_checkpoint: Callable[[int, Path], object] | None = None,
    on_event: Callable[[str, int, Mapping[str, Any]], object] | None = None,
    on_end: Callable[[RunResult], object] | None = None,
) -> Steps:
    """Return an iterator that trains, and yields every step with its metrics and groups.

    The run begins, or resumes, with the first step that is asked for. If the iteration is broken
    off, the step in progress is saved, and the same call resumes after it.
    """
    config, text = given_recipe(source)
    _require_training("train")
    from homeostat.run.calling.callbacks import Callbacks
    from homeostat.run.calling.steps import Steps

    callbacks = Callbacks(on_step, on_finding, on_checkpoint, on_event, on_end)
    return Steps(config, recipe=text, callbacks=callbacks)


def train(
    source: AnyRecipe,
    *,
    on_step: Callable[[Step], object] | None = None,
    on_finding: Callable[[Mapping[str, Any]], object] | None = None,
    on_checkpoint: Callable[[int, Path], object] | None = None,
    on_event: Callable[[str, int, Mapping[str, Any]], object] | None = None,
    on_end: Callable[[RunResult], object] | None = None,
) -> RunResult:
    """Train to the end, as `homeostat train` does, and return the outcome.

    The same call resumes a run that was interrupted. Ctrl-C finishes and saves the step in
    progress, then raises KeyboardInterrupt. An exception in a callback is raised as CallbackError,
    after the step was saved.
    """
    running = steps(
        source,
        on_step=on_step,
        on_finding=on_finding,
        on_checkpoint=on_checkpoint,
        on_event=on_event,
        on_end=on_end,
    )
    with running:
        for _ in running:
            pass
    assert running.result is not None, "a run that ended without an error has a result"
    return running.result


def evaluate(source: AnyRecipe, *, step: int | str | None = None) -> dict[str, float]:
    """Return the metrics (eval/...) of a model on held-out rows or prompts. Nothing is trained.

    The folder of a run, or of one of its checkpoints: its best checkpoint, or else its newest, or
    the one that `step` names (a number, "best" or "latest"). A recipe: the model that it names, as
    it is before training.
    """
    _require_training("evaluate")
    from homeostat.generation.choice import find_checkpoint, saved_recipe
    from homeostat.hub.resolve import resolve_names
    from homeostat.run.calling.evaluate import evaluate_recipe

    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        folder, found = find_checkpoint(Path(source), step=None if step is None else str(step))
        return evaluate_recipe(as_recipe(saved_recipe(folder)), checkpoint=found)
    if step is not None:
        raise ValueError("step names a checkpoint of a run: give the folder of one")
    return evaluate_recipe(resolve_names(given_recipe(source)[0]))


def _require_training(what: str) -> None:
    """Raise MissingDependencyError where the packages that train are not installed."""
    for name in ("torch", "transformers", "safetensors", "pyarrow"):
        if find_spec(name) is None:
            needed_for = f"homeostat.{what}"
            raise MissingDependencyError.of(name, extra="train", needed_for=needed_for)
