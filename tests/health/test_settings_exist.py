"""A setting is printed only where the framework's sources have it, with a value of its kind."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import homeostat.health.rules
from homeostat.health.finding import Fix
from homeostat.health.frameworks import ALL, HOMEOSTAT, UNKNOWN, Framework
from homeostat.health.frameworks.known import KINDS, is_same_value, known, literal, written
from homeostat.health.frameworks.plain_words import OURS_ALONE, PLAIN_WORDS
from homeostat.health.frameworks.planned import FOREIGN, PLANNED
from homeostat.health.frameworks.telling import (
    ToldFix,
    named_settings,
    told,
    told_all,
)
from homeostat.health.registry import SIGNATURES
from support.own_settings import own_kinds

NAMED = [name for name in ALL if name not in (HOMEOSTAT.name, UNKNOWN.name)]
OWN = own_kinds()
RULES = Path(homeostat.health.rules.__file__).parent
# What guides and older versions name, and the newest sources do not have.
GONE = {
    "miles": (
        "--int4-group-size",
        "--int4-skip-layers",
        "--online-sft-interval",
        "--draft-lr",
        "--co-evolution-interval",
        "--use-r3",
        "--fp8-skip-layers",
    ),
    "slime": ("--critic-lr", "--int4-group-size"),
    "prime_rl": ("max_async_level",),
    "transformers": ("lora_r", "dataset_num_proc", "save_safetensors"),
    "vllm": ("VLLM_ATTENTION_BACKEND", "--swap-space", "swap_space"),
    "trl": ("max_prompt_length", "ppo_epochs"),
    "openrlhf": ("--adam_offload", "--zero_stage", "--vllm_enable_sleep"),
}


def rule_fixes() -> Iterator[Fix]:
    """The fixes that rules write down; a number stands in for a value that is computed."""
    for path in sorted(RULES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Fix":
                key, value = _text(node.args[0], ""), _text(node.args[1], "1")
                theirs = [one.value for one in node.keywords if one.arg == "theirs"]
                yield Fix(key, value, "why", theirs=ast.literal_eval(theirs[0]) if theirs else {})


def _text(node: ast.expr, instead: str) -> str:
    return node.value if isinstance(node, ast.Constant) else instead


FIXES = [*(fix for one in SIGNATURES for fix in one.fixes), *rule_fixes()]


def all_told(framework: Framework) -> list[ToldFix]:
    return [told(fix, framework) for fix in FIXES]


def test_there_are_fixes_to_test() -> None:
    assert len(FIXES) > 950
    assert sum(len(fix.theirs) for fix in FIXES) > 600


@pytest.mark.parametrize("framework", NAMED)
def test_what_a_fix_says_of_a_framework_exists_there(framework: str) -> None:
    facts, wrong = known(framework), []
    for fix in FIXES:
        for name, value in named_settings(fix.theirs[framework]) if framework in fix.theirs else ():
            spelled = facts.spelling(name)
            kind = facts.kind(spelled) if spelled else ""
            typed = kind not in ("text", "list", "table")
            if spelled is None or (value and typed and written(value, kind) is None):
                wrong.append((name, value, kind))
    assert wrong == []


@pytest.mark.parametrize("framework", NAMED)
def test_a_printed_value_is_of_the_settings_kind(framework: str) -> None:
    facts = known(framework)
    for fix in all_told(ALL[framework]):
        if fix.setting is None:
            assert fix.value == ""
            continue
        kind = facts.kind(fix.setting)
        assert not (fix.value and kind == "switch"), fix
        if fix.value and kind not in ("text", "list", "table"):
            assert written(fix.value, kind) == fix.value, fix
        if fix.value and kind == "text":
            assert re.fullmatch(r"\S+", fix.value), f"prose as a value: {fix}"


@pytest.mark.parametrize("framework", NAMED)
def test_our_own_keys_are_told_to_our_own_runs_alone(framework: str) -> None:
    theirs = set(known(framework).settings or {})
    mine = {key for key in (*OWN, *PLANNED, *FOREIGN) if "." in key} - theirs
    for fix in all_told(ALL[framework]):
        words = set(re.findall(r"[\w.\[\]-]+", f"{fix.setting} {fix.value} {fix.advice} {fix.why}"))
        assert not {word.strip(".") for word in words} & mine, fix


@pytest.mark.parametrize("framework", GONE)
def test_what_the_sources_do_not_have_is_not_printed(framework: str) -> None:
    said = {
        word
        for fix in all_told(ALL[framework])
        for word in re.findall(r"[\w.-]+", f"{fix.setting} {fix.value} {fix.advice} {fix.why}")
    }
    assert said.isdisjoint(GONE[framework])
    assert not any(known(framework).spelling(name) for name in GONE[framework])


def test_our_own_settings_are_those_of_a_recipe() -> None:
    facts = known(HOMEOSTAT.name).settings or {}
    assert {name: kind for name, kind in facts.items() if OWN.get(name) != kind} == {}
    asked = {fix.setting for fix in FIXES} - {""} - PLANNED.keys() - FOREIGN.keys()
    assert asked - facts.keys() == set(), "give it its kind in known/homeostat.toml"
    for fix in all_told(HOMEOSTAT):
        if fix.setting and fix.value:
            assert written(fix.value, facts[fix.setting]) == fix.value


@pytest.mark.parametrize("framework", NAMED)
def test_facts_say_where_they_were_read(framework: str) -> None:
    facts = known(framework)
    assert facts.settings
    assert all(isinstance(kind, tuple) or kind in KINDS for kind in facts.settings.values())
    assert facts.sources
    for source in facts.sources:
        # A commit with its date, or the tag of a release.
        if source.commit.removeprefix("v") != source.version:
            assert re.fullmatch(r"[0-9a-f]{12}", source.commit)
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", source.date)


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("8", "int", "8"),
        ("8 (at least 2)", "int", None),
        ("1.5", "int", None),
        ("1e-6", "float", "1e-6"),
        ("a third of it", "float", None),
        ("nan", "float", None),
        ("on", "bool", "true"),
        ("false", "switch", "false"),
        ("1", "bool", None),
        ("small enough to fit", "bool", None),
        ("SDPA", ("eager", "sdpa"), "sdpa"),
        ("fp32", ("float32", "bfloat16"), "float32"),
        ("native", ("eager", "sdpa"), None),
        ("a Jinja file", "text", None),
        ("null", "text", "null"),
    ],
)
def test_a_value_is_written_only_where_it_is_one(
    text: str, kind: str | tuple[str, ...], found: str | None
) -> None:
    assert written(text, kind) == found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("on", True, True),
        ("1.0", 1, True),
        ("1e-6", 0.000001, True),
        ("Token", "token", True),
        ("none", None, True),
        ("1", True, False),
        ("0.28", 0.2, False),
        ("k3", "k1", False),
    ],
)
def test_values_are_compared_whatever_their_spelling(one: str, other: object, same: bool) -> None:
    assert is_same_value(one, other) is same


def test_words_and_numbers_are_told_apart() -> None:
    assert [literal(text) for text in ("off", "3", "0.5", "inf", "twice")] == [
        False,
        3,
        0.5,
        None,
        None,
    ]


def test_a_switch_that_means_the_opposite_is_turned_round() -> None:
    more, less = (Fix("trainer.gradient_checkpointing", value, "why") for value in ("true", "off"))
    table = ALL["llama_factory"]
    assert (told(more, table).setting, told(more, table).value) == (
        "disable_gradient_checkpointing",
        "false",
    )
    assert told(less, table).value == "true"


def test_what_a_framework_does_not_have_is_left_out_where_something_is_left() -> None:
    fixes = (Fix("trainer.lr", "1e-6", "lower"), Fix("data.bad_rows", "drop", "leaves rows out"))
    assert [fix.setting for fix in told_all(fixes, ALL["trl"])] == ["learning_rate"]
    (alone,) = told_all(fixes[1:], ALL["trl"])
    assert (alone.setting, alone.value) == (None, "")
    assert alone.advice == "treatment of rows that cannot be used (drop)"
    assert len(told_all(fixes, UNKNOWN)) == 2


def test_what_only_our_trainer_does_is_no_advice_to_others() -> None:
    ours = (Fix("engine.max_restarts", "3", "a dead engine is replaced"),)
    assert told_all(ours, ALL["prime_rl"]) == told_all(ours, UNKNOWN) == []
    assert len(told_all(ours, ALL["homeostat"])) == 1


@pytest.mark.parametrize("key", [*PLAIN_WORDS, *sorted(OURS_ALONE)])
def test_plain_words_are_of_keys_that_exist(key: str) -> None:
    # Some keys are listed for other frameworks alone.
    assert known("homeostat").spelling(key) or any(key in ALL[name].settings for name in NAMED)
