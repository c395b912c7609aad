"""`homeostat rules`: list every rule that the doctor knows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homeostat.cli.options import Format, OutputFormat
from homeostat.health.finding import Family

if TYPE_CHECKING:
    from homeostat.health.rule import Rule


def rules(
    family: Annotated[
        Family | None,
        typer.Option("--family", help="List only the rules about this part of a run."),
    ] = None,
    format: OutputFormat = Format.TEXT,
) -> None:
    """List all rules, each with its code, level, name and a summary."""
    from homeostat.health.registry import RULES

    found = [rule for rule in RULES if family is None or rule.family is family]
    if format is Format.JSON:
        typer.echo(json.dumps([rule_json(rule) for rule in found], indent=2))
        return
    for part in Family:
        own = [rule for rule in found if rule.family is part]
        if own:
            typer.echo(typer.style(f"{part.value} ({len(own)})", bold=True))
            for rule in own:
                typer.echo(f"  {rule.code}  {rule.level.value:5}  {rule.name}: {headline(rule)}")
    typer.echo(f"{len(found)} rules. `homeostat explain CODE` shows the page of one.")


def headline(rule: Rule) -> str:
    """Return the first sentence of a rule's page."""
    first = " ".join(rule.text.strip().split("\n\n", 1)[0].split())
    return first


def rule_json(rule: Rule) -> dict[str, Any]:
    """Return a rule as JSON values."""
    return {
        "code": rule.code,
        "name": rule.name,
        "family": rule.family.value,
        "level": rule.level.value,
        "confidence": rule.confidence.value,
        "about": headline(rule),
        "kinds": [kind.value for kind in rule.kinds],
        "needs": list(rule.needs),
        "options": {
            name: {"default": default, "meaning": meaning}
            for name, (default, meaning) in rule.option_fields().items()
        },
        "explains": list(rule.explains),
    }
