"""`homeostat dev`: work on a source checkout of homeostat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.errors import HomeostatError
from homeostat.json_text import parse_json

if TYPE_CHECKING:
    from homeostat.cli.threads import Case

STDIN = "-"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def dev() -> None:
    """Work on a source checkout of homeostat."""


@app.command("add-case")
def add_case(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Cases, one JSON object a line; CONTRIBUTING.md explains the keys. "
            "- reads standard input.",
            show_default=False,
        ),
    ],
) -> None:
    """Add failures from public threads to the collection that the doctor is scored on.

    Every case is checked; if one is wrong or in the collection already, none is added. The half
    (open or sealed) follows from the thread's repository and month.
    """
    from homeostat.cli import threads
    from homeostat.cli.scaffolding import find_checkout

    cases = _parsed(_lines(path))
    root = find_checkout()
    added = threads.add(root, cases)
    threads.write_known(root)
    for half, number in added.items():
        typer.echo(f"{number} to {threads.FOLDER / half.value}.jsonl")


@app.command("list-messages")
def list_messages(
    packages: Annotated[
        list[str],
        typer.Argument(
            metavar="PACKAGE...",
            help="Names of installed packages, or folders of sources.",
            show_default=False,
        ),
    ],
) -> None:
    """List the messages that a library can raise and that the doctor can only guess about.

    Replace the ? of a line by the illnesses that its message states, the likeliest first and
    separated by commas, and give the file to `add-messages`.
    """
    from homeostat.cli import library_messages as messages

    for folder in map(messages.folder_of, packages):
        for one in messages.raised_in(folder):
            if messages.is_left_open(one):
                typer.echo(f"{one.library}\t{messages.UNLABELLED}\t{one.message}")


@app.command("add-messages")
def add_messages(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Labelled lines of `list-messages`. - reads standard input.",
            show_default=False,
        ),
    ],
) -> None:
    """Add labelled messages of libraries to those that the doctor knows.

    Every line is checked; if one is wrong, none is added. Lines that still have a ? are skipped.
    """
    from homeostat.cli import library_messages as messages
    from homeostat.cli.scaffolding import find_checkout

    labelled = messages.parse_labels(_lines(path))
    if not labelled:
        raise HomeostatError("there are no labelled messages in the input.")
    added, common = messages.add(find_checkout(), labelled)
    typer.echo(f"{added} new messages in {messages.MESSAGES}")
    if common:
        typer.echo(f"{common} were left out: too few words, or words that many messages have")


def _lines(path: str) -> list[str]:
    if path == STDIN:
        return sys.stdin.read().splitlines()
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HomeostatError(f"{path} cannot be read: {error}") from None


def _parsed(lines: list[str]) -> list[Case]:
    """Return the cases of all lines, or raise with the problems of each wrong one."""
    from homeostat.cli.threads import parse

    cases: list[Case] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cases.append(parse(parse_json(line)))
        except HomeostatError as error:
            problems.append(f"line {number}: {error}")
        except ValueError as error:
            problems.append(f"line {number}: not JSON: {error}")
    if problems:
        raise HomeostatError("\n".join([*problems, "Nothing was added."]))
    if not cases:
        raise HomeostatError("there are no cases in the input.")
    return cases


@app.command("check-settings")
def check_settings(
    frameworks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FRAMEWORK]...",
            help="Lists of health/frameworks/known; all of them if none is named.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[REPOSITORY=]FOLDER",
            help="A checkout, or a folder with installed packages. With a repository, such as "
            "huggingface/trl=../trl, also settings that moved to other files are found. "
            "[default: the packages of this Python]",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the places that were found into the lists.")
    ] = False,
) -> None:
    """Compare the settings that the doctor may name with the sources of their frameworks.

    Says which settings vanished and which moved. Ends with status 1 if one vanished, or if one has
    no place in any source.
    """
    from homeostat.cli.known_settings import reporting

    folders = reporting.folders(source or [])
    root = None
    if write:
        from homeostat.cli.scaffolding import find_checkout

        root = find_checkout()
    reports = [reporting.report(name, folders) for name in reporting.chosen(frameworks or [])]
    for one in reports:
        typer.echo("\n".join(one.lines))
        if root is not None:
            reporting.write(root, one)
    typer.echo(reporting.summary(reports))
    if any(one.is_wrong for one in reports):
        raise typer.Exit(1)
