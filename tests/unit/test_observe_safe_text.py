"""No text that is not ours steers a terminal: at every border where people read it."""

from __future__ import annotations

import io
import logging
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import homeostat
from homeostat.cli.main import main
from homeostat.observe.console import PlainView
from homeostat.observe.logs import logging_to
from homeostat.observe.progress import Progress
from homeostat.observe.safe_text import safe_page, safe_text
from homeostat.observe.terminal import SafeConsole
from homeostat.observe.transcript import RunLabel

SOURCES = Path(homeostat.__file__).parent
# Clear the screen, write to the clipboard, rename the window, C1 for the same, reorder, hide.
EVIL = (
    "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x9c\x9b2J\x08\r\x7f"
    "\u202e\u2066\u200f\u2028\ud800\xad"
)
# Files that echo past the console: JSON, texts of ours alone, or what safe_text has gone over.
ECHOES = {
    "app.py": "the version",
    "chat.py": "safe_text, or texts of ours",
    "check.py": "JSON",
    "clinic.py": "JSON",
    "completions.py": "JSON",
    "doctor.py": "safe_page",
    "env.py": "JSON, or safe_text",
    "estimate.py": "JSON",
    "explain.py": "pages of ours",
    "export.py": "safe_text",
    "generate.py": "JSON, or safe_text",
    "generation_options.py": "a text of ours",
    "import_.py": "JSON, or safe_text",
    "inspect.py": "JSON",
    "layers.py": "JSON; the rest on the console of inspect",
    "main.py": "JSON, or safe_text",
    "rules.py": "rules of ours",
    "scaffold.py": "a checked name, and files of ours",
    "schema.py": "JSON",
    "serve.py": "safe_text",
    "train.py": "JSON",
    "dashboard.py": "safe_text",
    "dev.py": "a number, and a name of ours",
    "docs.py": "safe_text, or texts of ours",
    "eval.py": "JSON, or numbers",
    "new.py": "safe_text",
    "push.py": "safe_text",
    "watch.py": "safe_page, or safe_text",
    "launched.py": "safe_text",
}
JOINERS = "\u200c\u200d"
anything = st.text(st.characters(), max_size=60)
nasty = st.lists(anything | st.sampled_from([*EVIL, EVIL, "\x1b[1;31m", "\n", "\t"])).map("".join)


def is_safe(text: str) -> bool:
    kinds = {unicodedata.category(char) for char in text if char not in f"\n\t{JOINERS}"}
    return not kinds & {"Cc", "Cs", "Zl", "Zp"} and not set(text) & set(EVIL) - set(
        "[]2J;52c;ZXZpbA==0title"
    )


@given(nasty)
def test_nothing_is_left_that_steers(text: str) -> None:
    found = safe_text(text)
    assert is_safe(found)
    assert safe_text(found) == found
    found.encode("utf-8")
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN"}
    odd = [char for char in found if unicodedata.bidirectional(char) in bidi]
    assert set(odd) <= set(JOINERS) or all(unicodedata.category(char) == "Cn" for char in odd)


@given(
    st.text(st.characters(categories=["L", "M", "N", "P", "S"]) | st.sampled_from("\n\t \u200d"))
)
def test_what_people_write_stays_as_it_is(text: str) -> None:
    assert safe_text(text) == text


@given(nasty)
def test_a_page_keeps_the_colours_that_are_ours_and_no_others(text: str) -> None:
    found = safe_page(f"\x1b[1;31mred\x1b[0m {text}")
    assert found.startswith("\x1b[1;31mred\x1b[0m ")
    assert is_safe(re.sub("\x1b\\[(?:1;3[1236]|[012])m", "", found))


def console(file: io.StringIO, *, terminal: bool = True) -> SafeConsole:
    return SafeConsole(file=file, force_terminal=terminal, width=80, color_system="truecolor")


def printed(file: io.StringIO) -> str:
    """What was written, without the colours that Rich itself puts in."""
    return re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
@given(text=nasty)
def test_a_console_shows_it_as_text(text: str, terminal: bool) -> None:
    file = io.StringIO()
    shown = console(file, terminal=terminal)
    shown.print(text, markup=False)
    shown.print(Text(text, style="bold red"))
    table = Table(text, title=text)
    table.add_row(Text(text))
    shown.print(table)
    assert is_safe(printed(file))


def test_log_and_console_log_show_it_as_text(tmp_path: Path) -> None:
    # pytest hands logged text from one process to another, which halves of surrogates do not pass.
    evil = EVIL.encode(errors="ignore").decode()
    for terminal in (True, False):
        file, log_file = io.StringIO(), tmp_path / f"console_{terminal}.log"
        with logging_to(console(file, terminal=terminal), level="info", console_log=log_file):
            try:
                raise ValueError(evil)
            except ValueError:
                logging.getLogger("homeostat.x").exception("it said: %s", evil)
            logging.getLogger("other").warning(evil)
        for text in (printed(file), log_file.read_text(encoding="utf-8")):
            assert is_safe(text)
            assert "\\x1b]52" in text


def test_a_view_shows_events_of_evil_rewards_as_text() -> None:
    file = io.StringIO()
    label = RunLabel("run", "model", 9, 0)
    view = PlainView(console(file), label, Progress("run", 9, 0, step=0))
    fields = {"reward": EVIL, "failure": "exception", "message": EVIL, "prompt": EVIL}
    view.event("reward_trouble", 1, fields)
    assert is_safe(printed(file))
    assert "x1b" in printed(file)


@pytest.mark.parametrize("verb", ["doctor", "check"])
def test_an_error_of_the_command_line_is_shown_as_text(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / "no\x1b]52;c;aGk=\x07\u202e.yaml")
    monkeypatch.setattr(sys, "argv", ["homeostat", verb, name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = "".join(capsys.readouterr())
    assert is_safe(said)
    assert "x1b]52" in said


def test_a_log_that_the_doctor_quotes_is_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's name is evil, too, and so are a setting and the error that ended the run."""
    log = tmp_path / "a\x1b]0;x\x07.log"
    evil = EVIL.replace("\ud800", "")
    log.write_text(
        f"model_name_or_path: {evil}\n{{'loss': 1.0, 'epoch': 0.1}}\n"
        f'Traceback (most recent call last):\n  File "{evil}.py", line 1, in <module>\n'
        f"ValueError: {evil} went wrong\n"
    )
    monkeypatch.setattr(sys, "argv", ["homeostat", "doctor", str(log)])
    with pytest.raises(SystemExit):
        main()
    assert is_safe("".join(capsys.readouterr()))


def test_everything_for_people_goes_through_a_safe_console() -> None:
    """A console of any other kind would be a hole, and so would an echo of what is not ours."""
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        is_safe_itself = "class SafeConsole(Console)" in text
        assert is_safe_itself or not re.search(r"(?<![\w.])Console\(", text), file
        if "typer.echo(" in text:
            assert file.name in ECHOES, f"{file}: print on a SafeConsole, or say here why not"
