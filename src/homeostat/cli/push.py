"""`homeostat push`: upload a model with its model card to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from homeostat.cli import generation_options as opts
from homeostat.cli.export import DtypeName
from homeostat.observe.safe_text import safe_text

Repo = Annotated[
    str,
    typer.Argument(
        metavar="OWNER/NAME",
        help="The repository. It is created if it does not exist.",
        show_default=False,
    ),
]
Public = Annotated[
    bool,
    typer.Option(
        "--public/--private",
        help="Visibility of a new repository. An existing repository keeps its visibility.",
    ),
]
Dtype = Annotated[
    DtypeName,
    typer.Option("--dtype", help="Precision of the weights. auto: as they were trained."),
]
Adapter = Annotated[
    bool, typer.Option("--adapter", help="Upload only the adapter, in peft's format.")
]
License = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="ID",
        help="The hub's identifier of the licence, for the model card: apache-2.0, mit, ...",
        show_default=False,
    ),
]
Message = Annotated[
    str | None, typer.Option("--message", "-m", metavar="TEXT", help="Commit message.")
]
DryRun = Annotated[
    Path | None,
    typer.Option(
        "--dry-run",
        metavar="FOLDER",
        help="Write what would be uploaded to this new folder, and upload nothing.",
        show_default=False,
    ),
]


def push(
    model: opts.Model,
    repo: Repo,
    public: Public = False,
    dtype: Dtype = DtypeName.AUTO,
    adapter: Adapter = False,
    license: License = None,
    message: Message = None,
    dry_run: DryRun = None,
    base: opts.Base = None,
    step: opts.Step = None,
    revision: opts.Revision = None,
) -> None:
    """Upload a model to the Hugging Face hub, with a card that describes its training.

    The card states the base model, data, recipe, metrics and health findings of the run, without
    values that might be private. A new repository is private unless you give --public. Use
    --dry-run first to see everything that would be uploaded.
    """
    from homeostat.generation.choice import choose
    from homeostat.generation.hub_push import push_folder, require_repo_name
    from homeostat.generation.publishing import make_folder

    require_repo_name(repo)
    choice = choose(model, base=base, step=step, revision=revision)
    how: dict[str, Any] = {
        "repo": repo,
        "dtype": dtype.value,
        "adapter_only": adapter,
        "license": license,
    }
    typer.echo(f"exporting {safe_text(choice.describe())}", err=True)
    if dry_run is not None:
        for note in make_folder(choice, dry_run, **how):
            typer.echo(note, err=True)
        typer.echo(safe_text(str(dry_run)))
        return
    with tempfile.TemporaryDirectory(prefix="homeostat_push_") as hidden:
        folder = Path(hidden) / "model"
        for note in make_folder(choice, folder, **how):
            typer.echo(note, err=True)
        words = message or f"Upload {choice.describe_step()} with homeostat"
        pushed = push_folder(folder, repo, is_public=public, message=words)
    typer.echo(safe_text(pushed.url))
