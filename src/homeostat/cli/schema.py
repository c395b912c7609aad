"""`homeostat schema`: print the JSON Schema of a recipe."""

from __future__ import annotations

import json

import typer

from homeostat.config.loading.schema import json_schema


def schema() -> None:
    """Print the JSON Schema of a recipe, for editors that complete and check YAML.

    In VS Code: save the schema to a file, and add `# yaml-language-server: $schema=FILE` to your
    recipe.
    """
    typer.echo(json.dumps(json_schema(), indent=2))
