"""`homeostat train` as one of the processes that an outer torchrun or srun starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import typer

from homeostat.config.run import RunConfig
from homeostat.errors import HomeostatError
from homeostat.importing.hints import load_recipe
from homeostat.observe.safe_text import safe_text
from homeostat.workers.outside import Launch, forget_launch, require_launch


def load_launched(launch: Launch | None, recipe: Path, overrides: list[str] | None) -> RunConfig:
    """Load the recipe, and compare it with the launch. Raises ConfigError where they differ.

    The launcher's variables, which describe this process alone, are removed from its environment.
    """
    config = load_recipe(recipe, overrides)
    require_launch(launch, cluster=config.cluster, mesh=config.mesh)
    if launch is not None:
        forget_launch(os.environ)
    return config


def keep_seat(launch: Launch, recipe: Path, overrides: list[str] | None) -> int:
    """Keep the workers of a rank above 0 until the run ends. Returns the exit code."""
    from homeostat.workers.seat import serve_seat

    try:
        config = load_launched(launch, recipe, overrides)
        return serve_seat(launch, timeout_s=config.cluster.start_timeout_s)
    except HomeostatError as error:
        # Each rank prints one line. Rank 0 has the same recipe and prints the whole message.
        first = str(error).splitlines()[0]
        typer.echo(safe_text(f"rank {launch.rank} on {socket.gethostname()}: {first}"), err=True)
        return error.exit_code
