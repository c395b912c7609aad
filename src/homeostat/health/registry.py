"""The registry of all rules: it finds every rule in the folders rules/ and signatures/.

    rules/<family>/<code>_<name>.py    a rule that judges: its RULE
    signatures/<family>.toml           errors that are recognised by their text, one stanza each

To add a rule, add its file or stanza; there is no list to update. A code is never used again:
RETIRED lists the codes of removed rules, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from homeostat.errors import PluginError
from homeostat.health.rule import Rule
from homeostat.health.signatures.load import shipped
from homeostat.health.signatures.signature import Signature, rule_of

_FOLDER = Path(__file__).parent / "rules"
_CODE = re.compile(r"[a-z]{3}\d{3}_")


def rule_files() -> list[Path]:
    """List the files that hold a rule. The other files in these folders are shared by rules."""
    return [file for file in sorted(_FOLDER.glob("*/*.py")) if _CODE.match(file.name)]


def _rules() -> Iterator[Rule]:
    for file in rule_files():
        rule = import_module(f"{__package__}.rules.{file.parent.name}.{file.stem}").RULE
        assert file.name.startswith(rule.code.lower()), f"{file.name} holds {rule.code}"
        yield rule


SIGNATURES: tuple[Signature, ...] = shipped()
RULES: tuple[Rule, ...] = tuple(
    sorted([*_rules(), *map(rule_of, SIGNATURES)], key=lambda rule: rule.code)
)
BY_CODE: dict[str, Rule] = {rule.code: rule for rule in RULES}
RETIRED: dict[str, str] = {}
assert len(BY_CODE) == len(RULES), "a code is used twice"
assert BY_CODE.keys().isdisjoint(RETIRED), "a retired code is used again"


def rules_with(references: Sequence[str]) -> tuple[Rule, ...]:
    """Return all rules, including those of plug-ins. Raises PluginError."""
    if not references:
        return RULES
    # Import pydantic only if plug-ins are given: without it the doctor answers in a third of a
    # second.
    from homeostat.config.plugins import load_plugin

    rules = list(RULES)
    for reference in references:
        rule = load_plugin("rule", reference)
        if not isinstance(rule, Rule):
            why = "it is no homeostat.plugins.Rule"
        elif rule.code in {one.code for one in rules} | RETIRED.keys():
            why = f"another rule has its code {rule.code}"
        else:
            rules.append(rule)
            continue
        raise PluginError(f"the rule {reference!r} cannot be used: {why}.")
    return tuple(rules)
