"""`homeostat explain`: show everything that is known about one illness."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.cli.options import Format, OutputFormat
from homeostat.cli.rules import rule_json
from homeostat.errors import HomeostatError

if TYPE_CHECKING:
    from homeostat.health.rule import Rule


def explain(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE",
            help="A rule's code (RWD001) or the name of an illness or a cause.",
            show_default=False,
        ),
    ],
    format: OutputFormat = Format.TEXT,
) -> None:
    """Explain a rule: what it looks for, why it matters, likely causes and what to do.

    If you give the name of an illness, its meaning and the rules that can find it are shown.
    """
    from homeostat.health.registry import BY_CODE, RULES
    from homeostat.health.vocabulary import FAMILY_OF, WORDS

    name = code.strip().lower()
    rule = BY_CODE.get(code.strip().upper())
    if rule is None and name not in FAMILY_OF:
        raise HomeostatError(_unknown(code, [*BY_CODE, *FAMILY_OF]))
    found = [rule] if rule is not None else [one for one in RULES if _names(one, name)]
    if format is Format.JSON:
        pages = [{**rule_json(one), "text": one.text.strip()} for one in found]
        meaning = WORDS[FAMILY_OF[name]][name] if rule is None else WORDS[rule.family][rule.name]
        typer.echo(json.dumps({"meaning": meaning, "rules": pages}, indent=2))
        return
    if rule is None:
        family = FAMILY_OF[name]
        typer.echo(f"{name} ({family.value}): {WORDS[family][name]}")
        for one in found:
            typer.echo(f"  {one.code} {one.name}")
        return
    typer.echo("\n".join(page(rule)))


def page(rule: Rule) -> Iterator[str]:
    """Return the page of a rule in Markdown."""
    yield f"# {rule.code} {rule.name}"
    yield f"{rule.family.value}, {rule.level.value}, {rule.confidence.value}"
    if rule.kinds:
        yield "Judges only runs of: " + ", ".join(kind.value for kind in rule.kinds)
    if rule.needs:
        yield "Needs: " + ", ".join(rule.needs)
    yield ""
    yield rule.text.strip()
    options = rule.option_fields()
    if options:
        yield ""
        yield "## Options"
        for name, (default, meaning) in options.items():
            yield f"- {name} = {default}: {meaning}"


def _names(rule: Rule, name: str) -> bool:
    """Return whether a rule is about an illness, or lists it among the likely causes."""
    return rule.name == name or f"- {name}:" in rule.text


def _unknown(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1) or difflib.get_close_matches(
        word.upper(), known, n=1
    )
    hint = f" Did you mean {close[0]}?" if close else " `homeostat rules` lists the codes."
    return f"{word!r} is no rule's code and no name that a finding may have.{hint}"
