"""`homeostat docs`: the documentation of this version, offline."""

from __future__ import annotations

import difflib
import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from homeostat.errors import HomeostatError
from homeostat.observe.safe_text import safe_text
from homeostat.shipped import shipped_folder


def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE]",
            help="A page, such as first_run, preferences or config. Default: the list of all.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Write the site to this new folder instead."
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open a browser, or only print the address.")
    ] = True,
) -> None:
    """Open the documentation of this version in a browser. It works offline.

    The site is built from the pages that come with homeostat and has a search. With --out it is
    written to a folder that any web server can serve.
    """
    from homeostat.documentation.site import INDEX, build_site, cached_site

    source = shipped_folder("docs")
    place = INDEX if page is None else _page(source, page)
    if out is not None:
        num_pages = build_site(source, out)
        typer.echo(f"{num_pages} pages written", err=True)
        typer.echo(safe_text(str(out / place)))
        return
    address = (cached_site(source, _cache()) / place).resolve().as_uri()
    typer.echo(safe_text(address))
    if open_browser and not webbrowser.open(address):
        typer.echo("No browser was found: open the address above in one.", err=True)


def _cache() -> Path:
    """Return the cache folder: its files can be generated again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "homeostat"


def _page(source: Path, word: str) -> str:
    """Return the file of a page, given the last part of its name with or without the suffix."""
    files = {file.stem: file for file in sorted(source.glob("**/*.md"))}
    name = word.lower().removesuffix(".md").removesuffix(".html").replace("-", "_").split("/")[-1]
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise HomeostatError(f"there is no page {word!r}.{hint} `homeostat docs` lists all.")
    return files[name].relative_to(source).with_suffix(".html").as_posix()
