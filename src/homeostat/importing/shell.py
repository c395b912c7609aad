"""Read the arguments of a launch script: `--flag value` and hydra's `a.b=c`.

The script is split into words as a shell would, by shlex; variables and arrays that it assigns are
inserted. Nothing is run: what a command would print, or what comes from the environment, stays as
it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from homeostat.config.loading.yaml_file import parse_yaml
from homeostat.errors import ConfigError
from homeostat.importing.entries import ForeignFile, Given

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:export\s+|declare\s+-a\s+)?([A-Za-z_]\w*)\+?=\((.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)"
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_LAUNCHER_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus", "nproc")
_TRL_VERBS = ("sft", "dpo", "grpo", "kto", "rloo", "reward")
# A quoted text of a script, a JSON object for one, goes over at most this many lines.
_MAX_QUOTED_LINES = 60
_MAX_INSERTIONS = 20


def read_shell(text: str) -> ForeignFile:
    """Return the arguments of the command that has the most of them."""
    variables: dict[str, list[str]] = {}
    best: list[str] = []
    for words in _commands(text, variables):
        if _num_arguments(words) > _num_arguments(best):
            best = words
    launcher, rest = _without_launcher(best)
    devices = [
        given.value
        for given in _arguments(launcher)
        if given.name.lstrip("-").replace("-", "_") in _LAUNCHER_PROCESSES
    ]
    return ForeignFile(
        text,
        tuple(_arguments(rest)),
        trainer=_trainer(best),
        devices=next((one for one in devices if isinstance(one, int)), None),
    )


def _commands(text: str, variables: dict[str, list[str]]) -> Iterator[list[str]]:
    """Yield the words of each command; assignments go into `variables`."""
    lines = text.replace("\\\n", " ").splitlines()
    while lines:
        line = lines.pop(0)
        if found := _ARRAY.match(line):
            body = [found[2]]
            while not _closes(body[-1]) and lines:
                body.append(lines.pop(0))
            body[-1] = body[-1].partition("#")[0].rstrip().removesuffix(")")
            inside = [word for one in body for word in _split(one)]
            variables[found[1]] = _inserted(inside, variables)
            continue
        words = _split(line)
        if words is _UNCLOSED:
            words = _quoted_over_lines(line, lines)
        if words and words[0] in ("export", "declare", "local"):
            words = words[1:]
        assigned = [_ASSIGNMENT.fullmatch(word) for word in words]
        if words and all(assigned) and not any("." in word.partition("=")[0] for word in words):
            for one in filter(None, assigned):
                variables[one[1]] = _inserted([one[2]], variables)
        elif words:
            yield _inserted(words, variables)


_UNCLOSED: list[str] = []


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return _UNCLOSED


def _closes(line: str) -> bool:
    return line.partition("#")[0].rstrip().endswith(")")


def _quoted_over_lines(line: str, lines: list[str]) -> list[str]:
    """Return the words of a line whose quotes close some lines later; those lines are used up."""
    for count in range(1, min(_MAX_QUOTED_LINES, len(lines)) + 1):
        words = _split("\n".join([line, *lines[:count]]))
        if words is not _UNCLOSED:
            del lines[:count]
            return words
    return []


def _inserted(words: Sequence[str], variables: dict[str, list[str]]) -> list[str]:
    """Return the words with the values of variables; one that is not assigned stays."""
    result: list[str] = []
    for word in words:
        whole = _VARIABLE.fullmatch(word)
        name = (whole[1] or whole[3]) if whole else ""
        if name in variables:
            result += variables[name]
            continue
        for _ in range(_MAX_INSERTIONS):
            changed = _VARIABLE.sub(lambda found: _value(found, variables), word)
            if changed == word:
                break
            word = changed
        result.append(word)
    return result


def _value(found: re.Match[str], variables: dict[str, list[str]]) -> str:
    name = found[1] or found[3]
    if name in variables:
        return " ".join(variables[name])
    return found[2] if found[2] is not None else found[0]


def _num_arguments(words: Sequence[str]) -> int:
    return sum(word.startswith("--") or bool(_OVERRIDE.fullmatch(word)) for word in words)


def _without_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command into the launcher with its options, and the arguments of what it starts."""
    start = end = len(words) - words[::-1].index("--") if "--" in words else 0
    for index in range(end, len(words)):
        word = words[index]
        is_module = word == "-m" and index + 1 < len(words)
        if word.endswith(".py") or is_module or word.startswith("openrlhf.cli."):
            start, end = index, index + (2 if is_module else 1)
            break
        if index > end and words[index - 1] == "trl" and word in _TRL_VERBS:
            start, end = index, index + 1
            break
    return words[:start], words[end:]


def _trainer(words: Sequence[str]) -> str:
    """Return the algorithm that a command names: `trl grpo`, `openrlhf.cli.train_dpo`, `dpo.py`."""
    for before, word in zip(["", *words], words, strict=False):
        stem = word.rpartition("/")[2].rpartition(".")[2] if ".cli." in word else word
        stem = stem.rpartition("/")[2].removesuffix(".py").removeprefix("train_")
        is_script = word.endswith(".py") or ".cli." in word or before == "trl"
        if is_script and stem in (*_TRL_VERBS, "rm", "ppo_ray", "ppo"):
            return stem.removesuffix("_ray")
        if word.endswith("sft_trainer"):
            return "sft"
    return ""


def _arguments(words: Sequence[str]) -> Iterator[Given]:
    # Arrays that the script does not assign, and its own arguments, say nothing.
    words = [word for word in words if word not in ("$@", "$*") and "[@]" not in word]
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word.partition("=")
            if equals:
                yield Given(name, plain_value(text))
                continue
            values = []
            while index < len(words) and not _is_argument(words[index]):
                values.append(words[index])
                index += 1
            found = [plain_value(one) for one in values]
            yield Given(name, found[0] if len(found) == 1 else found or True)
        elif found := _OVERRIDE.fullmatch(word):
            yield Given(found[1], plain_value(found[2]))


def _is_argument(word: str) -> bool:
    return word.startswith("--") or bool(re.fullmatch(r"-[A-Za-z]", word)) or word in "|&;<>"


def plain_value(text: str) -> object:
    """Return the number, truth value or list that a word stands for, or else the word."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text.startswith("$"):
        return text
    try:
        value, _ = parse_yaml(text, name="argument")
    except ConfigError:
        return text
    return text if isinstance(value, dict) else value
