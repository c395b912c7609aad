"""Runs a tiny recipe in this process or, to be killed or starved, in another one."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from tests.support.forks import Forked

from homeostat.config import RunConfig
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.rollout.vllm.options import is_installed
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.result import RunResult
from homeostat.run.session.session import open_session
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks
from homeostat.train.saving.checkpoint import CheckpointStore, _write_manifest


def told(config: RunConfig) -> str:
    """Train, and return the lines that the console showed."""
    shown = io.StringIO()
    train(config, console=Console(file=shown, width=200))
    return shown.getvalue()


def train(
    config: RunConfig, *, console: Console | None = None, hooks: Hooks = NO_HOOKS
) -> RunResult:
    console = console or Console(file=io.StringIO())
    with open_session(
        config, recipe="", command=["homeostat", "train"], console=console, log_level="warning"
    ) as session:
        return train_recipe(config, session, hooks)


def run_script(file: Path, *arguments: str) -> None:
    """`python file arguments`, in this process: a child would spend seconds on imports alone."""
    with patch.object(sys, "argv", [str(file), *arguments]):
        runpy.run_path(str(file), run_name="__main__")


def losses(config: RunConfig) -> list[float]:
    """The losses of the steps that made an update: a step of RL without signal makes none."""
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return [record["train/loss"] for record in records if "train/loss" in record]


def events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    found = iter_jsonl(config.run_dir / "events.jsonl")
    return [event for event in found if event["kind"] == kind]


def sign(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint whose files were changed."""
    (checkpoint / "manifest.json").unlink()
    _write_manifest(checkpoint)


def final_tensors(config: RunConfig) -> dict[str, bytes]:
    """The newest checkpoint's tensor files, byte for byte."""
    store = CheckpointStore(config.run_dir / "checkpoints")
    path = store.path(store.steps()[-1])
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


def start(
    raw: dict[str, Any],
    folder: Path,
    *overrides: str,
    prelude: str = "",
    env: dict[str, str] | None = None,
) -> Forked | subprocess.Popen[str]:
    """`homeostat train` in its own process. `prelude` is Python run before it.

    It is forked from a process that has imported everything, except where vLLM is installed, which
    must be imported by the process that uses it, and where `env` adds variables that libraries read
    when they are loaded.
    """
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(raw))
    code = f"import sys\n{prelude}\nfrom homeostat.cli.main import main\nmain()"
    arguments = ["train", str(file), *overrides]
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    if not is_installed() and env is None:
        return Forked(code, arguments, env=whole)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=whole,
    )


def before(place: str, name: str, action: str, *, only_if: str = "True") -> str:
    """Python, for a prelude, that does something each time before a function of ours is called.

    Several may follow one another. `only_if` may use the call's `args` and `kwargs`, and `call`,
    its number from 1.
    """
    return f"""
import itertools, os, resource, signal
import {place} as place
def _wrapped(original, calls):
    def instead(*args, **kwargs):
        call = next(calls)
        if {only_if}:
            {action}
        return original(*args, **kwargs)
    return instead
place.{name} = _wrapped(place.{name}, itertools.count(1))
"""
