"""`homeostat scaffold`: lay out a new rule or signature, with its test and its page."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from homeostat.errors import HomeostatError
from homeostat.health.finding import Family

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Kind(StrEnum):
    RULE = "rule"
    SIGNATURE = "signature"


def scaffold(
    kind: Annotated[
        Kind,
        typer.Argument(
            metavar="KIND",
            help="signature: recognises an error by its words in a log. rule: judges metrics, "
            "settings or events.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the illness, in lower case with dashes: pinned-memory-exhausted.",
            show_default=False,
        ),
    ],
    family: Annotated[
        Family,
        typer.Option("--family", help="Part of a run that it affects.", show_default=False),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="WORDS",
            help="For a signature: the words in the log. * stands for any text.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="METRIC", help="For a rule: the metric that it reads."),
    ] = None,
) -> None:
    """Create the files of a new rule or signature in a source checkout of homeostat.

    With the next free code, it writes the rule's file or the signature's entry, test cases that
    pass, the name in the vocabulary and the reference page. Replace every PLACEHOLDER in them: a
    test fails until none is left.
    """
    from homeostat.cli import scaffolding

    if not _NAME.fullmatch(name):
        raise HomeostatError(f"{name!r} is no name of an illness: use small letters and dashes.")
    checkout = scaffolding.find_checkout()
    if kind is Kind.SIGNATURE:
        words = _needed(text, "--text", beside=metric, other="--metric", kind=kind)
        laid = scaffolding.new_signature(checkout, name=name, family=family, text=words)
    else:
        read = _needed(metric, "--metric", beside=text, other="--text", kind=kind)
        laid = scaffolding.new_rule(checkout, name=name, family=family, metric=read)
    scaffolding.write(laid)
    scaffolding.generate(checkout)
    typer.echo(f"{laid.code} {name}:")
    for file in laid.files:
        typer.echo(f"  {file.relative_to(checkout)}")
    typer.echo(f"  docs/reference/rules/{family.value}.md (generated)")
    typer.echo(f"Write what says PLACEHOLDER, then: make docs && {laid.test}")


def _needed(value: str | None, option: str, *, beside: str | None, other: str, kind: Kind) -> str:
    """The value of the option that a kind needs; the other kind's option is refused."""
    if beside is not None:
        raise HomeostatError(f"leave out {other}: it does not belong to a {kind.value}.")
    if value is None:
        raise HomeostatError(f"a {kind.value} needs {option}.")
    return value
