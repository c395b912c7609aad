"""Read the arguments of TRL's config objects in a Python script, by its syntax tree alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from homeostat.errors import ConfigError, Problem
from homeostat.importing.entries import ForeignFile, Given

# Classes whose keyword arguments are settings, by the end of their name.
_CONFIGS = ("Config", "TrainingArguments")
_TRAINERS = ("SFT", "GRPO", "DPO", "KTO", "ORPO", "CPO", "RLOO", "Reward", "PPO")
# Arguments of calls that are settings by another name: function -> names of its first arguments.
_CALLS = {
    "load_dataset": ("dataset_name", "dataset_config"),
    "from_pretrained": ("model_name_or_path",),
}
_KEYWORDS = {"load_dataset": {"split": "dataset_train_split", "name": "dataset_config"}}
# The class of peft that makes an adapter, even without arguments.
ADAPTER = "LoraConfig"
# Arguments of a trainer that are settings, and not objects.
_OF_TRAINER = ("model", "reward_funcs")


def read_python(text: str, *, name: str) -> ForeignFile:
    """Return the settings of a script: literal arguments, and names of those that it computes."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("", f"it is not valid Python: {error}.")], file=name) from None
    constants = _constants(tree)
    found: dict[str, Given] = {}
    trainer = ""
    classes: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _called(node)
        classes.add(called)
        trainer = trainer or next(
            (one.lower() for one in _TRAINERS if called in (f"{one}Config", f"{one}Trainer")), ""
        )
        for given in _settings(node, called, constants):
            # A value that can be read counts more than an expression of the same name.
            if given.name not in found or found[given.name].is_computed:
                found[given.name] = given
    of_trl = {f"{one}Config" for one in _TRAINERS}
    plain = "TrainingArguments" in classes and not classes & of_trl
    return ForeignFile(text, tuple(found.values()), trainer=trainer, plain_arguments=plain)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return names that are assigned one literal."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                try:
                    found[target.id] = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    continue
    return found


def _settings(node: ast.Call, called: str, constants: dict[str, Any]) -> Iterator[Given]:
    if called in _CALLS:
        for name, argument in zip(_CALLS[called], node.args, strict=False):
            yield _given(name, argument, constants)
        for keyword in node.keywords:
            if other := _KEYWORDS.get(called, {}).get(keyword.arg or ""):
                value = keyword.value
                # Several splits at once: the first is trained on, and the next one held out.
                parts = value.elts[:2] if isinstance(value, ast.List) else [value]
                for name, part in zip((other, "dataset_test_split"), parts, strict=False):
                    yield _given(name, part, constants)
    elif called.endswith(_CONFIGS):
        if called == ADAPTER:
            yield Given("peft_config", ADAPTER)
        for keyword in node.keywords:
            if keyword.arg:
                yield _given(keyword.arg, keyword.value, constants)
    elif called.endswith("Trainer"):
        for keyword in node.keywords:
            if keyword.arg in _OF_TRAINER:
                given = _given(keyword.arg, keyword.value, constants)
                # A model that was built before is named where it was loaded.
                if not (given.is_computed and keyword.arg == "model"):
                    yield given


def _given(name: str, node: ast.expr, constants: dict[str, Any]) -> Given:
    if isinstance(node, ast.Name) and node.id in constants:
        return Given(name, constants[node.id])
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return Given(name, node.attr)
    if name == "reward_funcs" and (functions := _functions(node)):
        return Given(name, functions)
    try:
        return Given(name, ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Given(name, ast.unparse(node), is_computed=True)


def _functions(node: ast.expr) -> list[str]:
    """Return the names of functions that are given as such, one or a list of them."""
    nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [one.id for one in nodes if isinstance(one, ast.Name)]
