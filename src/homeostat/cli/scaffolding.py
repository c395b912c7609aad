"""The files of a new rule or signature, and where they go in a source checkout.

Everything is computed from the files of the checkout, before any of them is written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import homeostat
from homeostat.cli import scaffold_templates as templates
from homeostat.errors import HomeostatError
from homeostat.health.finding import Family
from homeostat.health.names import FOREIGN
from homeostat.health.registry import RETIRED
from homeostat.health.signatures.source import pattern_problem
from homeostat.health.vocabulary import FAMILY_OF
from homeostat.observe.names import describe

HEALTH = Path("src") / "homeostat" / "health"
CASES = Path("tests") / "health"
PAGES = Path("docs") / "generate.py"
_CODE_LINE = re.compile(r'^code = "([A-Z]{3}\d{3})"$', re.M)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A new code, the files with their new content, and the command that runs its test."""

    code: str
    files: dict[Path, str]
    test: str


def find_checkout() -> Path:
    """Return the source checkout that this homeostat is imported from."""
    package = Path(homeostat.__file__).resolve().parent
    root = package.parents[1]
    if all((root / part).exists() for part in (HEALTH, CASES, PAGES)):
        return root
    raise HomeostatError(
        f"homeostat is imported from {package}, which is not part of a source checkout: there are "
        "no tests and no pages to write to. Clone the repository, run `make setup` in it, and call "
        "its .venv/bin/homeostat."
    )


def new_signature(root: Path, *, name: str, family: Family, text: str) -> LaidOut:
    """Lay out a stanza, a case with its words and one that must not fire, and its name."""
    if problem := pattern_problem(text):
        raise HomeostatError(f"--text: {problem}")
    file = root / HEALTH / "signatures" / f"{family.value}.toml"
    cases = root / CASES / "signatures" / f"{family.value}.toml"
    code = _free_error_code(file)
    said = text.replace(" && ", " ").replace("*", " ... ")
    stanza = templates.SIGNATURE.format(code=code, name=name, text=json.dumps(text))
    case = templates.SIGNATURE_CASES.format(code=code, text=said.replace("'''", "' ' '"))
    files = {
        file: _appended(file, stanza, head=f"# Signatures of the family {family.value}.\n"),
        cases: _appended(cases, case, head=f"# Logs of the family {family.value}.\n"),
    }
    test = f"python -m pytest -k {code} tests/health/test_signatures.py"
    return LaidOut(code, files | _named(root, name, family), test)


def new_rule(root: Path, *, name: str, family: Family, metric: str) -> LaidOut:
    """Lay out a rule that judges a metric by a limit, its Markdown cases, and its name."""
    if describe(metric) is None and metric not in FOREIGN:
        raise HomeostatError(
            f"--metric is {metric!r}: a rule reads a metric of docs/reference/metrics.md or of "
            "health/names.py. Name one; the rule may read others, too, once it is laid out."
        )
    folder = root / HEALTH / "rules" / family.value
    code = _free_rule_code(folder)
    file = folder / f"{code.lower()}_{name.replace('-', '_')}.py"
    known = {"code": code, "name": name, "family": family.name, "metric": metric}
    files = {
        file: templates.RULE.format(**known),
        root / CASES / f"{code.lower()}.md": templates.RULE_CASES.format(**known),
    }
    test = f"python -m pytest -k {code} tests/health/test_rules.py"
    return LaidOut(code, files | _named(root, name, family), test)


def write(laid: LaidOut) -> None:
    """Write the files of what was laid out."""
    for file, content in laid.files.items():
        file.write_text(content, encoding="utf-8")


def generate(root: Path) -> None:
    """Write compiled.json and the reference, in a process that loads the new files."""
    command = [sys.executable, str(root / PAGES)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HomeostatError(f"{PAGES} failed:\n{done.stderr[-2000:]}")


def _free_error_code(file: Path) -> str:
    """Return the next free code after those of a family's file; after all codes for a new file."""
    texts = {one: one.read_text(encoding="utf-8") for one in file.parent.glob("*.toml")}
    taken = {code for text in texts.values() for code in _CODE_LINE.findall(text)}
    own = _CODE_LINE.findall(texts.get(file, ""))
    return _next_free(own or taken, taken)


def _free_rule_code(folder: Path) -> str:
    """Return the next free code with the letters that the family's rules have."""
    own = {file.name[:6].upper() for file in folder.glob("[a-z][a-z][a-z][0-9][0-9][0-9]_*.py")}
    return _next_free(own, own)


def _next_free(own: Iterable[str], taken: Iterable[str]) -> str:
    """Return the first code above the highest of `own` that was never used; after 999 from 001 on.

    `RETIRED` keeps the codes of removed rules, which old reports may still contain, from being
    used again."""
    highest = max(own)
    letters, last = highest[:3], int(highest[3:])
    used = {*taken, *RETIRED}
    codes = (f"{letters}{number:03}" for number in (*range(last + 1, 1000), *range(1, last)))
    return next(code for code in codes if code not in used)


def _named(root: Path, name: str, family: Family) -> dict[Path, str]:
    """Add a name to the vocabulary; nothing if it has the name already."""
    if name in FAMILY_OF:
        return {}
    file = root / HEALTH / "vocabulary.py"
    before, opening, after = file.read_text(encoding="utf-8").partition(
        f"    Family.{family.name}: {{\n"
    )
    assert opening, f"{file} has no words of the family {family.value}"
    words, closing, rest = after.partition("    },\n")
    line = f'        "{name}": "{templates.PLACEHOLDER}: what it means, in one sentence.",\n'
    return {file: before + opening + words + line + closing + rest}


def _appended(file: Path, text: str, *, head: str) -> str:
    before = file.read_text(encoding="utf-8") if file.exists() else head
    return f"{before.rstrip()}\n\n{text}"
