"""Messages that libraries raise: found in their sources, labelled, and recognised in a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from homeostat.cli import library_messages as collecting
from homeostat.cli.dev import app
from homeostat.cli.verbs import app as main_app
from homeostat.errors import HomeostatError
from homeostat.health.diagnose import diagnose
from homeostat.health.failures import library_messages as known
from homeostat.health.finding import Confidence, Level
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.vocabulary import FAMILY_OF

SOURCE = """
def check(self, name, sizes):
    if name not in KNOWN:
        raise ValueError(f"The glorp scheduler {name} has no whirl; one of {KNOWN} has.")
    assert sizes, "every glorp needs the sizes of its flurbs"
    if sizes[0] > 4:
        raise errors.GlorpError("flurb number %d outgrew its zorbing glorp" % sizes[0])
    if sizes[0] < 0:
        raise GlorpError("flurb {} shrank below its zorbing " "glorp".format(sizes[0]))
    raise ValueError(f"{name} is bad")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "glorp"
    (folder / "tests").mkdir(parents=True)
    (folder / "core.py").write_text(SOURCE)
    (folder / "template.py").write_text("class {{name}}:")
    (folder / "tests" / "test_core.py").write_text(
        'raise ValueError("messages of tests are left out of the list")'
    )
    return folder


def test_messages_are_found_in_the_sources_of_a_package(package: Path) -> None:
    found = {(one.exception, one.message) for one in collecting.raised_in(package)}
    assert found == {
        ("ValueError", "The glorp scheduler {...} has no whirl; one of {...} has."),
        ("AssertionError", "every glorp needs the sizes of its flurbs"),
        ("GlorpError", "flurb number %d outgrew its zorbing glorp"),
        ("GlorpError", "flurb {} shrank below its zorbing glorp"),
    }


def test_only_messages_that_the_doctor_cannot_read_are_listed(package: Path) -> None:
    (package / "gone.py").symlink_to(package / "nowhere.py")
    (package / "folder.py").mkdir()
    (package / "core.py").write_text(
        'raise ValueError("zorbing glorps outgrew their flurbs")\n'
        'raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")\n'
    )
    listed = CliRunner().invoke(app, ["list-messages", str(package)]).stdout
    assert listed == "glorp\t?\tzorbing glorps outgrew their flurbs\n"


def test_a_package_that_is_not_there_is_refused() -> None:
    with pytest.raises(HomeostatError, match="neither an installed package nor a folder"):
        collecting.folder_of("no-such-package")


def test_wrong_labels_are_all_reported_and_unlabelled_lines_skipped() -> None:
    lines = [
        "glorp\t?\tnobody has labelled this message yet",
        "glorp\tno-such-illness\tthe flurb outgrew its zorbing glorp",
        "glorp\tunknown-setting",
        "\tunknown-setting\tthe flurb outgrew its zorbing glorp",
    ]
    with pytest.raises(HomeostatError) as told:
        collecting.parse_labels(lines)
    assert "line 2: no-such-illness is not in" in str(told.value)
    assert "line 3: 2 columns" in str(told.value)
    assert "line 4: the library has no name" in str(told.value)
    assert collecting.parse_labels(lines[:1]) == []


def test_labelled_messages_are_added_and_corrected(tmp_path: Path) -> None:
    file = tmp_path / collecting.MESSAGES
    file.parent.mkdir(parents=True)
    file.write_text(known.FILE.read_text(encoding="utf-8"), encoding="utf-8")
    before = len(known.known_messages())
    message = "zorbing flurb {...} outgrew its unglorped whirl"
    labels = collecting.parse_labels(
        [f"glorp\tsettings-exclusive\t{message}",
         "glorp\tunknown-setting\t{...} is not supported for this type"]
    )  # fmt: skip
    assert collecting.add(tmp_path, labels) == (1, 1)
    assert collecting.add(tmp_path, labels) == (0, 1)
    other = collecting.parse_labels([f"whirl\tunknown-setting, path-missing\t{message}"])
    assert collecting.add(tmp_path, other) == (0, 0)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == before + 1
    (line,) = (one for one in lines if "unglorped" in one)
    assert known.parse(line).names == ("unknown-setting", "path-missing")
    assert known.parse(line).libraries == ("glorp", "whirl")


def test_the_file_is_in_order_and_its_names_are_in_the_vocabulary() -> None:
    messages = known.known_messages()
    assert known.FILE.read_text(encoding="utf-8") == known.file_text(messages)
    assert {name for one in messages for name in one.names} <= FAMILY_OF.keys()
    assert all(len(one.words) >= known.MIN_WORDS for one in messages)


def test_a_message_is_known_with_any_values_and_not_inside_a_longer_text() -> None:
    said = "bfloat16 and fp16 modes cannot be simultaneously enabled"
    assert known.known_message(f"{said} (got True, True)") is not None
    assert known.known_message("bfloat16 and fp16 modes are both enabled") is None
    assert known.known_message("8 active DP workers are available for routing") is None
    assert known.known_message("No active DP workers are available for routing") is not None
    prose = " ".join(f"filler{number}" for number in range(40))
    assert known.known_message(f"{said} {prose}") is None


@pytest.mark.parametrize("one", known.known_messages()[:: len(known.known_messages()) // 40])
def test_messages_of_the_file_are_recognised(one: known.LibraryMessage) -> None:
    found = known.known_message(" ".join(sorted(one.words)))
    assert found is not None
    assert one.words <= found.words
    half = sorted(one.words)[: len(one.words) // 2]
    other = known.known_message(" ".join(half))
    assert other is None or other.words < one.words


def test_the_doctor_names_what_the_message_states_and_who_raises_it() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/site-packages/deepspeed/runtime/config.py", line 9, in __init__\n'
        "AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled\n"
    )
    (first, *_) = diagnose(read_text(text), RULES).findings
    assert (first.code, first.level) == ("VIT002", Level.WARN)
    assert first.causes[0].name == "settings-exclusive"
    assert "a message of deepspeed" in first.causes[0].why
    assert first.causes[0].guess is None


def test_the_verdict_names_the_illness_in_text_and_markdown(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/site-packages/deepspeed/runtime/config.py", line 9, in __init__\n'
        "AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled\n"
    )
    for form, head in (("text", "MOST LIKELY"), ("markdown", "## Most likely")):
        said = CliRunner().invoke(main_app, ["doctor", str(log), "--format", form])
        assert f"{head} settings-exclusive" in said.stdout


def test_a_warning_is_information_and_comes_after_an_error() -> None:
    warning = (
        "WARNING: Dataloader state file not found at /ckpt. Skipping Dataloader state restoration."
    )
    (alone, *_) = diagnose(read_text(warning), RULES).findings
    assert alone.level is Level.INFO or alone.confidence is Confidence.HEURISTIC
    assert alone.causes[0].name == "resume-randomness-lost"
    error = "RuntimeError: expected scalar type Half but found Float"
    (first, *_) = diagnose(read_text(f"{warning}\n{error}"), RULES).findings
    assert first.causes[0].name == "dtype-mismatch"


def test_the_same_words_in_the_users_own_code_are_no_message_of_a_library() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/data/run/train.py", line 9, in <module>\n'
        '    raise ValueError("bfloat16 and fp16 modes cannot be simultaneously enabled")\n'
        "ValueError: bfloat16 and fp16 modes cannot be simultaneously enabled\n"
    )
    found = diagnose(read_text(text), RULES).findings
    assert not any("a message of" in cause.why for one in found for cause in one.causes)
