"""Say which plug-ins a recipe uses: where each comes from, its own keys, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from homeostat.config.data import all_sources
from homeostat.config.plugins import Plugged
from homeostat.config.run import RunConfig
from homeostat.health.registry import RULES, rules_with
from homeostat.run.preflight.item import Item


def plugin_items(config: RunConfig) -> Iterator[Item]:
    """Yield an item for each plug-in. Raises PluginError where a rule cannot be used."""
    used: list[Any] = [config.algorithm, config.engine, config.sync.transport]
    used += [source for _, source in all_sources(config.data)]
    used += config.reward_functions.functions
    for one in used:
        if isinstance(one, Plugged):
            yield _item(one)
    for rule in rules_with(config.health.rules)[len(RULES) :]:
        text = f"rule {rule.code} {rule.name}: {rule.text.strip().splitlines()[0]}"
        needs = ", ".join(rule.needs)
        facts = {"kind": "rule", "code": rule.code, "needs": list(rule.needs)}
        yield Item("plug-ins", "ok", text + (f" Needs {needs}" if needs else ""), facts)


def _item(one: Plugged) -> Item:
    keys = {name: getattr(one, name) for name in one.own_keys()}
    shown = ", ".join(f"{name}={value}" for name, value in keys.items())
    text = f"{one.noun()} {one.type}"
    if shown:
        text += f"; its keys: {shown}"
    if needs := one.needs():
        text += f"; needs {needs}"
    return Item("plug-ins", "ok", text, {"kind": one.noun(), "type": one.type, "keys": list(keys)})
