"""Text that a stranger understands on first reading: the part of this that a test can check.

Docstrings start with a full sentence or an imperative, and texts use the field's words rather than
private ones. `COVERED` lists the sources that are checked; add a folder once its text is rewritten.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.support.sources import PACKAGE, ROOT, nodes_of, text_of

# Files and folders whose docstrings, comments and help texts are checked.
COVERED = (
    PACKAGE / "types.py",
    PACKAGE / "errors.py",
    PACKAGE / "api",
    PACKAGE / "plugins.py",
    PACKAGE / "user_code.py",
    PACKAGE / "algorithms",
    PACKAGE / "cli",
    PACKAGE / "clinic",
    PACKAGE / "config",
    PACKAGE / "data",
    PACKAGE / "health",
    PACKAGE / "models",
    PACKAGE / "observe",
    PACKAGE / "ops",
    PACKAGE / "rewards",
    PACKAGE / "rollout",
    PACKAGE / "run",
    PACKAGE / "sync",
    PACKAGE / "train",
    PACKAGE / "workers",
    PACKAGE / "columns.py",
    ROOT / "bench",
    ROOT / "examples",
    ROOT / "tests" / "support",
)
# Parts of covered folders that are not rewritten yet. Remove a line once its text is.
NOT_YET: tuple[Path, ...] = ()
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
)
# After "of its own" these show that it stands for "separate": "a process of its own that ends".
FUNCTION_WORDS = "and|are|at|by|for|from|if|in|is|on|or|so|that|to|when|where|which|with"
# Words that only this project gave their meaning, and the words to use instead.
PRIVATE_WORDS = {
    r"kin": "variant, similar",
    r"spells?": "episode",
    r"parcels?": "bucket",
    r"(?<!line )feeds?(?!-)": "input, source",
    r"troubles?": "failure, problem",
    r"told": "reported, passed",
    r"tells? apart": "distinguish",
    r"mend(s|ed|ing)?": "fix, repair, cure",
    r"befalls?": "affect",
    r"dear": "expensive",
    r"anew": "again",
    r"go(es)? on|went on": "continue, resume",
    rf"of (its|their|one's|your|our) own(?=[.,:;)]|$| ({FUNCTION_WORDS})\b)": "own, separate",
    r"ways? out": "remedy, how to fix it",
    r"way in": "entry point",
    r"by (which|another|this|the same) way": "how, through",
    r"on (its|their) way": "in flight, being sent",
    r"go(es)? (this|that|the same) way": "take this path",
    r"to the bit": "bitwise",
    r"passed over": "skipped, discarded",
    r"(taken?|takes|took) back": "reverted",
    r"(lie|lies|laid|lay) end to end": "concatenated, packed",
    r"for want of": "for lack of",
    r"last words": "last lines",
    r"leavings": "left-over files",
    r"of (now|then)": "current, earlier",
    r"but for": "except for",
    r"(?<=, )say(?=[,.)]|$)": "for example",
    r"in so many words": "explicitly",
}
# A first word that makes a noun phrase of the sentence: "What a run does", "Of this rank".
NOUN_PHRASES = {"What", "Which", "Of", "Whose", "Whom", "How", "Where", "Whether", "When", "Who"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`+[^`]*`+|\]\([^)]*\)|<[^>\s]+>")
PATTERNS = {
    re.compile(rf"\b(?:{word})\b", re.IGNORECASE): PRIVATE_WORDS[word] for word in PRIVATE_WORDS
}
ANY_PRIVATE = re.compile(rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)


@cache
def sources() -> list[Path]:
    found = (
        file for place in COVERED for file in ([place] if place.suffix else place.rglob("*.py"))
    )
    wanted = (file for file in found if not any(file.is_relative_to(place) for place in NOT_YET))
    return sorted(file for file in wanted if text_of(file).strip())


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring."""
    for node in nodes:
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def help_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield help texts of config keys and options, and the meanings in catalogues."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        values = [word.value for word in node.keywords if word.arg == "help"]
        if isinstance(node.func, ast.Name) and node.func.id in ("MetricInfo", "EventInfo"):
            values += node.args
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield what people read in a source, with its line, if it may have a private word."""
    source = text_of(file)
    # Tokenising is slow, and most files have none of the words anywhere.
    if not ANY_PRIVATE.search(" ".join(source.split())):
        return
    yield from docstrings(nodes_of(file))
    yield from comments(source)
    yield from help_texts(nodes_of(file))


def private_words(text: str) -> list[str]:
    """Return the private words of a text, each with its standard word. Code is ignored."""
    prose = " ".join(CODE.sub(" ", text).split())
    if not ANY_PRIVATE.search(prose):
        return []
    return [
        f"{match.group()!r} -> {standard}"
        for pattern, standard in PATTERNS.items()
        for match in pattern.finditer(prose)
    ]


def why_unclear(text: str) -> str:
    """Return what is wrong with the first sentence of a docstring; empty if nothing is."""
    first = " ".join(text.split("\n\n")[0].split())
    word = first.split()[0]
    if word in NOUN_PHRASES:
        return f"begins with {word!r}: begin with a verb or a subject"
    if word.isalpha() and word.islower():
        return "begins with a small letter"
    if not re.search(r"[.?!:](\s|$|\))", first):
        return "the first sentence has no period"
    return ""


def test_every_covered_place_exists() -> None:
    assert [place for place in COVERED if not place.exists()] == []
    assert len(sources()) > 150
    assert len(PAGES) > 10


def test_docstrings_begin_with_a_sentence() -> None:
    found = [
        f"{name_of(file)}:{line} {why}: {text.splitlines()[0]}"
        for file in sources()
        for line, text in docstrings(nodes_of(file))
        if (why := why_unclear(text))
    ]
    assert not found, "\n" + "\n".join(found)


def test_texts_in_the_sources_use_standard_words() -> None:
    found = [
        f"{name_of(file)}:{line} {word}: {' '.join(text.split())[:90]}"
        for file in sources()
        for line, text in texts_of(file)
        for word in private_words(text)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_standard_words(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = [
        f"{word}: {' '.join(paragraph.split())[:90]}"
        for paragraph in prose.split("\n\n")
        for word in private_words(paragraph)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("What a run leaves behind.", "begins with"),
        ("Of this rank.", "begins with"),
        ("the weights.", "small letter"),
        ("Return the weights", "no period"),
        ("Return the weights.", ""),
        ("`homeostat train`: start a run.", ""),
        ("vLLM in its own process.", ""),
        ("Return [N, D]:\n\n    x @ w", ""),
    ],
)
def test_an_unclear_beginning_is_found(text: str, problem: str) -> None:
    assert problem in why_unclear(text)
    assert bool(why_unclear(text)) == bool(problem)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Kin of tests that run always", ["'Kin' -> variant, similar"]),
        (
            "a parcel, and a process\nof its own",
            ["'parcel' -> bucket", "'of its own' -> own, separate"],
        ),
        ("the event `reward_trouble`; reward_trouble; troubleshooting", []),
        ("a line feed is no feed", ["'feed' -> input, source"]),
        ("on a GPU, say.", ["'say' -> for example"]),
        ("say what is wrong", []),
    ],
)
def test_a_private_word_is_found(text: str, words: list[str]) -> None:
    assert private_words(text) == words
